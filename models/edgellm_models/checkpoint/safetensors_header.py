"""Reads and checks the header of one safetensors file against its real size.

Format: https://github.com/huggingface/safetensors#format: u64 header length, JSON header, data without holes.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from edgellm_models.checkpoint.gguf_metadata import Buffer
from edgellm_models.errors import BadInputError

MAX_HEADER_BYTES = 25 << 20
"""A shard of a hundred thousand tensors needs about half of this; the format itself stops at 100 MB."""
MAX_DIMENSIONS = 8

DTYPE_BITS: dict[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "C64": 64,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True)
class SafeTensor:
    """One tensor as a safetensors header states it, checked against the file's size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Absolute offset in the file."""
    nbytes: int


def read_safetensors_header(buffer: Buffer, size: int, label: str) -> dict[str, SafeTensor]:
    """Tensors by name. BadInputError says what is wrong, with the declared and the real size where they
    differ."""
    if size < 8:
        raise BadInputError(f"{label}: {size} bytes is too short for a safetensors file; fetch it again")
    header_bytes: int = struct.unpack_from("<Q", buffer)[0]
    if header_bytes > size - 8:
        raise BadInputError(
            f"{label}: its header claims {header_bytes:,} bytes, the file has {size:,}: truncated or no "
            "safetensors file"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise BadInputError(
            f"{label}: its header claims {header_bytes:,} bytes (at most {MAX_HEADER_BYTES:,})"
        )
    entries = _parse_json(buffer[8 : 8 + header_bytes], label)
    entries.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _check_entry(name, entry, data_start, label) for name, entry in entries.items()}
    _check_layout(tensors, data_start, size, label)
    return tensors


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the name {key[:80]!r} occurs twice")
            seen.add(key)
    return found


def _parse_json(raw: bytes, label: str) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise BadInputError(f"{label}: damaged safetensors file: its header nests too deep") from None
    except ValueError as error:  # covers bad UTF-8, bad JSON, numbers of too many digits and duplicates
        raise BadInputError(
            f"{label}: damaged safetensors file: its header is not valid JSON: {error}"
        ) from None
    if not isinstance(entries, dict):
        raise BadInputError(f"{label}: damaged safetensors file: its header is not a JSON object")
    return entries


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _check_entry(name: str, entry: object, data_start: int, label: str) -> SafeTensor:
    where = f"{label}: damaged safetensors file: tensor {name[:120]!r}"
    if not isinstance(entry, dict):
        raise BadInputError(f"{where} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadInputError(
            f"{label}: tensor {name[:120]!r} has the unknown dtype {str(dtype)[:40]!r}; known: "
            f"{', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise BadInputError(f"{where} has an impossible shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise BadInputError(f"{where} has impossible data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if end < begin or (end - begin) * 8 != bits:
        raise BadInputError(
            f"{where}: {dtype} {shape} needs {bits / 8:,.0f} bytes, its data_offsets {offsets} span "
            f"{end - begin:,}"
        )
    return SafeTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _check_layout(tensors: dict[str, SafeTensor], data_start: int, size: int, label: str) -> None:
    """The tensors cover the data exactly: no overlap, no hole, nothing missing at the end and nothing behind
    it."""
    position = data_start
    previous = "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != position:
            kind = "overlaps" if tensor.start < position else "leaves a hole after"
            raise BadInputError(
                f"{label}: damaged safetensors file: tensor {tensor.name[:120]!r} {kind} {previous} "
                f"(begins at byte {tensor.start:,} instead of {position:,})"
            )
        position = tensor.start + tensor.nbytes
        previous = repr(tensor.name[:120])
    if position != size:
        what = "truncated" if size < position else "longer than its header says"
        raise BadInputError(
            f"{label}: the file is {what}: its header declares {position:,} bytes, it has {size:,}; fetch it "
            "again"
        )
