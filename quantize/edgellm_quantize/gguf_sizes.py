"""Bytes of a GGUF file before it is written: of a tensor in a type, and of the whole with its header."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_quantize.gguf_file import padded
from edgellm_quantize.gguf_values import MetadataTable

_BEGINNING = 4 + 4 + 8 + 8
"""Magic, version, number of tensors, number of metadata values."""
_SCALARS = {
    **dict.fromkeys(("UINT8", "INT8", "BOOL"), 1),
    **dict.fromkeys(("UINT16", "INT16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FLOAT32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FLOAT64"), 8),
}


def tensor_nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor, outermost dimension first, in a type such as ``F16`` or ``Q4_K``."""
    return GGML_TYPES_BY_NAME[kind].row_bytes(shape[-1]) * math.prod(shape[:-1])


def file_nbytes(metadata: MetadataTable, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> int:
    """Bytes of a whole file with these tensors (name, shape, type), as ``gguf_file`` writes it.

    Layout: ggml, docs/gguf.md.
    """
    header, data = _BEGINNING, 0
    for key, value in metadata.items():
        header += _text(key) + 4
        if value.item_type is None:
            header += _value(value.type_name, value.value)
        elif value.item_type == "STRING":
            header += 4 + 8 + sum(map(_text, value.value))
        else:
            header += 4 + 8 + len(value.value) * _SCALARS[value.item_type]
    for name, shape, kind in tensors:
        header += _text(name) + 4 + 8 * len(shape) + 4 + 8
        data += padded(tensor_nbytes(shape, kind))
    return padded(header) + data


def _value(kind: str, value: Any) -> int:
    return _text(value) if kind == "STRING" else _SCALARS[kind]


def _text(value: str | bytes) -> int:
    return 8 + len(value.encode("utf-8") if isinstance(value, str) else value)
