"""Integer codes packed into 32-bit words, both directions, as GPTQ, AWQ and compressed-tensors do it."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Codes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word holds column AWQ_ORDER[i] of its eight."""
_AWQ_NIBBLE_OF = tuple(AWQ_ORDER.index(column) for column in range(8))

_ONE_PER_FIELD = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_GPTQMODEL_THREE_BITS = (0x24924924, 0x92492492, 0x49249249)
"""What old GPTQModels add to words of 3-bit zero points, having taken it off: not one in every field."""


def unpack_words(words: Words, bits: int) -> Codes:
    """[..., W] words to [..., W * 32 / bits] codes: one little-endian bit stream along the last axis.

    For 3 bits W must be a multiple of 3.
    """
    raw: Codes = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    if bits == 8:
        return raw
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields: Codes = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return fields.reshape(*raw.shape[:-1], -1)
    stream = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def pack_words(codes: Codes, bits: int) -> Words:
    """[..., n] codes to [..., n * bits / 32] words; n * bits must be a multiple of 32."""
    assert codes.shape[-1] * bits % 32 == 0, (codes.shape, bits)
    if bits == 8:
        raw = np.ascontiguousarray(codes)
    elif bits in (2, 4):
        per_byte = 8 // bits
        fields = codes.reshape(*codes.shape[:-1], -1, per_byte)
        raw = fields[..., 0].copy()
        for place in range(1, per_byte):
            raw |= fields[..., place] << np.uint8(place * bits)
    else:
        stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        raw = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return raw.view("<u4").astype(np.uint32, copy=False)


def unpack_awq(words: Words) -> Codes:
    """[..., W] AWQ words to [..., 8 W] codes of 4 bits in the order of the columns."""
    nibbles = unpack_words(words, 4).reshape(*words.shape, 8)
    return nibbles[..., _AWQ_NIBBLE_OF].reshape(*words.shape[:-1], -1)


def pack_awq(codes: Codes) -> Words:
    """[..., n] codes of 4 bits to [..., n / 8] AWQ words; n must be a multiple of 8."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    return pack_words(eights[..., AWQ_ORDER].reshape(codes.shape), 4)


def zeros_from_v1(words: Words, bits: int) -> Codes:
    """True zero points [..., n] of a v1 GPTQ file, which stores them minus one, packed along the last axis.

    2, 4, 8 bits: whole words are added, as loaders do, so that a zero point of 0 that was stored by borrowing
    from the field above comes back. 3 bits: one is added to each field.
    """
    if bits == 3:
        return (unpack_words(words, 3) + np.uint8(1)) & np.uint8(7)
    return unpack_words(words + np.uint32(_ONE_PER_FIELD[bits]), bits)


def zeros_to_v1(zeros: Codes, bits: int) -> Words:
    """The words of a v1 GPTQ file for true zero points [..., n], the inverse of ``zeros_from_v1``."""
    if bits == 3:
        return pack_words((zeros - np.uint8(1)) & np.uint8(7), 3)
    return pack_words(zeros, bits) - np.uint32(_ONE_PER_FIELD[bits])


def zeros_from_gptqmodel_three_bits(words: Words) -> Codes:
    """True 3-bit zero points of a v1 file by a GPTQModel before version 7."""
    pattern = np.array(_GPTQMODEL_THREE_BITS, dtype=np.uint32)
    return unpack_words(words + np.resize(pattern, words.shape[-1]), 3)
