"""Rows of KV pages as the Triton kernels read and write them: floats, int8, or e4m3 by integer operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


def page_form(pages: torch.Tensor) -> int:
    """PLAIN, INT8 or FP8, by the pages' element type."""
    forms = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
    return int(forms.get(pages.dtype, PLAIN).value)


def page_bytes(pages: torch.Tensor) -> torch.Tensor:
    """The pages as a kernel takes them: e4m3 as plain bytes, as Triton has that type from compute capability
    8.9 on only, and in its interpreter rounds to it otherwise than a GPU does.
    """
    return pages.view(torch.int8) if pages.dtype == torch.float8_e4m3fn else pages


@triton.jit
def e4m3_value(code):
    """f32 of the e4m3 in int8 ``code``, divided by 256; of the NaN codes, which are never stored, 480 / 256.

    Exponent and mantissa are those of an f16 with a bias of 15 in place of 7, below the normal numbers too.
    """
    bits = (code.to(tl.int16) << 7) & -16385  # the sign lies in both upper bits: the lower one goes
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_code(x):
    """int8 e4m3 nearest to an f32 of at most 448 in size, halves to even: the bits of torch's conversion."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Twenty of 23 mantissa bits fall away, halves to even; then the bias is 7 in place of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 steps are 2^-9, which is the last bit of an f32 at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.int8)


@triton.jit
def load_tile(pages, scales, row, element, seen, DIM: tl.constexpr, FORM: tl.constexpr):
    """Rows of a page, f32, of e4m3 without scales; zeros where not seen: what lies there may be anything."""
    tile = tl.load(pages + row * DIM + element, mask=seen & (element < DIM), other=0)
    if FORM == FP8:
        return e4m3_value(tile)
    elif FORM == INT8:
        return tile.to(tl.float32) * tl.load(scales + row, mask=seen, other=0.0).to(tl.float32)
    else:
        return tile.to(tl.float32)


@triton.jit
def e4m3_scales(scales, row, seen):
    """What the values of ``load_tile`` are to be multiplied by, row by row: cheaper on the scores of keys and
    on the weights of values than on their tiles, and as exact, for e4m3 fits whole into every product.
    """
    return tl.load(scales + row, mask=seen, other=0.0).to(tl.float32) * 256.0


@triton.jit
def _whole(x):
    """The nearest whole number, halves to even, of a number below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_row(
    values, element, mask, pages, scales, slot, num_heads, head, DIM: tl.constexpr, FORM: tl.constexpr
):
    """One head's row at a slot, quantized as kv_store_torch does it: the same bytes."""
    row = slot * num_heads + head
    if FORM == PLAIN:
        tl.store(pages + row * DIM + element, values.to(pages.dtype.element_ty), mask=mask)
    else:
        peak = tl.max(tl.where(mask, tl.abs(values), 0.0), axis=0)
        # NOTE: a maximum may pass over NaN, which has to stay visible.
        peak = tl.where(tl.sum((mask & (values != values)).to(tl.int32), axis=0) > 0, float("nan"), peak)
        LARGEST: tl.constexpr = 448.0 if FORM == FP8 else 127.0
        exact = tl.div_rn(peak, LARGEST)
        scale = tl.where((exact > 65504.0) & (exact < float("inf")), 65504.0, exact).to(tl.float16)
        divisor = scale.to(tl.float32)
        divisor = tl.where(divisor == 0.0, float("inf"), divisor)
        steps = tl.div_rn(values, tl.zeros_like(values) + divisor)
        steps = tl.where(steps != steps, 0.0, steps)
        steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
        codes = e4m3_code(steps) if FORM == FP8 else _whole(steps).to(tl.int8)
        tl.store(pages + row * DIM + element, codes, mask=mask)
        tl.store(scales + row, scale)
