"""Triton RMS norm fused with the residual addition, in f32: one launch, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm_kernels.operands import Prepared


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    post_norm,
    total_out,
    out,
    n,
    eps,
    HAS_X: tl.constexpr,
    HAS_POST_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = residual + x (normed with post_norm where there is one); out = rms_norm(total) * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    total = tl.load(residual + row * n + column, mask=mask, other=0.0)
    if HAS_X:
        added = tl.load(x + row * n + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_POST_NORM:
            mean = tl.sum(added * added, axis=0) / n
            added = added * tl.rsqrt(mean + eps) * tl.load(post_norm + column, mask=mask, other=0.0)
        total += added
        tl.store(total_out + row * n + column, total, mask=mask)
    mean = tl.sum(total * total, axis=0) / n
    normed = total * tl.rsqrt(mean + eps) * tl.load(weight + column, mask=mask, other=0.0)
    tl.store(out + row * n + column, normed, mask=mask)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    post_norm: torch.Tensor | None = None,
) -> tuple[Prepared, torch.Tensor]:
    """See ops.AddRmsNorm."""
    residual = residual.contiguous()
    rows, n = residual.shape
    out = torch.empty_like(residual)
    total = residual if x is None else torch.empty_like(residual)
    if rows:
        block = triton.next_power_of_2(n)
        add_rms_norm_kernel[(rows,)](
            x=residual if x is None else x.contiguous(),
            residual=residual,
            weight=weight,
            post_norm=weight if post_norm is None else post_norm,
            total_out=total,
            out=out,
            n=n,
            eps=eps,
            HAS_X=x is not None,
            HAS_POST_NORM=post_norm is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        )
    return Prepared(out), total
