"""Writes safetensors shards tensor by tensor, with their index, and reads every byte back."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_models.errors import OutputError

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I8": 1}
_CHECK_CHUNK = 16 << 20
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class PlannedItem:
    """Tensors that are made together while they are written."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, safetensors dtype, shape)"""
    make: Callable[[], Iterable[np.ndarray[Any, Any]]]
    """The bytes of each in that order, in one array or in several: a large tensor need not be held whole."""

    @property
    def nbytes(self) -> int:
        return sum(tensor_bytes(dtype, shape) for _, dtype, shape in self.tensors)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES[dtype]


def write_shards(
    folder: Path,
    items: Sequence[PlannedItem],
    metadata: dict[str, str],
    on_bytes: Callable[[int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write model.safetensors, or shards with an index, into ``folder``; returns the bytes of all files.

    Every byte is read back and compared by checksum. After OSError and OutputError the caller cleans up.
    """
    shards = _split(items, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sums = _write_shard(folder / name, shard, metadata, on_bytes)
        _read_back(folder / name, sums)
        total += (folder / name).stat().st_size
        weight_map |= {tensor: name for item in shard for tensor, _, _ in item.tensors}
    if len(shards) > 1:
        size = sum(item.nbytes for item in items)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def _split(items: Sequence[PlannedItem], shard_bytes: int) -> list[list[PlannedItem]]:
    shards: list[list[PlannedItem]] = [[]]
    used = 0
    for item in items:
        if shards[-1] and used + item.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item.nbytes
    return shards


def _write_shard(
    path: Path,
    items: Sequence[PlannedItem],
    metadata: dict[str, str],
    on_bytes: Callable[[int], None] | None,
) -> list[tuple[str, int, int, int]]:
    """(name, begin, end, CRC-32) of every tensor, offsets from the start of the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for item in items:
        for name, dtype, shape in item.tensors:
            end = position + tensor_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    sums = []
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)))
        stream.write(raw)
        for item in items:
            arrays = iter(item.make())
            for name, dtype, shape in item.tensors:
                begin, checksum = stream.tell(), 0
                end = begin + tensor_bytes(dtype, shape)
                while stream.tell() < end:
                    data = np.ascontiguousarray(next(arrays)).reshape(-1).view(np.uint8).data
                    stream.write(data)
                    checksum = zlib.crc32(data, checksum)
                    if on_bytes is not None:
                        on_bytes(data.nbytes)
                assert stream.tell() == end, (name, stream.tell(), end, dtype, shape)
                sums.append((name, begin, end, checksum))
            assert next(arrays, None) is None, item.tensors
        stream.flush()
        os.fsync(stream.fileno())
    return sums


def _read_back(path: Path, sums: Sequence[tuple[str, int, int, int]]) -> None:
    with path.open("rb") as stream:
        for name, begin, end, wanted in sums:
            stream.seek(begin)
            left, checksum = end - begin, 0
            while left > 0:
                data = stream.read(min(left, _CHECK_CHUNK))
                if not data:
                    break
                checksum = zlib.crc32(data, checksum)
                left -= len(data)
            if left or checksum != wanted:
                raise OutputError(f"{path.name}: tensor {name} does not read back as it was written")
