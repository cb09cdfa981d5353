"""The norm op of the native library: RMS norm fused with the residual addition, in f32."""

from __future__ import annotations

import torch

from edgellm_kernels.native_library import load_library
from edgellm_kernels.native_threads import pool
from edgellm_kernels.operands import Prepared


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    post_norm: torch.Tensor | None = None,
) -> tuple[Prepared, torch.Tensor]:
    """See ops.AddRmsNorm."""
    library = load_library()
    assert library is not None, "chosen without a native library"
    residual = residual.contiguous()
    x = None if x is None else x.contiguous()
    rows, n = residual.shape
    total, out = torch.empty((2, rows, n), dtype=torch.float32)
    library.call(
        "edgellm_add_rms_norm",
        pool(library),
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        None if post_norm is None else post_norm.data_ptr(),
        eps,
        rows,
        n,
        total.data_ptr(),
        out.data_ptr(),
    )
    return Prepared(out), total
