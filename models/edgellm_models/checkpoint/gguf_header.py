"""Reads the header of one GGUF file and checks its metadata and tensors against the real size."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgellm_kernels.ggml_types import GGML_TYPES, GGMLType, supported_type_names
from edgellm_models.checkpoint.gguf_metadata import Buffer, Cursor, read_metadata
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.metadata_values import metadata_int, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256
MAX_ENTRIES = 100_000
"""Metadata keys or tensors of one file; the largest published models have some thousands."""

_MIN_METADATA_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True)
class TensorDeclaration:
    """One tensor as a GGUF header states it, checked against the file's size."""

    name: str
    shape: tuple[int, ...]
    """Outermost first: the reverse of the file's ne."""
    ggml_type: GGMLType
    start: int
    """Absolute offset in the file."""
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Everything before the tensor data."""

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorDeclaration, ...]
    notices: tuple[Notice, ...]


def read_gguf_header(buffer: Buffer, size: int, label: str, *, complete: bool = True) -> GGUFHeader:
    """Parse the ``size`` bytes of a GGUF file, v2 or v3; ``label`` names it. BadInputError says what is
    wrong.

    Not ``complete``, the file may end anywhere behind its header: nothing but the header may then be used.
    """
    cursor = Cursor(buffer, size, label)
    version = _read_version(cursor)
    num_tensors = _read_count(cursor, "tensors", _MIN_TENSOR_BYTES)
    num_keys = _read_count(cursor, "metadata keys", _MIN_METADATA_BYTES)
    metadata = read_metadata(cursor, num_keys)
    alignment = _read_alignment(metadata, label)
    declared = [_read_declaration(cursor, index) for index in range(num_tensors)]
    _refuse_duplicates(cursor, declared)
    header_end = cursor.position
    data_start = header_end + -header_end % alignment
    tensors = tuple(
        _check_offset(cursor, name, shape, kind, offset, alignment, data_start)
        for name, shape, kind, offset in declared
    )
    if complete:
        _check_extent(cursor, tensors)
    notices = _check_tail(cursor, tensors, header_end, alignment) if complete else []
    if cursor.replaced:
        keys = shown(cursor.replaced)
        notices.append(
            Notice("metadata_not_utf8", f"{label}: bytes that are not UTF-8 were replaced in {keys}")
        )
    return GGUFHeader(version, metadata, tensors, tuple(notices))


def declared_end(header: GGUFHeader) -> int:
    """The file size in bytes that the tensors of a header need; padding behind the last is not counted."""
    return max((tensor.start + tensor.nbytes for tensor in header.tensors), default=0)


def _read_version(cursor: Cursor) -> int:
    if cursor.buffer[:4] != MAGIC:
        raise cursor.fail("it does not begin with the magic GGUF")
    cursor.position = 4
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version == 1:
        raise BadInputError(
            f"{cursor.label}: GGUF version 1 (2023) is not supported; versions 2 and 3 are: fetch a newer "
            "file"
        )
    swapped = struct.unpack(">I", struct.pack("<I", version))[0]
    if 1 <= swapped <= 0xFFFF:
        raise BadInputError(
            f"{cursor.label}: this is a big-endian GGUF file (version {swapped}); only little-endian files "
            "are read: fetch the usual file or convert it with gguf's gguf_convert_endian.py"
        )
    raise BadInputError(f"{cursor.label}: GGUF version {version} is not supported; versions 2 and 3 are")


def _read_count(cursor: Cursor, what: str, min_bytes: int) -> int:
    count = cursor.u64(f"the number of {what}")
    if count > MAX_ENTRIES or count * min_bytes > cursor.size:
        raise cursor.fail(
            f"it claims {count:,} {what}, more than a file of {cursor.size:,} bytes can hold (at most "
            f"{MAX_ENTRIES:,})"
        )
    return count


def _read_alignment(metadata: dict[str, Any], label: str) -> int:
    alignment = metadata_int(metadata, "general.alignment", DEFAULT_ALIGNMENT)
    if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise BadInputError(f"{label}: general.alignment is {alignment}, which is not a power of two above 0")
    return alignment


def _read_declaration(cursor: Cursor, index: int) -> tuple[str, tuple[int, ...], GGMLType, int]:
    name = cursor.name(f"the name of tensor {index}", MAX_NAME_BYTES)
    num_dims = cursor.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions (1 to {MAX_DIMENSIONS} are possible)")
    extents = [cursor.u64(f"a dimension of {name!r}") for _ in range(num_dims)]
    if 0 in extents:
        raise cursor.fail(f"tensor {name!r} has a dimension of 0 (ne = {extents})")
    if math.prod(extents) >= 1 << 48:
        raise cursor.fail(f"tensor {name!r} has impossible dimensions (ne = {extents})")
    type_id = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise BadInputError(unknown_type_message(cursor.label, name, type_id))
    if extents[0] % kind.block_elements:
        raise cursor.fail(
            f"tensor {name!r} has rows of {extents[0]} weights, not a multiple of the {kind.name} block "
            f"of {kind.block_elements}"
        )
    return name, tuple(reversed(extents)), kind, offset


def unknown_type_message(label: str, tensor: str, type_id: int) -> str:
    """Names the tensor, its type id and the types that are read."""
    removed = _REMOVED_TYPES.get(type_id)
    which = f"{type_id} ({removed}, removed from the format)" if removed else f"{type_id}, which is unknown"
    return (
        f"{label}: tensor {tensor!r} has the type id {which}; supported: {', '.join(supported_type_names())}"
    )


def _refuse_duplicates(cursor: Cursor, declared: list[tuple[str, tuple[int, ...], GGMLType, int]]) -> None:
    seen: set[str] = set()
    for name, *_ in declared:
        if name in seen:
            raise cursor.fail(f"the tensor {name!r} is declared twice")
        seen.add(name)


def _check_offset(
    cursor: Cursor,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLType,
    offset: int,
    alignment: int,
    data_start: int,
) -> TensorDeclaration:
    if offset % alignment:
        raise cursor.fail(
            f"tensor {name!r} lies at offset {offset}, not a multiple of the alignment {alignment}"
        )
    nbytes = kind.row_bytes(shape[-1]) * math.prod(shape[:-1])
    return TensorDeclaration(name, shape, kind, data_start + offset, nbytes)


def _check_extent(cursor: Cursor, tensors: tuple[TensorDeclaration, ...]) -> None:
    """No tensor reaches past the end of the file or into another."""
    in_order = sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes))
    end = max((tensor.start + tensor.nbytes for tensor in in_order), default=0)
    if end > cursor.size:
        first = next(tensor for tensor in in_order if tensor.start + tensor.nbytes > cursor.size)
        raise BadInputError(
            f"{cursor.label}: the file is truncated: its header declares {end:,} bytes, it has "
            f"{cursor.size:,} "
            f"({end - cursor.size:,} are missing, from tensor {first.name!r} on); fetch it again, or, where "
            "it is one part of a file cut in pieces, join the pieces"
        )
    for before, after in pairwise(in_order):
        if before.start + before.nbytes > after.start:
            raise cursor.fail(f"the tensors {before.name!r} and {after.name!r} overlap")


def _check_tail(
    cursor: Cursor, tensors: tuple[TensorDeclaration, ...], header_end: int, alignment: int
) -> list[Notice]:
    """What follows the last tensor: padding, another GGUF file (glued shards), or bytes nobody declared."""
    end = max((tensor.start + tensor.nbytes for tensor in tensors), default=header_end)
    padded = end + -end % alignment
    for next_file in {end, padded}:
        if cursor.buffer[next_file : next_file + 4] == MAGIC:
            raise BadInputError(
                f"{cursor.label}: this is a concatenation of split files (a second GGUF file begins at byte "
                f"{next_file:,}); keep the shards as separate files and name any one of them, or join them "
                "with llama-gguf-split --merge"
            )
    if cursor.size > padded:
        detail = f"{cursor.label}: {cursor.size - padded:,} bytes after the last tensor are ignored"
        return [Notice("trailing_bytes", detail)]
    return []
