"""Reference of the norm ops: RMS norm fused with the residual addition, in f32."""

from __future__ import annotations

import torch

from edgellm_kernels.operands import Prepared


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in f32 (arXiv 1910.07467)."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    post_norm: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Prepared, torch.Tensor]:
    """See ops.AddRmsNorm."""
    if x is not None:
        x = x.float() if post_norm is None else rms_norm(x, post_norm, eps)
        residual = residual + x
    return Prepared(rms_norm(residual, weight, eps).to(dtype)), residual
