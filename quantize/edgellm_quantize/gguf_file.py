"""Writes one GGUF file whole or not at all: a temporary file beside it, read back, then renamed."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgellm_models.errors import EdgeLLMError, OutputError
from edgellm_quantize.gguf_values import MetadataTable
from edgellm_quantize.output_place import check_place, output_error, partial_of, remove_stale_partials

ALIGNMENT = 32
"""Bytes; GGUF's default for tensor data."""
_CHECK_CHUNK = 16 << 20

Chunks = Iterable["np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor whose bytes are made while it is written."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first."""
    type_name: str
    """F32, F16, BF16 or a block type, as ``gguf.GGMLQuantizationType`` spells them."""
    nbytes: int
    chunks: Callable[[], Chunks]
    """Yields contiguous arrays that together are the tensor's bytes, so that no tensor is held whole."""


Check = Callable[[Path, Sequence[PlannedTensor], Sequence[int]], None]
"""Raises OutputError if the partial file is not what was meant: path, tensors, their CRC-32s."""


def write_gguf_file(
    out: Path, metadata: MetadataTable, tensors: Sequence[PlannedTensor], *, check: Check | None = None
) -> int:
    """Write ``out`` and return its size in bytes. ``metadata`` must name general.architecture.

    ``check`` looks at the file before it gets its name; without one it is opened as a model and compared.
    OutputError for a missing folder, a full disk and everything else that keeps the file from being written;
    then, and when interrupted, nothing is left behind and an older file of that name is untouched.
    """
    remove_stale_partials(out)
    check_place(out, sum(padded(tensor.nbytes) for tensor in tensors), replaces_file=True)
    partial = partial_of(out)
    try:
        checksums = _write(partial, metadata, tensors)
        (check or _read_back)(partial, tensors, checksums)
        size = partial.stat().st_size
        os.replace(partial, out)
    except OSError as error:
        raise output_error(out, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return size


def padded(nbytes: int) -> int:
    """Bytes of a tensor with what follows until the next may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _write(partial: Path, metadata: MetadataTable, tensors: Sequence[PlannedTensor]) -> list[int]:
    """Header through gguf's writer, then the data in chunks. CRC-32 of each tensor's bytes."""
    import gguf

    writer = gguf.GGUFWriter(None, metadata["general.architecture"].value)
    try:
        for key, value in metadata.items():
            if key == "general.architecture":
                continue  # the writer has put it first already
            kind = gguf.GGUFValueType[value.type_name]
            item = gguf.GGUFValueType[value.item_type] if value.item_type else None
            writer.add_key_value(key, value.value, kind, sub_type=item)
        for tensor in tensors:
            _declare(writer, tensor)
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with partial.open("ab") as stream:
        _pad(stream)
        checksums = []
        for tensor in tensors:
            checksum = written = 0
            for chunk in tensor.chunks():
                data = np.ascontiguousarray(chunk).view(np.uint8).reshape(-1).data
                checksum = zlib.crc32(data, checksum)
                written += data.nbytes
                stream.write(data)
            assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
            checksums.append(checksum)
            _pad(stream)
        stream.flush()
        os.fsync(stream.fileno())
    return checksums


def _declare(writer: Any, tensor: PlannedTensor) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.type_name]
    shape: Sequence[int] = tensor.shape
    dtype: np.dtype[Any] = np.dtype(np.float32)
    if tensor.type_name not in ("F32", "F16", "BF16"):
        # The writer takes the shape of a block type in bytes per row.
        shape, dtype = gguf.quant_shape_to_byte_shape(tensor.shape, kind), np.dtype(np.uint8)
    writer.add_tensor_info(tensor.name, shape, dtype, tensor.nbytes, raw_dtype=kind)


def _pad(stream: IO[bytes]) -> None:
    stream.write(bytes(-stream.tell() % ALIGNMENT))


def _read_back(partial: Path, tensors: Sequence[PlannedTensor], checksums: Sequence[int]) -> None:
    """Open the file as a user's program will and compare every tensor with what was meant to be written."""
    from edgellm_models.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(partial)
    except EdgeLLMError as error:
        raise OutputError(f"the file that was written does not read back: {error}") from error
    try:
        found = checkpoint.tensors()
        if set(found) != {tensor.name for tensor in tensors}:
            raise OutputError(f"the file that was written has {len(found)} tensors instead of {len(tensors)}")
        for tensor, checksum in zip(tensors, checksums, strict=True):
            info = found[tensor.name]
            if (info.shape, info.type_name, info.nbytes) != (tensor.shape, tensor.type_name, tensor.nbytes):
                raise OutputError(f"tensor {tensor.name} was written as {info.type_name} {info.shape}")
            values = (
                checkpoint.weight(tensor.name).data
                if len(tensor.shape) == 2
                else checkpoint.vector(tensor.name)
            )
            actual = 0
            for chunk in _bytes_of(values):
                actual = zlib.crc32(chunk, actual)
                checkpoint.release_pages()  # the whole file would be in memory at its end
            if actual != checksum:
                raise OutputError(
                    f"tensor {tensor.name} does not read back as it was written: the disk may be faulty"
                )
    finally:
        checkpoint.close()


def _bytes_of(values: Any) -> Iterator[Any]:
    import torch

    flat = values.contiguous().view(torch.uint8).reshape(-1)
    for start in range(0, flat.numel(), _CHECK_CHUNK):
        yield flat[start : start + _CHECK_CHUNK].numpy()
