"""A Hugging Face folder with safetensors weights, dense or on integer grids, as a Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.architectures import hf_architecture
from edgellm_models.checkpoint.f8_weights import F8_DTYPES, SCALE_SUFFIXES, dequantize_f8, scale_block
from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.checkpoint.mapped_file import MappedFile
from edgellm_models.checkpoint.packed_linears import PackedFormat, PackedLinear, find_packed
from edgellm_models.checkpoint.quantization_methods import packed_format
from edgellm_models.checkpoint.reader import TensorInfo
from edgellm_models.checkpoint.safetensors_header import SafeTensor
from edgellm_models.checkpoint.safetensors_shards import WeightFile, open_weight_files
from edgellm_models.checkpoint.tensor_names import (
    block_stems,
    canonical_name,
    hf_name,
    is_canonical,
    is_vision,
    required_tensors,
)
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.metadata_values import metadata_int, shown

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import DenseWeight, Int4Weight, Int8Weight

DENSE_DTYPES = ("F32", "F16", "BF16")
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Tables that old checkpoints store and every loader computes."""


@dataclass(frozen=True)
class _Located:
    file: MappedFile
    tensor: SafeTensor


class FolderCheckpoint:
    """An opened Hugging Face folder. Made by ``open_folder``; implements reader.Checkpoint."""

    file_format = "safetensors"

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        files: tuple[WeightFile, ...],
        form: PackedFormat | None = None,
    ) -> None:
        self.path = path
        self.metadata = config
        self.architecture = hf_architecture(config, str(path / "config.json"))
        self._files = tuple(file.mapped for file in files)
        self.file_bytes = sum(file.size for file in self._files)
        self._by_file_name = {
            name: _Located(file.mapped, tensor) for file in files for name, tensor in file.tensors.items()
        }
        packed = {} if form is None else self._find_packed(form)
        self._packed: dict[str, PackedLinear] = {}
        self._located = self._by_canonical_name(packed)
        self._infos = {
            name: TensorInfo(
                name, found.tensor.name, found.tensor.shape, found.tensor.dtype, found.tensor.nbytes
            )
            for name, found in self._located.items()
        } | {
            name: TensorInfo(
                name,
                next(iter(linear.tensors.values())).name,
                (linear.out_features, linear.in_features),
                f"INT{linear.bits}",
                linear.nbytes,
            )
            for name, linear in self._packed.items()
        }
        self._check_complete()
        f8 = self._check_dtypes()
        self.notices: Sequence[Notice] = (*self._unknown_notice(), *self._f8_notice(f8))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by canonical name, those without one under the file's own."""
        return self._infos

    def has(self, name: str) -> bool:
        return name in self._infos

    def weight(self, name: str) -> DenseWeight | Int4Weight | Int8Weight:
        """A 2-D weight [N, K]: a view of the file, codes unpacked from it, or bf16 from F8 and its scales."""
        from edgellm_kernels.weights import DenseWeight
        from edgellm_models.checkpoint.packed_values import read_packed

        if name in self._packed:
            linear = self._packed[name]
            return read_packed(linear, self._view_packed, f"{self.path}: {linear.stem}")
        found = self._find(name)
        if len(found.tensor.shape) != 2:
            raise BadInputError(
                f"{found.file.path}: tensor {found.tensor.name!r} has the shape {list(found.tensor.shape)}, "
                "a matrix is needed"
            )
        if found.tensor.dtype in F8_DTYPES:
            return DenseWeight(self._dequantized(found))
        return DenseWeight(self._view(found))

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor as f32 [N]; a view of the file where it is f32 there."""
        import torch

        found = self._find(name)
        if sum(extent != 1 for extent in found.tensor.shape) > 1:
            raise BadInputError(
                f"{found.file.path}: tensor {found.tensor.name!r} has the shape {list(found.tensor.shape)}, "
                "a vector is needed"
            )
        return self._view(found).flatten().to(torch.float32)

    def release_pages(self) -> None:
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Forget the files; a mapping goes when the last tensor made from it does."""
        self._located = {}
        self._by_file_name = {}
        self._packed = {}

    def _find(self, name: str) -> _Located:
        found = self._located.get(name)
        if found is None:
            theirs = hf_name(self.architecture, name)
            also = f" ({theirs})" if theirs else ""
            raise BadInputError(f"{self.path}: the tensor {name!r}{also} is missing from the weights")
        return found

    def _view(self, found: _Located) -> torch.Tensor:
        import torch

        dtypes = {
            "F32": torch.float32,
            "F16": torch.float16,
            "BF16": torch.bfloat16,
            "F8_E4M3": torch.float8_e4m3fn,
            "F8_E5M2": torch.float8_e5m2,
        }
        tensor = found.tensor
        if tensor.dtype not in dtypes or 0 in tensor.shape:
            raise BadInputError(
                f"{found.file.path}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, not a "
                f"weight that is read; supported: {', '.join(DENSE_DTYPES)}"
            )
        return found.file.tensor(dtypes[tensor.dtype], tensor.shape, tensor.start)

    def _find_packed(self, form: PackedFormat) -> dict[str, PackedLinear]:
        tensors = {name: found.tensor for name, found in self._by_file_name.items()}
        return find_packed(form, tensors, self._read_sizes, str(self.path))

    def _read_sizes(self, name: str) -> list[int]:
        tensor = self._by_file_name[name].tensor
        if len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= 8:
            raise BadInputError(f"{self.path}: tensor {name!r} has the shape {list(tensor.shape)}")
        sizes: list[int] = self._view_packed(name).tolist()
        return sizes

    def _view_packed(self, name: str) -> torch.Tensor:
        """A tensor of a quantized linear by its name in the file."""
        import torch

        dtypes = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
        found = self._by_file_name[name]
        if found.tensor.dtype not in dtypes:
            return self._view(found)
        return found.file.tensor(dtypes[found.tensor.dtype], found.tensor.shape, found.tensor.start)

    def _by_canonical_name(self, packed: Mapping[str, PackedLinear]) -> dict[str, _Located]:
        """Dense tensors by name; fills ``_packed`` on the way."""
        located: dict[str, _Located] = {}
        parts = {tensor.name for linear in packed.values() for tensor in linear.tensors.values()}
        for stem, linear in packed.items():
            weight = f"{stem}.weight"
            key = (None if is_vision(weight) else canonical_name(self.architecture, weight)) or weight
            if key == "token_embd.weight":
                raise BadInputError(f"{self.path}: the embedding {stem!r} is quantized, which is not read")
            if key in self._packed or (weight in self._by_file_name and weight not in parts):
                raise BadInputError(f"{self.path}: the weight of {stem!r} is there twice")
            self._packed[key] = linear
        for name, found in self._by_file_name.items():
            if name in parts:
                continue
            canonical = None if is_vision(name) else canonical_name(self.architecture, name)
            key = canonical or name
            if key in located or key in self._packed:
                other = located[key].tensor.name if key in located else self._packed[key].stem
                raise BadInputError(
                    f"{self.path}: the tensors {other!r} and {name!r} are the same weight ({key})"
                )
            located[key] = found
        return located

    def _num_layers(self) -> int:
        text = self.metadata.get("text_config")
        config = text if isinstance(text, Mapping) else self.metadata
        try:
            return metadata_int(config, "num_hidden_layers", minimum=1)
        except BadInputError as error:
            raise BadInputError(f"{self.path / 'config.json'}: {error}") from None

    def _check_complete(self) -> None:
        """BadInputError names the first missing tensor; a huge num_hidden_layers costs nothing."""
        num_layers = self._num_layers()
        for name in required_tensors(self.architecture, num_layers):
            if name not in self._infos:
                raise BadInputError(
                    f"{self.path}: the tensor {hf_name(self.architecture, name)!r} is missing from the "
                    f"weights ({self.architecture} with {num_layers:,} layers of "
                    f"{len(block_stems(self.architecture))} weights by "
                    f"config.json, {len(self._by_file_name)} tensors in the files)"
                )

    def _check_dtypes(self) -> list[SafeTensor]:
        """Every weight is of a dtype that is read; F8 only with a scale. Returns the F8 tensors."""
        f8: list[SafeTensor] = []
        for name, found in self._located.items():
            if not is_canonical(self.architecture, name):
                continue
            tensor = found.tensor
            label = f"{found.file.path}: tensor {tensor.name!r}"
            if 0 in tensor.shape:
                raise BadInputError(f"{label} has a dimension of 0 ({list(tensor.shape)})")
            scale = self._scale_of(tensor)
            if tensor.dtype in F8_DTYPES:
                if scale is None:
                    raise BadInputError(
                        f"{label} is {tensor.dtype} without a scale ({tensor.name}_scale): its values are "
                        f"not known; supported: {', '.join(DENSE_DTYPES)}, and F8 with scales"
                    )
                if len(tensor.shape) != 2 or scale.tensor.dtype not in DENSE_DTYPES:
                    raise BadInputError(
                        f"{label} is F8 {list(tensor.shape)} with {scale.tensor.dtype} scales"
                    )
                scale_block(tensor.shape, scale.tensor.shape, label)
                f8.append(tensor)
            elif tensor.dtype not in DENSE_DTYPES:
                raise BadInputError(
                    f"{label} is {tensor.dtype}, which is not read as a weight; supported: "
                    f"{', '.join(DENSE_DTYPES)}, and F8 with scales"
                )
            elif scale is not None:
                raise BadInputError(
                    f"{label} ({tensor.dtype}) is scaled by {scale.tensor.name!r}, which is supported for F8 "
                    "only"
                )
        return f8

    def _scale_of(self, tensor: SafeTensor) -> _Located | None:
        names = (tensor.name + suffix for suffix in SCALE_SUFFIXES)
        return next((self._by_file_name[name] for name in names if name in self._by_file_name), None)

    def _dequantized(self, found: _Located) -> torch.Tensor:
        scale = self._scale_of(found.tensor)
        assert scale is not None, found.tensor.name
        block = scale_block(found.tensor.shape, scale.tensor.shape, str(found.file.path))
        return dequantize_f8(self._view(found), self._view(scale), block)

    def _unknown_notice(self) -> list[Notice]:
        notices = []
        expected = (*_BUFFERS, *(".weight" + suffix for suffix in SCALE_SUFFIXES))
        extra = [
            name
            for name in self._infos
            if not is_canonical(self.architecture, name) and not name.endswith(expected)
        ]
        vision = [name for name in extra if is_vision(name)]
        if vision:
            detail = f"{self.path.name}: {len(vision)} vision tensors are ignored: only the text part runs"
            notices.append(Notice("vision_ignored", detail))
        unknown = [name for name in extra if not is_vision(name)]
        if unknown:
            what = f"{len(unknown)} tensors that {self.architecture} does not use are ignored"
            notices.append(Notice("unknown_tensors", f"{self.path.name}: {what}: {shown(unknown)}"))
        return notices

    def _f8_notice(self, f8: list[SafeTensor]) -> list[Notice]:
        if not f8:
            return []
        in_file = sum(tensor.nbytes for tensor in f8)
        detail = (
            f"{self.path.name}: {len(f8)} F8 tensors are held as bf16: {2 * in_file / 1e6:,.1f} MB of memory "
            f"instead of {in_file / 1e6:,.1f} MB in the file"
        )
        return [Notice("f8_held_as_bf16", detail)]


def open_folder(path: Path) -> FolderCheckpoint:
    """Open a Hugging Face folder: config.json, then the refusals, then the headers of its weight files."""
    config_path = path / "config.json"
    if not config_path.exists():
        raise BadInputError(_not_a_model_folder(path))
    config = read_json_object(config_path)
    hf_architecture(config, str(config_path))
    form = packed_format(path, config)
    return FolderCheckpoint(path, config, open_weight_files(path), form)


def _not_a_model_folder(path: Path) -> str:
    gguf_files = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
    if gguf_files:
        return f"{path}: this folder holds GGUF files; name one of them: {shown(gguf_files)}"
    if (path / "adapter_config.json").exists():
        return f"{path}: this is a LoRA adapter, not a model; merge it into its base model first"
    return f"{path}: this folder holds no config.json, so it is no Hugging Face model"
