"""The metadata of a GGUF file with the type of every value, so that it can be written again unchanged."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TypeAlias

from edgellm_models.errors import Notice
from edgellm_quantize.gguf_values import GGUFValue, MetadataTable

_NAMES = (
    *("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY"),
    *("UINT64", "INT64", "FLOAT64"),
)
"""By value type id (docs/gguf.md)."""
_WIDTHS = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
_STRING, _ARRAY = 8, 9
Buffer: TypeAlias = bytes | mmap.mmap


def read_typed_metadata(path: Path) -> tuple[MetadataTable, list[Notice]]:
    """All keys of the model file ``path`` (of its first shard), and what could not be kept.

    The file is checked first, as every reader does. Empty arrays and arrays of arrays are left out with a
    notice: writers have no form for them.
    """
    from edgellm_models.checkpoint.gguf_shards import open_shards

    shard = open_shards(path)[0]
    types = _value_types(shard.file.buffer)
    table: MetadataTable = {}
    left_out = []
    for key, value in shard.header.metadata.items():
        type_id, item_id = types[key]
        if type_id != _ARRAY:
            table[key] = GGUFValue(_NAMES[type_id], value)
        elif item_id == _ARRAY or not value:
            left_out.append(key)
        else:
            table[key] = GGUFValue("ARRAY", value, _NAMES[item_id])
    notices = []
    if left_out:
        notices.append(
            Notice(
                "metadata_left_out", f"metadata without a written form was left out: {', '.join(left_out)}"
            )
        )
    return table, notices


def _value_types(buffer: Buffer) -> dict[str, tuple[int, int]]:
    """Key to (value type id, item type id or -1), of a header that was checked before."""

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, buffer, at)[0])

    position = 24
    types = {}
    for _ in range(number("<Q", 16)):
        length = number("<Q", position)
        key = bytes(buffer[position + 8 : position + 8 + length]).decode("utf-8", "replace")
        position += 8 + length
        type_id = number("<I", position)
        position += 4
        item_id = -1
        if type_id == _ARRAY:
            item_id = number("<I", position)
        types[key] = (type_id, item_id)
        position = _skip(buffer, position, type_id)
    return types


def _skip(buffer: Buffer, position: int, type_id: int) -> int:
    if type_id == _STRING:
        return position + 8 + int(struct.unpack_from("<Q", buffer, position)[0])
    if type_id != _ARRAY:
        return position + _WIDTHS[type_id]
    item_id, count = struct.unpack_from("<IQ", buffer, position)
    position += 12
    if item_id not in (_STRING, _ARRAY):
        return position + int(count) * _WIDTHS[item_id]
    for _ in range(count):
        position = _skip(buffer, position, item_id)
    return position
