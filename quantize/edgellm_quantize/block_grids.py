"""The grids of the GGUF block types: which values a block can hold, how its codes and scales become bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME

Array = np.ndarray[Any, Any]

F16_MAX = np.float32(65504.0)


@dataclass(frozen=True)
class BlockGrid:
    """What the values of a block type are: ``scale * (code - zero)``, or ``scale * code + offset``.

    In a type with two levels the scale of a sub-block is ``d * s`` with an integer ``s``, its offset
    ``-(dmin * m)`` with an integer ``m``; in the others ``d`` and ``dmin`` are used as they are
    (``offset = dmin``).
    """

    type_name: str
    sub_blocks: int
    """Scales per block."""
    max_code: int
    zero: int
    """The code of the value 0 in a grid without offsets."""
    has_offset: bool
    scale_range: tuple[int, int] | None = None
    """Least and greatest integer scale; None where there is only ``d``. Offsets count from 0 to the same
    greatest value."""

    @property
    def elements(self) -> int:
        """Weights of a block."""
        return GGML_TYPES_BY_NAME[self.type_name].block_elements

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return GGML_TYPES_BY_NAME[self.type_name].block_bytes

    @property
    def sub_elements(self) -> int:
        """Weights that share a scale."""
        return self.elements // self.sub_blocks


GRIDS: dict[str, BlockGrid] = {
    grid.type_name: grid
    for grid in (
        BlockGrid("Q4_0", 1, 15, 8, False),
        BlockGrid("Q4_1", 1, 15, 0, True),
        BlockGrid("Q5_0", 1, 31, 16, False),
        BlockGrid("Q5_1", 1, 31, 0, True),
        # int8 codes -127..127 are held here as 1..255.
        BlockGrid("Q8_0", 1, 255, 128, False),
        BlockGrid("Q2_K", 16, 3, 0, True, (0, 15)),
        BlockGrid("Q3_K", 16, 7, 4, False, (-32, 31)),
        BlockGrid("Q4_K", 8, 15, 0, True, (0, 63)),
        BlockGrid("Q5_K", 8, 31, 0, True, (0, 63)),
        BlockGrid("Q6_K", 16, 63, 32, False, (-128, 127)),
    )
}
"""By type name: every block type that can be written."""


@dataclass(frozen=True)
class BlockParams:
    """The scales of ``n`` blocks of one type, as they lie in the file."""

    type_name: str
    d: Array
    """f32 [n] holding f16 values."""
    dmin: Array
    """f32 [n] holding f16 values: the super-scale of the offsets, or the offset itself; 0 without offsets."""
    scales: Array
    """int16 [n, sub_blocks]; all 1 where the type has only ``d``."""
    minima: Array
    """int16 [n, sub_blocks]; 0 without offsets."""

    @property
    def grid(self) -> BlockGrid:
        """The type's grid."""
        return GRIDS[self.type_name]

    def sub_scales(self) -> Array:
        """Decoded scale of every sub-block, f32 [n, sub_blocks], with the bits that decoders compute."""
        if self.grid.scale_range is None:
            return self.d[:, None].copy()
        decoded: Array = self.d[:, None] * self.scales.astype(np.float32)
        return decoded

    def sub_offsets(self) -> Array:
        """Decoded offset of every sub-block, f32 [n, sub_blocks]; 0 in a grid without offsets."""
        if self.grid.scale_range is None:
            return self.dmin[:, None].copy()
        return -(self.dmin[:, None] * self.minima.astype(np.float32))


def round_column(values: Array, params: BlockParams, column: int) -> tuple[Array, Array]:
    """The nearest codes of one column of blocks: ``values`` f32 [n], ``column`` counted inside the block.

    Returns codes uint8 [n] and the values they stand for, f32 [n], bit for bit what decoders compute. For
    error feedback call it column by column with the compensated values.
    """
    grid = params.grid
    sub = column // grid.sub_elements
    if grid.scale_range is None:
        scale = params.d
        offset = params.dmin
    else:
        scale = params.d * params.scales[:, sub].astype(np.float32)
        offset = -(params.dmin * params.minima[:, sub].astype(np.float32))
    codes = nearest_codes(values.astype(np.float32, copy=False), scale, offset, grid)
    return codes.astype(np.uint8), decode_codes(codes, scale, offset, grid)


def nearest_codes(values: Array, scale: Array, offset: Array, grid: BlockGrid) -> Array:
    """Codes as f32 whole numbers, broadcasting ``values`` against the scales and offsets."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale != 0, np.float32(1) / scale, np.float32(0))
    low = 1 if grid.type_name == "Q8_0" else 0
    codes = (values - offset) * inverse if grid.has_offset else values * inverse + np.float32(grid.zero)
    nearest: Array = np.rint(np.clip(codes, np.float32(low), np.float32(grid.max_code)))
    return nearest


def decode_codes(codes: Array, scale: Array, offset: Array, grid: BlockGrid) -> Array:
    """Values of codes, in the order of operations that decoders have."""
    if grid.has_offset:
        shifted: Array = scale * codes.astype(np.float32) + offset
        return shifted
    centred: Array = scale * (codes.astype(np.float32) - np.float32(grid.zero))
    return centred


def decode_blocks(params: BlockParams, codes: Array) -> Array:
    """Values f32 [n, elements] of codes uint8 [n, elements]."""
    grid = params.grid
    shaped = codes.reshape(len(codes), grid.sub_blocks, grid.sub_elements)
    scales, offsets = params.sub_scales()[:, :, None], params.sub_offsets()[:, :, None]
    return decode_codes(shaped, scales, offsets, grid).reshape(codes.shape)


def _f16_bytes(values: Array) -> Array:
    data: Array = values.astype("<f2").reshape(-1, 1).view(np.uint8)
    return data


def _f16_values(data: Array) -> Array:
    values: Array = np.ascontiguousarray(data).view("<f2").astype(np.float32).reshape(-1)
    return values


def _join_nibbles(codes: Array, span: int) -> Array:
    """uint8 [n, e] -> [n, e / 2]: of every 2 * span codes the first half low, the second half high."""
    halves = codes.reshape(len(codes), -1, 2, span)
    joined: Array = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(codes), -1)
    return joined


def _split_nibbles(data: Array, span: int) -> Array:
    parts = data.reshape(len(data), -1, 1, span)
    return np.concatenate((parts & 15, parts >> 4), axis=2).reshape(len(data), -1)


def _join_fields(values: Array, span: int, width: int) -> Array:
    """Bit fields: byte l of every ``span`` bytes has value l in field 0, l + span in field 1 ..."""
    fields = 8 // width
    grouped = values.reshape(len(values), -1, fields, span)
    out = np.zeros(grouped[:, :, 0].shape, dtype=np.uint8)
    for index in range(fields):
        out |= grouped[:, :, index] << (index * width)
    return out.reshape(len(values), -1)


def _split_fields(data: Array, span: int, width: int) -> Array:
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    grouped = data.reshape(len(data), -1, 1, span)
    return ((grouped >> shifts) & ((1 << width) - 1)).astype(np.uint8).reshape(len(data), -1)


def _pack_six_bits(scales: Array, minima: Array) -> Array:
    """The 12 bytes of eight 6-bit scales and eight 6-bit minima (Q4_K, Q5_K)."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate((first, second, third), axis=1)


def _unpack_six_bits(data: Array) -> tuple[Array, Array]:
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 0x30)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 0x30)), axis=1)
    return scales, minima


def pack(params: BlockParams, codes: Array) -> Array:
    """Bytes of ``n`` blocks: codes uint8 [n, elements] -> uint8 [n, block bytes] (ggml-common.h)."""
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    name = params.type_name
    d, dmin = _f16_bytes(params.d), _f16_bytes(params.dmin)
    scales, minima = params.scales.astype(np.uint8), params.minima.astype(np.uint8)
    parts: Sequence[Array]
    if name in ("Q4_0", "Q4_1"):
        parts = (d, *((dmin,) if name == "Q4_1" else ()), _join_nibbles(codes, 16))
    elif name in ("Q5_0", "Q5_1"):
        high = _fifth_bits(codes)
        parts = (d, *((dmin,) if name == "Q5_1" else ()), high, _join_nibbles(codes & 15, 16))
    elif name == "Q8_0":
        parts = (d, codes ^ 0x80)
    elif name == "Q2_K":
        parts = (scales | (minima << 4), _join_fields(codes, 32, 2), d, dmin)
    elif name == "Q3_K":
        stored = (params.scales + 32).astype(np.uint8)
        packed = np.concatenate((_join_nibbles(stored & 15, 8), _join_fields(stored >> 4, 4, 2)), axis=1)
        parts = (_join_fields(codes >> 2, 32, 1), _join_fields(codes & 3, 32, 2), packed, d)
    elif name == "Q4_K":
        parts = (d, dmin, _pack_six_bits(scales, minima), _join_nibbles(codes, 32))
    elif name == "Q5_K":
        high = _join_fields(codes >> 4, 32, 1)
        parts = (d, dmin, _pack_six_bits(scales, minima), high, _join_nibbles(codes & 15, 32))
    else:
        assert name == "Q6_K", name
        low, high = _join_nibbles(codes & 15, 64), _join_fields(codes >> 4, 32, 2)
        parts = (low, high, params.scales.astype(np.int8).view(np.uint8), d)
    return np.concatenate(parts, axis=1)


def _fifth_bits(codes: Array) -> Array:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def unpack(data: Array, type_name: str) -> tuple[BlockParams, Array]:
    """The inverse of ``pack``: bytes uint8 [n, block bytes] -> scales and codes uint8 [n, elements]."""
    grid = GRIDS[type_name]
    n = len(data)
    zeros = np.zeros(n, dtype=np.float32)
    scales, minima = np.ones((n, grid.sub_blocks), np.int16), np.zeros((n, grid.sub_blocks), np.int16)
    dmin = zeros
    if type_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        d = _f16_values(data[:, :2])
        at = 2
        if grid.has_offset:
            dmin, at = _f16_values(data[:, 2:4]), 4
        if type_name.startswith("Q5"):
            high = np.unpackbits(data[:, at : at + 4], axis=1, bitorder="little") << 4
            codes = _split_nibbles(data[:, at + 4 :], 16) | high
        else:
            codes = _split_nibbles(data[:, at:], 16)
    elif type_name == "Q8_0":
        d, codes = _f16_values(data[:, :2]), data[:, 2:] ^ 0x80
    elif type_name == "Q2_K":
        scales, minima = data[:, :16] & 15, data[:, :16] >> 4
        codes, d, dmin = _split_fields(data[:, 16:80], 32, 2), _f16_values(data[:, 80:82]), data[:, 82:84]
        dmin = _f16_values(dmin)
    elif type_name == "Q3_K":
        low, high = _split_nibbles(data[:, 96:104], 8), _split_fields(data[:, 104:108], 4, 2)
        scales = (low | (high << 4)).astype(np.int16) - 32
        codes = _split_fields(data[:, 32:96], 32, 2) | (_split_fields(data[:, :32], 32, 1) << 2)
        d = _f16_values(data[:, 108:110])
    elif type_name in ("Q4_K", "Q5_K"):
        d, dmin = _f16_values(data[:, :2]), _f16_values(data[:, 2:4])
        scales, minima = _unpack_six_bits(data[:, 4:16])
        if type_name == "Q4_K":
            codes = _split_nibbles(data[:, 16:], 32)
        else:
            codes = _split_nibbles(data[:, 48:], 32) | (_split_fields(data[:, 16:48], 32, 1) << 4)
    else:
        codes = _split_nibbles(data[:, :128], 64) | (_split_fields(data[:, 128:192], 32, 2) << 4)
        scales, d = np.ascontiguousarray(data[:, 192:208]).view(np.int8), _f16_values(data[:, 208:210])
    return BlockParams(type_name, d, dmin, scales.astype(np.int16), minima.astype(np.int16)), codes
