"""Triton linears over weights in planes: GEMV of one row, tensor-core product of few, decoding for many."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from edgellm_kernels import linear_torch
from edgellm_kernels.gpu_configs import (
    DOT_REGISTERS,
    configurations,
    dot_sizes,
    kernel_for_rows,
    sizes_of,
    splits_of_k,
)
from edgellm_kernels.int_gemv_triton import PRECISIONS, int_gemv
from edgellm_kernels.operands import Prepared
from edgellm_kernels.planes_triton import decode, decode_lanes, gpu_name, plane_arguments, take
from edgellm_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    LinearWeight,
    NativeWeight,
    PlaneWeight,
    StackedWeight,
)

_ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2}
_SCRATCH_ELEMENTS = 1 << 27
"""Weights decoded at once for many rows: 256 MiB in 16 bits."""


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """silu, or the tanh form of GELU: both are gate * sigmoid(z), and exp may overflow to infinity."""
    z = gate
    if ACTIVATION == 2:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-z))


@triton.jit
def _row_sums(
    x, codes, high, scales, supers, zeros, first_row, last_row, num_blocks, groups,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x . w of ROWS rows: [ROWS] f32, added up in lanes and reduced once, in an order that never changes."""
    place = tl.arange(0, ROWS * BLOCKS * 4)
    block, part = place // 4 % BLOCKS, place % 4
    row = tl.max_constancy(tl.minimum(first_row + place // (BLOCKS * 4), last_row), BLOCKS * 4)
    total = tl.zeros([ROWS * BLOCKS * 4], tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        mask = None if EVEN else first + block < num_blocks
        at = x + (first + block) * 32 + part
        x0 = take(at, mask)
        x1 = take(at + 4, mask)
        x2 = take(at + 8, mask)
        x3 = take(at + 12, mask)
        x4 = take(at + 16, mask)
        x5 = take(at + 20, mask)
        x6 = take(at + 24, mask)
        x7 = take(at + 28, mask)
        f0, f1, f2, f3, f4, f5, f6, f7, s0, s1, m0, m1 = decode_lanes(
            codes, high, scales, supers, zeros, row, first + block, part, num_blocks, groups, mask,
            LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, True,
        )  # fmt: skip
        low = f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3
        if KIND == 3 or KIND == 4:  # a scale per 16 weights
            total += s0 * low
            total += s1 * (f4 * x4 + f5 * x5 + f6 * x6 + f7 * x7)
        else:
            total += s0 * (low + f4 * x4 + f5 * x5 + f6 * x6 + f7 * x7)
        if KIND == 4:
            total += m0 * (x0 + x1 + x2 + x3)
            total += m1 * (x4 + x5 + x6 + x7)
        elif KIND == 1 or KIND == 2:
            total += m0 * (x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7)
    return tl.sum(tl.reshape(total, (ROWS, BLOCKS * 4)), axis=1)


@triton.jit
def gemv_kernel(
    x, bias, add, out, codes, high, scales, supers, zeros, n, num_blocks, groups,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One row of activations: out[n] = W x + bias + add; with ACTIVATION act(W[:n] x) * (W[n:] x)."""
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    inside = row < n
    row = tl.minimum(row, n - 1)  # rows behind the last are computed again, and not stored
    total = _row_sums(
        x, codes, high, scales, supers, zeros, first_row, n - 1, num_blocks, groups,
        LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, ROWS, BLOCKS, EVEN,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + row)
    if ACTIVATION != 0:
        up = _row_sums(
            x, codes, high, scales, supers, zeros, first_row + n, 2 * n - 1, num_blocks, groups,
            LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, ROWS, BLOCKS, EVEN,
        )  # fmt: skip
        if HAS_BIAS:
            up += tl.load(bias + n + row)
        total = _activate(total, ACTIVATION) * up
    if HAS_ADD:
        total += tl.load(add + row)
    tl.store(out + row, total, mask=inside)


@triton.jit
def scale_rows_kernel(x, out, factors, k, BLOCK: tl.constexpr):
    """Rows as f16, scaled by a power of two so that their largest element lies in 128 .. 256, and what undoes
    that: nothing overflows, whatever the activations are.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, k, BLOCK):
        mask = first + column < k
        largest = tl.maximum(largest, tl.abs(tl.load(x + row * k + first + column, mask=mask, other=0.0)))
    peak = tl.max(largest, axis=0)
    exponent = (peak.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 8), 254)
    factor = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(factors + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True))
    for first in range(0, k, BLOCK):
        mask = first + column < k
        values = tl.load(x + row * k + first + column, mask=mask, other=0.0)
        tl.store(out + row * k + first + column, (values * factor).to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=("tokens", "splits"))
def dot_kernel(
    x, factors, bias, add, out, codes, high, scales, supers, zeros, tokens, splits, n, num_blocks, groups,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """out[tokens, n] = x W^T + bias + add, weights as the left operand; SPLIT: parts of the sum.

    HALF: operands in f16, x scaled by ``factors``; else f32 in three tf32 products. f32 sums in both.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    k = num_blocks * 32
    here = tl.arange(0, BLOCKS * 4)
    place = tl.arange(0, ROWS * BLOCKS * 4)
    block, part = place // 4 % BLOCKS, place % 4
    rows = tl.program_id(0) * ROWS + place // (BLOCKS * 4)
    rows = tl.max_constancy(tl.minimum(rows, n - 1), BLOCKS * 4)
    present = (token < tokens)[None, :]
    # NOTE: a token row behind the last is not read, but zeros.
    start = x + token.to(tl.int64)[None, :] * k + (here % 4)[:, None]
    first_step, end_step = 0, (num_blocks + BLOCKS - 1) // BLOCKS
    if SPLIT:
        each = (end_step + splits - 1) // splits
        first_step, end_step = split * each, tl.minimum(end_step, split * each + each)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    PRECISION: tl.constexpr = "tf32" if HALF else "tf32x3"
    LEFT: tl.constexpr = tl.float16 if HALF else tl.float32
    TILE: tl.constexpr = (ROWS, BLOCKS * 4)
    HIDDEN: tl.constexpr = KIND != 1 or HIGH != 1  # Q5_1: constants let Triton decode in the dot's own layout
    for step in range(first_step, end_step):
        first = step * BLOCKS
        mask = None if EVEN else first + block < num_blocks
        seen = present if EVEN else present & ((first + here // 4)[:, None] < num_blocks)
        at = start + (first + here // 4)[:, None] * 32
        x0 = tl.load(at, mask=seen, other=0.0)
        x1 = tl.load(at + 4, mask=seen, other=0.0)
        x2 = tl.load(at + 8, mask=seen, other=0.0)
        x3 = tl.load(at + 12, mask=seen, other=0.0)
        x4 = tl.load(at + 16, mask=seen, other=0.0)
        x5 = tl.load(at + 20, mask=seen, other=0.0)
        x6 = tl.load(at + 24, mask=seen, other=0.0)
        x7 = tl.load(at + 28, mask=seen, other=0.0)
        f0, f1, f2, f3, f4, f5, f6, f7, s0, s1, m0, m1 = decode_lanes(
            codes, high, scales, supers, zeros, rows, first + block, part, num_blocks, groups, mask,
            LOW, HIGH, OFFSET, KIND, GROUP_BLOCKS, HIDDEN,
        )  # fmt: skip
        total = tl.dot(tl.reshape((f0 * s0 + m0).to(LEFT), TILE), x0, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f1 * s0 + m0).to(LEFT), TILE), x1, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f2 * s0 + m0).to(LEFT), TILE), x2, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f3 * s0 + m0).to(LEFT), TILE), x3, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f4 * s1 + m1).to(LEFT), TILE), x4, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f5 * s1 + m1).to(LEFT), TILE), x5, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f6 * s1 + m1).to(LEFT), TILE), x6, total, input_precision=PRECISION)
        total = tl.dot(tl.reshape((f7 * s1 + m1).to(LEFT), TILE), x7, total, input_precision=PRECISION)
    if HALF:
        total *= tl.load(factors + token, mask=token < tokens, other=0.0)[None, :]
    inside = (row < n)[:, None] & present
    place = token.to(tl.int64)[None, :] * n + row[:, None]
    if SPLIT:
        place += split.to(tl.int64) * tokens * n
    else:
        if HAS_BIAS:
            total += tl.load(bias + row, mask=row < n, other=0.0)[:, None]
        if HAS_ADD:
            total += tl.load(add + place, mask=inside, other=0.0)
    tl.store(out + place, total, mask=inside)


@triton.jit
def gate_kernel(both, out, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = act(both[row, :n]) * both[row, n:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    gate = tl.load(both + row * 2 * n + column, mask=mask, other=0.0)
    up = tl.load(both + row * 2 * n + n + column, mask=mask, other=0.0)
    tl.store(out + row * n + column, _activate(gate, ACTIVATION) * up, mask=mask)


def run_with_sizes(
    x: torch.Tensor, weight: PlaneWeight, kernel: str, sizes: Mapping[str, int]
) -> torch.Tensor:
    """x @ weight.T by gemv, dot16, dot32 or dot64 (16 bits) with launch sizes that are given: for tuning."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=torch.float32, device=x.device)
    if kernel == "gemv":
        _gemv(x, weight, out, None, "", sizes)
    else:
        _dot(x, weight, out, None, torch.bfloat16, kernel, sizes)
    return out


def _gemv(
    x: torch.Tensor,
    weight: PlaneWeight,
    out: torch.Tensor,
    add: torch.Tensor | None,
    activation: str,
    sizes: Mapping[str, int] | None = None,
) -> None:
    planes, constants = plane_arguments(weight)
    sizes = sizes or sizes_of(configurations(gpu_name(x.device)), "gemv", weight.form)
    n = weight.out_features // 2 if activation else weight.out_features
    gemv_kernel[(triton.cdiv(n, sizes["rows"]),)](
        x=x,
        bias=x if weight.bias is None else weight.bias,
        add=x if add is None else add,
        out=out,
        n=n,
        **planes,
        **constants,
        HAS_BIAS=weight.bias is not None,
        HAS_ADD=add is not None,
        ACTIVATION=_ACTIVATIONS[activation],
        ROWS=sizes["rows"],
        BLOCKS=sizes["blocks"],
        EVEN=planes["num_blocks"] % sizes["blocks"] == 0,
        num_warps=sizes["warps"],
        num_stages=1,
    )


def _dot(
    x: torch.Tensor,
    weight: PlaneWeight,
    out: torch.Tensor,
    add: torch.Tensor | None,
    dtype: torch.dtype,
    kernel: str,
    sizes: Mapping[str, int] | None = None,
) -> None:
    planes, constants = plane_arguments(weight)
    half = dtype != torch.float32
    sizes = sizes or dot_sizes(configurations(gpu_name(x.device)), kernel, weight.form, half)
    tokens, n = out.shape
    factors = x
    if half:
        factors, scaled = x.new_empty(tokens), torch.empty_like(x, dtype=torch.float16)
        scale_rows_kernel[(tokens,)](x, scaled, factors, x.shape[1], BLOCK=1024)
        x = scaled
    grid = (triton.cdiv(n, sizes["rows"]), triton.cdiv(tokens, sizes["tokens"]))
    splits = splits_of_k(grid[0] * grid[1], triton.cdiv(planes["num_blocks"], sizes["blocks"]))
    direct = splits == 1 and out.is_contiguous() and (add is None or add.is_contiguous())
    target = out if direct else out.new_empty((splits, tokens, n))
    dot_kernel[(*grid, splits)](
        x=x,
        factors=factors,
        bias=x if weight.bias is None else weight.bias,
        add=x if add is None else add,
        out=target,
        tokens=tokens,
        splits=splits,
        n=n,
        **planes,
        **constants,
        HAS_BIAS=direct and weight.bias is not None,
        HAS_ADD=direct and add is not None,
        HALF=half,
        ROWS=sizes["rows"],
        TOKENS=sizes["tokens"],
        BLOCKS=sizes["blocks"],
        SPLIT=splits > 1,
        EVEN=planes["num_blocks"] % sizes["blocks"] == 0,
        num_warps=sizes["warps"],
        num_stages=sizes["stages"],
        maxnreg=DOT_REGISTERS,
    )
    if not direct:
        torch.sum(target, 0, out=out)
        _finish(out, weight, add)


def _dense(x: torch.Tensor, weight: PlaneWeight, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Decode some rows of the weight, multiply with the library's product, and so on."""
    n, k = weight.shape
    rows = min(n, max(1, _SCRATCH_ELEMENTS // k))
    scratch = torch.empty((rows, k), dtype=dtype, device=x.device)
    x = x.to(dtype)
    for start in range(0, n, rows):
        end = min(n, start + rows)
        out[:, start:end] = x @ decode(weight, scratch[: end - start], start).t()


def _finish(out: torch.Tensor, weight: HeldPart, add: torch.Tensor | None) -> None:
    if weight.bias is not None:
        out += weight.bias
    if add is not None:
        out += add


def _multiply(
    x: torch.Tensor,
    weight: HeldPart,
    out: torch.Tensor,
    add: torch.Tensor | None,
    dtype: torch.dtype,
    activations: str,
) -> None:
    """out[...] = x @ weight.T + bias + add."""
    if not isinstance(weight, PlaneWeight):
        linear_torch.multiply(x.to(dtype), weight, out)
        if add is not None:
            out += add
        return
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    kernel = kernel_for_rows(x.shape[0])
    if kernel == "gemv" and activations in PRECISIONS:
        int_gemv(x, weight, out, add, activations)
    elif kernel == "gemv":
        _gemv(x, weight, out, add, "")
    elif kernel == "dense":
        _dense(x, weight, out, dtype)
        _finish(out, weight, add)
    else:
        _dot(x, weight, out, add, dtype, kernel)


def _product(
    x: Prepared,
    weight: LinearWeight,
    dtype: torch.dtype,
    activations: str,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    values = x.values.float().contiguous()
    out = torch.empty((x.num_tokens, weight.shape[0]), dtype=torch.float32, device=values.device)
    parts: tuple[HeldPart, ...] = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    start = 0
    for part in parts:
        columns = slice(start, start + part.shape[0])
        if x.num_tokens:
            part_add = None if add is None else add[:, columns]
            _multiply(values, part, out[:, columns], part_add, dtype, activations)
        start = columns.stop
    return out


def linear(
    x: Prepared,
    weight: LinearWeight,
    add: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    activations: str = "exact",
) -> torch.Tensor:
    """See ops.Linear. One row is computed in f32, or where ``activations`` is int8 or int16 in integers over
    weights in planes; more rows in ``dtype``'s operands with f32 sums.
    """
    return _product(x, weight, dtype, activations, add)


def gate_up(
    x: Prepared,
    weight: LinearWeight,
    activation: str,
    *,
    dtype: torch.dtype = torch.float32,
    activations: str = "exact",
) -> Prepared:
    """See ops.GateUp. One row is one launch where gate and up have one form and activations are exact."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation must be silu or gelu_tanh, not {activation!r}")
    n = weight.shape[0] // 2
    out = torch.empty((x.num_tokens, n), dtype=torch.float32, device=x.values.device)
    if x.num_tokens == 1 and isinstance(weight, PlaneWeight) and activations == "exact":
        values = x.values.float().contiguous()
        values = values if weight.order is None else values.index_select(1, weight.order)
        _gemv(values, weight, out, None, activation)
        return Prepared(out)
    both = _product(x, weight, dtype, activations)
    if x.num_tokens:
        gate_kernel[(x.num_tokens, triton.cdiv(n, 1024))](
            both, out, n, ACTIVATION=_ACTIVATIONS[activation], BLOCK=1024
        )
    return Prepared(out)


def lm_head(
    x: Prepared,
    weight: LinearWeight,
    softcap: float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    activations: str = "exact",
) -> torch.Tensor:
    """See ops.LmHead."""
    return linear_torch.soft_cap(_product(x, weight, dtype, activations), softcap)


def embed(
    token_ids: torch.Tensor,
    weight: DenseWeight | BlockQuantWeight | NativeWeight | PlaneWeight,
    scale: float = 1.0,
) -> torch.Tensor:
    """See ops.Embed. An embedding that is not the head too stays in the file's form: torch reads its rows."""
    if not isinstance(weight, PlaneWeight):
        return linear_torch.embed(token_ids, weight, scale)
    out = torch.empty((token_ids.shape[0], weight.in_features), dtype=torch.float32, device=token_ids.device)
    decode(weight, out, row_ids=token_ids.contiguous(), scale=scale)
    if weight.order is None:
        return out
    natural = torch.empty_like(out)
    natural[:, weight.order] = out
    return natural
