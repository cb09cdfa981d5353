"""The printable alphabet in which byte-level BPE vocabularies spell bytes (GPT-2, Radford et al. 2019)."""

from __future__ import annotations

from functools import cache


@cache
def byte_to_char() -> tuple[str, ...]:
    """Per byte value the character that stands for it.

    Printable Latin-1 characters stand for themselves; the 68 others take the code points from 256 on, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return tuple(chr(b) if b in printable else chr(next(spare)) for b in range(256))


@cache
def char_to_byte() -> dict[str, int]:
    """The inverse of ``byte_to_char``."""
    return {char: byte for byte, char in enumerate(byte_to_char())}


def spelled_bytes(text: str) -> bytes:
    """The bytes that a byte-level vocabulary entry stands for.

    An entry with a character outside the alphabet is taken as plain text, whole, as the tokenizers library
    does.
    """
    table = char_to_byte()
    try:
        return bytes([table[char] for char in text])
    except KeyError:
        return text.encode("utf-8", "replace")
