"""What a model's headers say where its weights may be missing: enough to plan, not enough to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.reader import TensorInfo
from edgellm_models.errors import BadInputError, Notice


@dataclass(frozen=True)
class ModelHeader:
    """Metadata and declared tensors of a model."""

    file_format: str
    """``gguf`` or ``safetensors``, as in Checkpoint."""
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    """By canonical name; empty where only a config.json is there."""
    notices: tuple[Notice, ...] = ()


def read_header(path: Path) -> ModelHeader:
    """The header of a GGUF file, whole or cut off behind it, of a Hugging Face folder, or a config.json.

    A folder without weights gives its config.json. Raises as open_checkpoint does.
    """
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.checkpoint.mapped_file import file_error, is_folder

    path = Path(path)
    try:
        if path.name == "config.json" or (is_folder(path) and _has_no_weights(path)):
            return _config_only(path if path.name == "config.json" else path / "config.json")
        if not is_folder(path):
            cut = _cut_gguf(path)
            if cut is not None:
                return cut
    except OSError as error:
        raise file_error(Path(error.filename or path), error) from error
    checkpoint = open_checkpoint(path)
    try:
        tensors = dict(checkpoint.tensors())
        return ModelHeader(checkpoint.file_format, checkpoint.metadata, tensors, tuple(checkpoint.notices))
    finally:
        checkpoint.close()


def _has_no_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))


def _config_only(path: Path) -> ModelHeader:
    from edgellm_models.checkpoint.json_files import read_json_object

    detail = f"{path}: no weights beside it; their size is estimated from the shape"
    return ModelHeader("safetensors", read_json_object(path), {}, (Notice("no_weights", detail),))


def _cut_gguf(path: Path) -> ModelHeader | None:
    """The header of a single GGUF file whose data is not all there; None for every other file."""
    from edgellm_models.checkpoint.gguf_header import declared_end, read_gguf_header
    from edgellm_models.checkpoint.mapped_file import MappedFile
    from edgellm_models.checkpoint.sniff import FileKind, sniff_file

    if sniff_file(path).kind is not FileKind.GGUF:
        return None
    mapped = MappedFile(path)
    header = read_gguf_header(mapped.buffer, mapped.size, str(path), complete=False)
    missing = declared_end(header) - mapped.size
    if missing <= 0 or header.metadata.get("split.count", 1) not in (0, 1):
        return None
    if not header.tensors:
        raise BadInputError(f"{path}: the header declares no tensors")
    tensors = {
        tensor.name: TensorInfo(tensor.name, tensor.name, tensor.shape, tensor.ggml_type.name, tensor.nbytes)
        for tensor in header.tensors
    }
    detail = f"{path}: {missing:,} bytes of its weights are not there; it is planned from its header"
    return ModelHeader("gguf", header.metadata, tensors, (*header.notices, Notice("no_weights", detail)))
