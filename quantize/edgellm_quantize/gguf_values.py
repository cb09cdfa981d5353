"""Typed metadata values of a GGUF file: Python numbers alone do not say which width the format shall have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MetadataTable = dict[str, "GGUFValue"]


@dataclass(frozen=True)
class GGUFValue:
    """One value with its type names as ``gguf.GGUFValueType`` spells them."""

    type_name: str
    """UINT32, FLOAT32, BOOL, STRING or ARRAY."""
    value: Any
    item_type: str | None = None
    """Type of an array's items."""


def u32(value: int) -> GGUFValue:
    """A count or id."""
    return GGUFValue("UINT32", value)


def f32(value: float) -> GGUFValue:
    """A number."""
    return GGUFValue("FLOAT32", float(value))


def boolean(value: bool) -> GGUFValue:
    """A switch."""
    return GGUFValue("BOOL", bool(value))


def text(value: str) -> GGUFValue:
    """A string."""
    return GGUFValue("STRING", value)


def array(item_type: str, values: Sequence[Any]) -> GGUFValue:
    """An array of STRING, FLOAT32, INT32 or BOOL."""
    return GGUFValue("ARRAY", list(values), item_type)
