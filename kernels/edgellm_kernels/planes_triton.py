"""Triton decoder of weights in planes (gpu_layouts): the device function that all linears share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from edgellm_kernels.gpu_configs import configurations
from edgellm_kernels.gpu_layouts import FORMS, ScaleKind
from edgellm_kernels.weights import PlaneWeight

_F16 = tl.constexpr(int(ScaleKind.F16))
_F16_MIN = tl.constexpr(int(ScaleKind.F16_MIN))
_U8_MIN = tl.constexpr(int(ScaleKind.U8_MIN))
_I8_HALVES = tl.constexpr(int(ScaleKind.I8_HALVES))
_NIBBLE_HALVES = tl.constexpr(int(ScaleKind.NIBBLE_HALVES))
_GROUP = tl.constexpr(int(ScaleKind.GROUP))


@triton.jit
def take(pointers, mask):
    """A load with zeros where the mask is false; without a mask where it is None."""
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _steps(pair, zero, SIXTEENTHS: tl.constexpr):
    """The two codes of a pair without their zero point, f32, from the halves of a u32, which are f16.

    Their mantissas hold the codes, so a half is 1024 + code, or with SIXTEENTHS 1024 + 16 code; ``zero`` is
    1024 + the zero point, f16. All sums are multiples of 1/16 below 2048: exact, however they are rounded.
    """
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    if SIXTEENTHS:
        low, high, zero = low * 0.0625, high * 0.0625, zero - 960.0
    return (low - zero).to(tl.float32), (high - zero).to(tl.float32)


@triton.jit
def _f16_pair(word):
    """The two f16 of a u32, the low one first, as f32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _apart(word, BITS: tl.constexpr):
    """The low and the next BITS bits of a number as the halves of a u32."""
    word = word.to(tl.uint32)
    return (word & ((1 << BITS) - 1)) | ((word >> BITS) << 16)


@triton.jit
def block_scales(
    scales, supers, row, block, at_block, num_blocks, groups, mask, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):  # fmt: skip
    """(s0, s1, m0, m1) of lanes, f32: see decode_lanes."""
    m0 = tl.zeros(block.shape, tl.float32)
    m1 = m0
    if KIND == _GROUP:
        s0 = take(scales + row * groups + block // GROUP_BLOCKS, mask).to(tl.float32)
        s1 = s0
    elif KIND == _F16:
        s0 = take(scales + at_block, mask).to(tl.float32)
        s1 = s0
    elif KIND == _F16_MIN:
        s0, m0 = _f16_pair(take(scales + at_block, mask))
        s1, m1 = s0, m0
    else:
        pair = take(scales + at_block, mask)  # u16
        at_super = row * (num_blocks // 8) + block // 8
        if KIND == _I8_HALVES:
            d = take(supers + at_super, mask).to(tl.float32)
            s0 = d * pair.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
            s1 = d * (pair >> 8).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            d, dmin = _f16_pair(take(supers + at_super, mask))
            if KIND == _U8_MIN:
                s0, m0 = d * (pair & 255).to(tl.float32), -(dmin * (pair >> 8).to(tl.float32))
                s1, m1 = s0, m0
            else:
                s0, m0 = d * (pair & 15).to(tl.float32), -(dmin * ((pair >> 4) & 15).to(tl.float32))
                s1, m1 = d * ((pair >> 8) & 15).to(tl.float32), -(dmin * (pair >> 12).to(tl.float32))
    return s0, s1, m0, m1


@triton.jit
def decode_lanes(
    codes,
    high,
    scales,
    supers,
    zeros,
    row,
    block,
    part,
    num_blocks,
    groups,
    mask,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """The eight places of lanes: codes without offset, f32, and what they are multiplied with.

    ``row``, ``block`` and ``part``, a lane's place in its block (0 to 3), and ``mask`` have one shape. Every
    load goes through pointers of that shape, which has one dim: loads of another shape would change layouts
    through shared memory, and so would the scales' of two dims, whose order Triton 3.6 finds another way.
    Returns
    (f0 .. f7, s0, s1, m0, m1): places 0 to 3 are s0 f + m0, places 4 to 7 are s1 f + m1.
    """
    at_block = row * num_blocks + block
    at = at_block * 4 + part
    # The bits of 1024 in f16, twice.
    ones = tl.full(part.shape, 0x64006400, tl.uint32)
    if HIDDEN:
        # NOTE: rows are never negative, which the compiler cannot know: a number that it cannot fold stays in
        # a register, and "and" with "or" become one instruction. So does "^" below: sums of bits that it
        # cannot reorder.
        ones |= (row >> 31).to(tl.uint32)
    WIDE: tl.constexpr = LOW == 4
    if LOW == 4:
        word = take(codes + at, mask)  # u32
        p0, p1 = (word & 0x000F000F) | ones, (word & 0x00F000F0) | ones
        word = word >> 8
        p2, p3 = (word & 0x000F000F) | ones, (word & 0x00F000F0) | ones
    elif LOW == 2:
        word = _apart(take(codes + at, mask), 8)  # u16
        p0, p1 = (word & 0x00030003) | ones, ((word >> 2) & 0x00030003) | ones
        p2, p3 = ((word >> 4) & 0x00030003) | ones, ((word >> 6) & 0x00030003) | ones
    else:
        at_word = at_block * 8 + part
        word, second = take(codes + at_word, mask), take(codes + at_word + 4, mask)  # u32
        p0, p1 = (word & 0x00FF00FF) | ones, ((word >> 8) & 0x00FF00FF) | ones
        p2, p3 = (second & 0x00FF00FF) | ones, ((second >> 8) & 0x00FF00FF) | ones
    if HIGH == 1:
        bits = _apart(take(high + at, mask), 4)  # u8
        p0 ^= (bits << LOW) & (0x00010001 << LOW)
        p2 ^= (bits << (LOW - 2)) & (0x00010001 << LOW)
        if WIDE:
            p1 ^= (bits << 7) & 0x01000100
            p3 ^= (bits << 5) & 0x01000100
        else:
            p1 ^= (bits << (LOW - 1)) & (0x00010001 << LOW)
            p3 ^= (bits >> (3 - LOW)) & (0x00010001 << LOW)
    elif HIGH == 2:
        bits = _apart(take(high + at, mask), 8)  # u16
        p0 ^= (bits << 4) & 0x00300030
        p1 ^= (bits << 6) & 0x03000300
        p2 ^= bits & 0x00300030
        p3 ^= (bits << 2) & 0x03000300
    if KIND == _GROUP:
        group = row * groups + block // GROUP_BLOCKS
        zero = (take(zeros + group, mask).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        zero = tl.full(part.shape, 1024 + OFFSET, tl.float16)
    f0, f1 = _steps(p0, zero, False)
    f2, f3 = _steps(p1, zero, WIDE)
    f4, f5 = _steps(p2, zero, False)
    f6, f7 = _steps(p3, zero, WIDE)
    s0, s1, m0, m1 = block_scales(
        scales, supers, row, block, at_block, num_blocks, groups, mask, KIND, GROUP_BLOCKS
    )
    return f0, f1, f2, f3, f4, f5, f6, f7, s0, s1, m0, m1


def plane_arguments(weight: PlaneWeight) -> tuple[dict[str, Any], dict[str, int]]:
    """The planes as the kernels take them, in the element types of their loads; and the form's constants."""
    form = FORMS[weight.form]
    word = torch.uint16 if form.low_bits == 2 else torch.uint32
    codes = weight.codes.view(word)
    high = codes if weight.high is None else weight.high
    scales = weight.scales
    if form.scale_kind is ScaleKind.F16_MIN:
        scales = scales.view(torch.uint32)
    elif form.scale_kind in (ScaleKind.U8_MIN, ScaleKind.I8_HALVES, ScaleKind.NIBBLE_HALVES):
        scales = scales.view(torch.uint16)
    supers = codes if weight.supers is None else weight.supers
    if form.scale_kind in (ScaleKind.U8_MIN, ScaleKind.NIBBLE_HALVES):
        supers = supers.view(torch.uint32)
    blocks = weight.in_features // 32
    planes = {
        "codes": codes,
        "high": high.view(torch.uint16) if form.high_bits == 2 else high,
        "scales": scales,
        "supers": supers,
        "zeros": codes if weight.zeros is None else weight.zeros,
        "num_blocks": blocks,
        "groups": -(-blocks // weight.group_blocks),
    }
    constants = {
        "LOW": form.low_bits,
        "HIGH": form.high_bits,
        "OFFSET": form.offset,
        "KIND": int(form.scale_kind),
        "GROUP_BLOCKS": weight.group_blocks,
    }
    return planes, constants


@triton.jit(do_not_specialize=("first_row", "num_rows"))
def decode_kernel(
    row_ids,
    out,
    codes,
    high,
    scales,
    supers,
    zeros,
    first_row,
    num_rows,
    num_blocks,
    groups,
    scale,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Weights [num_rows, K] times scale: rows from ``first_row`` on, or those of ``row_ids`` where CHOSEN."""
    lane = tl.arange(0, ROWS * BLOCKS * 4)
    place = tl.program_id(0) * ROWS + lane // (BLOCKS * 4)
    block, part = tl.program_id(1) * BLOCKS + lane // 4 % BLOCKS, lane % 4
    mask = (place < num_rows) & (block < num_blocks)
    row = first_row + place
    if CHOSEN:
        row = take(row_ids + place, mask)
    f0, f1, f2, f3, f4, f5, f6, f7, s0, s1, m0, m1 = decode_lanes(
        codes, high, scales, supers, zeros, row.to(tl.int64), block, part, num_blocks, groups, mask,
        LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, True,
    )  # fmt: skip
    at = out + place.to(tl.int64) * (num_blocks * 32) + block * 32 + part
    KIND_OUT: tl.constexpr = out.dtype.element_ty
    tl.store(at, ((f0 * s0 + m0) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 4, ((f1 * s0 + m0) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 8, ((f2 * s0 + m0) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 12, ((f3 * s0 + m0) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 16, ((f4 * s1 + m1) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 20, ((f5 * s1 + m1) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 24, ((f6 * s1 + m1) * scale).to(KIND_OUT), mask=mask)
    tl.store(at + 28, ((f7 * s1 + m1) * scale).to(KIND_OUT), mask=mask)


def gpu_name(device: torch.device) -> str:
    """The name by which launch sizes are kept; empty where kernels are interpreted."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def decode(
    weight: PlaneWeight,
    out: torch.Tensor,
    first_row: int = 0,
    row_ids: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Fill ``out`` [rows, K] with weights in the order of their codes (act-order is not undone)."""
    planes, constants = plane_arguments(weight)
    sizes = configurations(gpu_name(out.device))["decode"]
    grid = (triton.cdiv(out.shape[0], sizes["rows"]), triton.cdiv(planes["num_blocks"], sizes["blocks"]))
    if out.shape[0]:
        decode_kernel[grid](
            row_ids=out if row_ids is None else row_ids,
            out=out,
            first_row=first_row,
            num_rows=out.shape[0],
            scale=scale,
            **planes,
            **constants,
            CHOSEN=row_ids is not None,
            ROWS=sizes["rows"],
            BLOCKS=sizes["blocks"],
            num_warps=sizes["warps"],
        )
    return out
