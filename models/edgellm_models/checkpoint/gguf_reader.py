"""A GGUF model as a Checkpoint: weights are views of the mapped file; rare types are held as Q8_0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME, TypeRole, supported_type_names
from edgellm_models.architectures import gguf_architecture
from edgellm_models.checkpoint.ggml_conversion import convert_to_q8_0, held_bytes
from edgellm_models.checkpoint.gguf_header import TensorDeclaration
from edgellm_models.checkpoint.gguf_shards import Shard, open_shards
from edgellm_models.checkpoint.mapped_file import MappedFile
from edgellm_models.checkpoint.reader import TensorInfo
from edgellm_models.checkpoint.tensor_names import is_canonical, required_tensors
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.metadata_values import metadata_int, shown

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight, DenseWeight


@dataclass(frozen=True)
class _Located:
    file: MappedFile
    declaration: TensorDeclaration


class GGUFCheckpoint:
    """An opened GGUF model, single or split. Made by ``open_gguf``; implements reader.Checkpoint."""

    file_format = "gguf"

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = shards[0].header.metadata
        self.architecture = gguf_architecture(self.metadata, str(path))
        self._files = tuple(shard.file for shard in shards)
        self.file_bytes = sum(file.size for file in self._files)
        self._located = {
            declaration.name: _Located(shard.file, declaration)
            for shard in shards
            for declaration in shard.header.tensors
        }
        self._infos = {name: _info(found.declaration) for name, found in self._located.items()}
        _check_complete(self.architecture, self.metadata, self._infos, path)
        _check_types(self.architecture, self._located.values(), path)
        self.notices: Sequence[Notice] = (
            *(notice for shard in shards for notice in shard.header.notices),
            *_unknown_notice(self.architecture, self._infos, path),
            *_conversion_notice(self.architecture, self._located.values(), path),
        )

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by canonical name, those without one under the file's own."""
        return self._infos

    def has(self, name: str) -> bool:
        return name in self._located

    def weight(self, name: str) -> DenseWeight | BlockQuantWeight:
        """A 2-D weight [N, K]: a view of the file, or Q8_0 made from a type that has no kernels."""
        from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, DenseWeight

        found = self._find(name)
        kind, shape = found.declaration.ggml_type, found.declaration.shape
        if len(shape) != 2:
            raise BadInputError(
                f"{self.path}: tensor {name!r} has the shape {list(shape)}, a matrix is needed"
            )
        if kind.role is TypeRole.DENSE:
            return DenseWeight(_dense_view(found))
        if kind.role is TypeRole.BLOCK:
            return BlockQuantWeight(_byte_rows(found), BlockLayout(kind.name), shape[1])
        if kind.role is TypeRole.CONVERTED:
            scale = self._scale_of(name)
            return convert_to_q8_0(_byte_rows(found), kind, shape[1], scale, f"{self.path}: tensor {name!r}")
        raise BadInputError(_unsupported_message(self.path, found.declaration))

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor as f32 [N]; a view of the file where it is f32 there."""
        import torch

        found = self._find(name)
        declaration = found.declaration
        if sum(extent != 1 for extent in declaration.shape) > 1:
            raise BadInputError(
                f"{self.path}: tensor {name!r} has the shape {list(declaration.shape)}, a vector is needed"
            )
        if declaration.ggml_type.role is not TypeRole.DENSE:
            raise BadInputError(
                f"{self.path}: tensor {name!r} has the type {declaration.ggml_type.name}; a vector must be "
                "F32, F16 or BF16"
            )
        return _dense_view(found).flatten().to(torch.float32)

    def release_pages(self) -> None:
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Forget the files; a mapping goes when the last tensor made from it does."""
        self._located = {}

    def _find(self, name: str) -> _Located:
        found = self._located.get(name)
        if found is None:
            raise BadInputError(f"{self.path}: the tensor {name!r} is missing from the file")
        return found

    def _scale_of(self, name: str) -> float:
        """The factor that FP4 and ternary files may keep beside a weight, one number for the whole tensor."""
        companion = _scale_name(name)
        return float(self.vector(companion)[0]) if companion in self._located else 1.0


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file, or the split model that any of its shards belongs to; every header is checked
    first."""
    return GGUFCheckpoint(path, open_shards(path))


def _info(declaration: TensorDeclaration) -> TensorInfo:
    return TensorInfo(
        name=declaration.name,
        file_name=declaration.name,
        shape=declaration.shape,
        type_name=declaration.ggml_type.name,
        nbytes=declaration.nbytes,
    )


def _check_complete(
    architecture: str, metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo], path: Path
) -> None:
    """BadInputError names the first missing tensor; a huge block_count costs nothing."""
    try:
        num_layers = metadata_int(metadata, f"{architecture}.block_count", minimum=1)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    for name in required_tensors(architecture, num_layers):
        if name not in infos:
            raise BadInputError(
                f"{path}: the tensor {name!r} is missing ({architecture} with {num_layers:,} layers by its "
                f"metadata, {len(infos)} tensors in the file)"
            )


def _check_types(architecture: str, located: Iterable[_Located], path: Path) -> None:
    """Every weight of the model has a type that is read, and nothing scales one behind our back."""
    found = {entry.declaration.name: entry.declaration for entry in located}
    for name, declaration in found.items():
        if not is_canonical(architecture, name):
            continue
        role = declaration.ggml_type.role
        if role in (TypeRole.UNSUPPORTED, TypeRole.INTEGER):
            raise BadInputError(_unsupported_message(path, declaration))
        companion = found.get(_scale_name(name))
        if companion is None:
            continue
        if role is not TypeRole.CONVERTED or set(companion.shape) != {1}:
            raise BadInputError(
                f"{path}: tensor {name!r} ({declaration.ggml_type.name}) is scaled by {companion.name!r} "
                f"{list(companion.shape)}, which is supported for one number and FP4 or ternary types only"
            )


def _scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight") + ".scale"


def _unsupported_message(path: Path, declaration: TensorDeclaration) -> str:
    kind = declaration.ggml_type
    return (
        f"{path}: tensor {declaration.name!r} has the type {kind.name} (id {kind.type_id}), which is not "
        f"read as a weight; supported: {', '.join(supported_type_names())}"
    )


def _unknown_notice(architecture: str, infos: Mapping[str, TensorInfo], path: Path) -> list[Notice]:
    """One notice for tensors that the architecture has no use for; plain integer tables are skipped without
    one."""
    unknown = [
        name
        for name, info in infos.items()
        if not is_canonical(architecture, name)
        and GGML_TYPES_BY_NAME[info.type_name].role is not TypeRole.INTEGER
        and not (name.endswith(".scale") and name.removesuffix(".scale") + ".weight" in infos)
    ]
    if not unknown:
        return []
    detail = (
        f"{path.name}: {len(unknown)} tensors that {architecture} does not use are ignored: {shown(unknown)}"
    )
    return [Notice("unknown_tensors", detail)]


def _conversion_notice(architecture: str, located: Iterable[_Located], path: Path) -> list[Notice]:
    converted = [
        entry.declaration
        for entry in located
        if entry.declaration.ggml_type.role is TypeRole.CONVERTED
        and is_canonical(architecture, entry.declaration.name)
    ]
    if not converted:
        return []
    kinds = ", ".join(sorted({declaration.ggml_type.name for declaration in converted}))
    in_file = sum(declaration.nbytes for declaration in converted)
    held = sum(held_bytes(declaration.shape) for declaration in converted)
    detail = (
        f"{path.name}: {len(converted)} tensors of type {kinds} are held as Q8_0: {held / 1e6:,.1f} MB of "
        f"memory instead of {in_file / 1e6:,.1f} MB in the file"
    )
    return [Notice("held_as_q8_0", detail)]


def _dense_view(found: _Located) -> torch.Tensor:
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    declaration = found.declaration
    return found.file.tensor(dtypes[declaration.ggml_type.name], declaration.shape, declaration.start)


def _byte_rows(found: _Located) -> torch.Tensor:
    import torch

    declaration = found.declaration
    row_bytes = declaration.ggml_type.row_bytes(declaration.shape[-1])
    return found.file.tensor(torch.uint8, (declaration.nbytes // row_bytes, row_bytes), declaration.start)
