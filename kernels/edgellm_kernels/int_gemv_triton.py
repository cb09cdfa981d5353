"""Triton GEMV over integer activations: 8 bits, or two terms of 8 that make 15, four products at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from edgellm_kernels.gpu_configs import configurations, sizes_of
from edgellm_kernels.planes_triton import block_scales, gpu_name, plane_arguments, take
from edgellm_kernels.weights import PlaneWeight

PRECISIONS = ("int8", "int16")
"""One term, in steps of a 127th of the largest of 32 activations; two terms, in a 128th of such steps."""


@triton.jit
def _dot4(codes, x, total, ASM: tl.constexpr):
    """total + the products of the unsigned bytes of ``codes`` (u32) with the signed bytes of ``x`` (i32)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, total],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:  # what the instruction computes; Triton's interpreter knows no assembly
        for byte in tl.static_range(4):
            code = ((codes >> (8 * byte)) & 255).to(tl.int32)
            total += code * ((x << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def _four_pairs(bits):
    """Sixteen bits as the low nibbles of the bytes of a u32: two fields of two bits in each."""
    bits = bits.to(tl.uint32)
    bits = (bits | (bits << 8)) & 0x00FF00FF
    return (bits | (bits << 4)) & 0x0F0F0F0F


@triton.jit
def _code_bytes(
    codes, high, at_block, part, mask, LOW: tl.constexpr, HIGH: tl.constexpr, HALVES: tl.constexpr
):
    """A lane's eight codes, offset included, as the bytes of two u32, in the order of ``quantize_kernel``."""
    at = at_block * 4 + part
    if LOW == 8:
        at_word = at_block * 8 + part
        first, second = take(codes + at_word, mask), take(codes + at_word + 4, mask)
    else:
        if LOW == 4:
            word = take(codes + at, mask)  # u32
            first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        else:
            word = _four_pairs(take(codes + at, mask))  # u16
            first, second = word & 0x03030303, (word >> 2) & 0x03030303
        if HIGH == 1:
            bits = take(high + at, mask).to(tl.uint32)  # u8
            bits = (bits | (bits << 12)) & 0x000F000F
            bits = (bits | (bits << 6)) & 0x03030303
            first |= (bits & 0x01010101) << LOW
            second |= ((bits >> 1) & 0x01010101) << LOW
        elif HIGH == 2:
            bits = _four_pairs(take(high + at, mask))  # u16
            first |= (bits & 0x03030303) << 4
            second |= (bits << 2) & 0x30303030
        if HALVES:
            low = (first & 0x00FF00FF) | ((second & 0x00FF00FF) << 8)
            second = ((first >> 8) & 0x00FF00FF) | (second & 0xFF00FF00)
            first = low
    return first, second


@triton.jit
def _row_sums(
    x, fine, x_scales, codes, high, scales, supers, zeros, first_row, last_row, num_blocks, groups,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, FINE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """x . w of ROWS rows: [ROWS] f32. Products are whole numbers, scaled once per lane: 8 weights."""
    place = tl.arange(0, ROWS * BLOCKS * 4)
    block, part = place // 4 % BLOCKS, place % 4
    row = tl.max_constancy(tl.minimum(first_row + place // (BLOCKS * 4), last_row), BLOCKS * 4)
    none = tl.zeros([ROWS * BLOCKS * 4], tl.int32)
    ones = tl.full([ROWS * BLOCKS * 4], 0x01010101, tl.uint32)
    total = tl.zeros([ROWS * BLOCKS * 4], tl.float32)
    # The sums of the activations: of codes that have an offset or a minimum.
    SUMS: tl.constexpr = OFFSET != 0 or (KIND != 0 and KIND != 3)
    for first in range(0, num_blocks, BLOCKS):
        here = first + block
        mask = None if EVEN else here < num_blocks
        at_block = row * num_blocks + here
        low, high_codes = _code_bytes(codes, high, at_block, part, mask, LOW, HIGH, HALVES)
        x0, x1 = take(x + here * 8 + part, mask), take(x + here * 8 + 4 + part, mask)
        d0 = _dot4(low, x0, none, ASM)
        d1 = _dot4(high_codes, x1, none if HALVES else d0, ASM)
        if FINE:  # 128 times the first term: the sums stay below 2^26
            y0, y1 = take(fine + here * 8 + part, mask), take(fine + here * 8 + 4 + part, mask)
            if HALVES:
                d0 = _dot4(low, y0, d0 * 128, ASM)
                d1 = _dot4(high_codes, y1, d1 * 128, ASM)
            else:
                d1 = _dot4(high_codes, y1, _dot4(low, y0, d1 * 128, ASM), ASM)
        if SUMS:
            n0 = _dot4(ones, x0, none, ASM)
            n1 = _dot4(ones, x1, none if HALVES else n0, ASM)
            if FINE:
                if HALVES:
                    n0 = _dot4(ones, y0, n0 * 128, ASM)
                    n1 = _dot4(ones, y1, n1 * 128, ASM)
                else:
                    n1 = _dot4(ones, y1, _dot4(ones, y0, n1 * 128, ASM), ASM)
        s0, s1, m0, m1 = block_scales(scales, supers, row, here, at_block, num_blocks, groups, mask, KIND,
                                      GROUP_BLOCKS)  # fmt: skip
        if KIND == 5:
            zero = take(zeros + row * groups + here // GROUP_BLOCKS, mask).to(tl.int32)
            if HALVES:
                d0 -= zero * n0
            d1 -= zero * n1
        elif OFFSET != 0:
            if HALVES:
                d0 -= OFFSET * n0
            d1 -= OFFSET * n1
        lane = s1 * d1.to(tl.float32)
        if HALVES:
            lane += s0 * d0.to(tl.float32)
        if KIND == 4:
            lane += m0 * n0.to(tl.float32)
        if KIND == 1 or KIND == 2 or KIND == 4:
            lane += m1 * n1.to(tl.float32)
        total += take(x_scales + here, mask) * lane
    return tl.sum(tl.reshape(total, (ROWS, BLOCKS * 4)), axis=1)


@triton.jit
def int_gemv_kernel(
    x, fine, x_scales, bias, add, out, codes, high, scales, supers, zeros, n, num_blocks, groups,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
    FINE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One row of activations as ``quantize_kernel`` makes them: out[n] = W x + bias + add."""
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    inside = row < n
    total = _row_sums(
        x, fine, x_scales, codes, high, scales, supers, zeros, first_row, n - 1, num_blocks, groups,
        LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, ROWS, BLOCKS, EVEN, HALVES, FINE, ASM,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0)
    if HAS_ADD:
        total += tl.load(add + row, mask=inside, other=0.0)
    tl.store(out + row, total, mask=inside)


@triton.jit
def quantize_kernel(
    x, coarse, fine, scales, num_blocks, HALVES: tl.constexpr, FINE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Blocks of 32 activations as whole numbers of steps: x = scale (128 coarse + fine), or scale coarse.

    Bytes lie as the kernels above meet the codes of a lane: those of the places 0, 2, 1, 3 in its first word
    and 4, 6, 5, 7 in the second (HALVES: a scale per 16 weights, or 8-bit codes), else 0, 4, 1, 5 and
    2, 6, 3, 7. The first words of a block's four lanes lie before the second ones.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    k = tl.arange(0, 32)[None, :]
    mask = (block < num_blocks)[:, None] & (k < 32)
    values = tl.load(x + block[:, None] * 32 + k, mask=mask, other=0.0)
    peak = tl.max(tl.abs(values), axis=1)
    # NOTE: a maximum may pass over NaN, which has to stay visible.
    peak = tl.where(tl.sum((values != values).to(tl.int32), axis=1) > 0, float("nan"), peak)
    STEPS: tl.constexpr = 16256.0 if FINE else 127.0
    scale = tl.div_rn(peak, tl.zeros_like(peak) + STEPS)
    divisor = tl.where(scale == 0.0, float("inf"), scale)[:, None] + values * 0.0
    steps = tl.div_rn(values, divisor)
    steps = tl.where(steps != steps, 0.0, tl.minimum(tl.maximum(steps, -STEPS), STEPS))
    steps = (steps + 12582912.0) - 12582912.0
    place = k // 4
    word = place // 4 if HALVES else place // 2 % 2
    byte = 2 * (place % 2) + (place // 2 % 2 if HALVES else place // 4)
    at = block[:, None] * 32 + word * 16 + (k % 4) * 4 + byte
    if FINE:
        whole = (steps * 0.0078125 + 12582912.0) - 12582912.0
        tl.store(fine + at, (steps - 128.0 * whole).to(tl.int8), mask=mask)
        steps = whole
    tl.store(coarse + at, steps.to(tl.int8), mask=mask)
    tl.store(scales + block, scale, mask=block < num_blocks)


def quantize(
    x: torch.Tensor, halves: bool, precision: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [1, K] f32 -> coarse and fine int8 [K] in the kernel's order (``fine`` is ``coarse`` of int8), f32
    scales [K / 32].
    """
    blocks = x.shape[1] // 32
    coarse = torch.empty(x.shape[1], dtype=torch.int8, device=x.device)
    fine = torch.empty_like(coarse) if precision == "int16" else coarse
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    quantize_kernel[(triton.cdiv(blocks, 32),)](
        x, coarse, fine, scales, blocks, HALVES=halves, FINE=precision == "int16", BLOCKS=32
    )
    return coarse, fine, scales


def keeps_halves(constants: Mapping[str, int]) -> bool:
    """Whether the two halves of a block are multiplied apart, by the form's constants."""
    return constants["LOW"] == 8 or constants["KIND"] in (3, 4)


def int_gemv(
    x: torch.Tensor, weight: PlaneWeight, out: torch.Tensor, add: torch.Tensor | None, precision: str
) -> None:
    """out [1, N] = x @ weight.T + bias + add, x [1, K] f32 rounded to the integers of ``precision``."""
    planes, constants = plane_arguments(weight)
    sizes = sizes_of(configurations(gpu_name(x.device)), "gemv", weight.form)
    halves = keeps_halves(constants)
    coarse, fine, scales = quantize(x, halves, precision)
    int_gemv_kernel[(triton.cdiv(weight.out_features, sizes["rows"]),)](
        x=coarse.view(torch.int32),
        fine=fine.view(torch.int32),
        x_scales=scales,
        bias=x if weight.bias is None else weight.bias,
        add=x if add is None else add,
        out=out,
        n=weight.out_features,
        **planes,
        **constants,
        HAS_BIAS=weight.bias is not None,
        HAS_ADD=add is not None,
        ROWS=sizes["rows"],
        BLOCKS=sizes["blocks"],
        EVEN=planes["num_blocks"] % sizes["blocks"] == 0,
        HALVES=halves,
        FINE=precision == "int16",
        ASM=x.device.type == "cuda",
        num_warps=sizes["warps"],
        num_stages=1,
    )
