"""Parses the key-value part of a GGUF file into native Python values, bounded and checked before anything is
allocated.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little endian here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgellm_models.errors import BadInputError

Buffer: TypeAlias = bytes | mmap.mmap

MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 64 << 20
MAX_TOTAL_STRING_BYTES = 256 << 20
MAX_TOTAL_ELEMENTS = 1 << 22
"""Array elements of a whole file; a vocabulary of 260,000 needs under 1.1 million."""
MAX_NESTING = 4

TYPE_STRING = 8
TYPE_ARRAY = 9

_SCALARS: dict[int, tuple[str, str, int]] = {
    0: ("u8", "B", 1),
    1: ("i8", "b", 1),
    2: ("u16", "H", 2),
    3: ("i16", "h", 2),
    4: ("u32", "I", 4),
    5: ("i32", "i", 4),
    6: ("f32", "f", 4),
    7: ("bool", "?", 1),
    10: ("u64", "Q", 8),
    11: ("i64", "q", 8),
    12: ("f64", "d", 8),
}
"""Type id -> name, struct code, bytes."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass
class Cursor:
    """A reading position in the file that cannot leave it."""

    buffer: Buffer
    size: int
    label: str
    """How messages name the file."""
    position: int = 0
    elements_left: int = MAX_TOTAL_ELEMENTS
    string_bytes_left: int = MAX_TOTAL_STRING_BYTES
    replaced: list[str] = field(default_factory=list)
    """Keys whose text was not UTF-8."""

    def fail(self, text: str) -> BadInputError:
        return BadInputError(f"{self.label}: damaged GGUF file: {text}")

    def need(self, count: int, what: str) -> int:
        """Claim ``count`` bytes; returns where they start."""
        start = self.position
        if count > self.size - start:
            raise self.fail(
                f"{what} needs {count:,} bytes at offset {start:,}, but the file has {self.size:,} bytes "
                "(truncated?)"
            )
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.need(8, what))[0]
        return value

    def raw_string(self, what: str, max_bytes: int) -> bytes:
        length = self.u64(f"the length of {what}")
        if length > max_bytes:
            raise self.fail(f"{what} claims a length of {length:,} bytes (at most {max_bytes:,})")
        start = self.need(length, what)
        self.spend_string(length, what)
        return self.buffer[start : start + length]

    def spend_string(self, length: int, what: str) -> None:
        self.string_bytes_left -= length
        if self.string_bytes_left < 0:
            raise self.fail(f"the texts up to {what} exceed {MAX_TOTAL_STRING_BYTES:,} bytes")

    def name(self, what: str, max_bytes: int) -> str:
        """A key or tensor name: not empty, UTF-8."""
        raw = self.raw_string(what, max_bytes)
        if not raw:
            raise self.fail(f"{what} is empty")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None


def read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    """``count`` key-value pairs from the cursor on. Raises BadInputError naming the key."""
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name(f"the key of metadata entry {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"the metadata key {key[:80]!r} occurs twice")
        type_id = cursor.u32(f"the type of {key[:80]!r}")
        metadata[key] = _read_value(cursor, key, type_id, 0)
    return metadata


def _read_value(cursor: Cursor, key: str, type_id: int, depth: int) -> Any:
    shown = repr(key[:80])
    if type_id == TYPE_STRING:
        return _text(cursor, key, cursor.raw_string(f"the value of {shown}", MAX_STRING_BYTES))
    if type_id == TYPE_ARRAY:
        return _read_array(cursor, key, depth + 1)
    if type_id not in _SCALARS:
        raise cursor.fail(f"the metadata key {shown} has the unknown value type {type_id}")
    return _read_scalars(cursor, shown, type_id, 1)[0]


def _read_array(cursor: Cursor, key: str, depth: int) -> list[Any]:
    shown = repr(key[:80])
    if depth > MAX_NESTING:
        raise cursor.fail(f"the metadata key {shown} nests arrays deeper than {MAX_NESTING}")
    type_id = cursor.u32(f"the element type of {shown}")
    length = cursor.u64(f"the array length of {shown}")
    minimum = {TYPE_STRING: 8, TYPE_ARRAY: 12}.get(type_id) or _SCALARS.get(type_id, ("", "", 0))[2]
    if not minimum:
        raise cursor.fail(f"the metadata key {shown} is an array of the unknown type {type_id}")
    if length > (cursor.size - cursor.position) // minimum:
        raise cursor.fail(
            f"the metadata key {shown} claims {length:,} elements, more than the file's {cursor.size:,} "
            "bytes can hold"
        )
    cursor.elements_left -= length
    if cursor.elements_left < 0:
        raise cursor.fail(f"the arrays up to {shown} exceed {MAX_TOTAL_ELEMENTS:,} elements")
    if type_id == TYPE_STRING:
        return _read_strings(cursor, key, length)
    if type_id == TYPE_ARRAY:
        return [_read_array(cursor, key, depth + 1) for _ in range(length)]
    return _read_scalars(cursor, shown, type_id, length)


def _read_scalars(cursor: Cursor, shown: str, type_id: int, count: int) -> list[Any]:
    _, code, width = _SCALARS[type_id]
    start = cursor.need(count * width, f"the value of {shown}")
    values = list(struct.unpack_from(f"<{count}{code}", cursor.buffer, start))
    if type_id == 7:
        raw = cursor.buffer[start : start + count]
        if raw.count(0) + raw.count(1) != count:
            raise cursor.fail(f"the metadata key {shown} is a boolean with a byte other than 0 and 1")
    return values


def _read_strings(cursor: Cursor, key: str, count: int) -> list[str]:
    """The hot loop: a vocabulary has 260,000 strings, so the cursor's methods are written out here."""
    buffer, unpack = cursor.buffer, _U64.unpack_from
    position = begin = cursor.position
    limit = min(cursor.size, begin + 8 * count + cursor.string_bytes_left)
    raw: list[bytes] = []
    append = raw.append
    for _ in range(count):
        start = position + 8
        if start > limit:
            break
        position = start + unpack(buffer, position)[0]
        if position > limit:
            break
        append(buffer[start:position])
    if len(raw) < count:
        raise cursor.fail(
            f"element {len(raw):,} of {key[:80]!r} reaches past the end of the file ({cursor.size:,} bytes; "
            f"truncated?) or past {MAX_TOTAL_STRING_BYTES:,} bytes of text"
        )
    cursor.position = position
    cursor.spend_string(position - begin - 8 * count, repr(key[:80]))
    try:
        return [item.decode() for item in raw]
    except UnicodeDecodeError:
        return [_text(cursor, key, item) for item in raw]


def _text(cursor: Cursor, key: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        if key.startswith("tokenizer."):
            # replacing bytes would make two tokens alike or change a template: no guess here
            raise cursor.fail(
                f"the metadata key {key[:80]!r} holds text that is not UTF-8: {raw[:40]!r}"
            ) from None
        if key not in cursor.replaced:
            cursor.replaced.append(key)
        return raw.decode("utf-8", errors="replace")
