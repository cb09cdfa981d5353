"""Reference of the linear ops: products with dense weights, or with file blocks decoded in small parts."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from edgellm_kernels.ggml_blocks import dequantize, dequantize_rows
from edgellm_kernels.gpu_layouts import decode_planes
from edgellm_kernels.int_groups import dequantize_group_rows
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    IntWeight,
    LinearWeight,
    NativeWeight,
    PlaneWeight,
    StackedWeight,
)

_CHUNK_ELEMENTS = 1 << 20
"""Weights decoded at once (4 MiB as f32): stays in the second-level cache and bounds the scratch memory."""


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap), in place. torch's tanh saturates, so huge inputs stay finite."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def _float_rows(weight: HeldPart, start: int, end: int) -> torch.Tensor:
    """Rows start to end as floats [rows, K], decoded where they are codes."""
    if isinstance(weight, NativeWeight):
        raise TypeError("a weight packed for the native kernels is read by them only")
    if isinstance(weight, PlaneWeight):
        return decode_planes(weight, start, end)
    if isinstance(weight, IntWeight):
        return dequantize_group_rows(weight, start, end)
    rows = weight.data[start:end]
    return rows if isinstance(weight, DenseWeight) else dequantize(rows, weight.layout, weight.in_features)


def multiply(x: torch.Tensor, weight: HeldPart, out: torch.Tensor) -> None:
    """out[...] = x @ weight.T + bias, f32."""
    n, k = weight.shape
    if isinstance(weight, DenseWeight) and weight.data.dtype == x.dtype:
        torch.mm(x, weight.data.t(), out=out) if x.dtype == out.dtype else out.copy_(x @ weight.data.t())
    else:
        step = max(1, _CHUNK_ELEMENTS // k)
        for start in range(0, n, step):
            values = _float_rows(weight, start, min(n, start + step))
            out[:, start : start + step] = x @ values.to(x.dtype).t()
    if weight.bias is not None:
        out += weight.bias


def _fewest_rows(x: torch.Tensor) -> int:
    """Of a product of several rows. Over one of a single row, one of two or three takes MKL 1.6 to 3.6 times
    as long, one of four 1.3 to 1.8 times, one of five 1.0 to 1.8 times with several threads."""
    if x.device.type != "cpu":
        return 1
    return 4 if torch.get_num_threads() == 1 else 5


def _product(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    rows = x.shape[0]
    fewest = _fewest_rows(x)
    if 1 < rows < fewest:
        x = torch.cat([x, x.new_zeros((fewest - rows, x.shape[1]))])
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    start = 0
    for part in parts:
        multiply(x, part, out[:, start : start + part.shape[0]])
        start += part.shape[0]
    return out[:rows]


def linear(x: Prepared, weight: LinearWeight, add: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.Linear."""
    out = _product(x.values, weight)
    return out if add is None else out.add_(add)


def gate_up(x: Prepared, weight: LinearWeight, activation: str) -> Prepared:
    """See ops.GateUp."""
    gate, up = _product(x.values, weight).chunk(2, dim=1)
    if activation == "silu":
        gate = functional.silu(gate)
    elif activation == "gelu_tanh":
        gate = functional.gelu(gate, approximate="tanh")
    else:
        raise ValueError(f"activation must be silu or gelu_tanh, not {activation!r}")
    return Prepared(gate.mul_(up).to(x.values.dtype))


def lm_head(x: Prepared, weight: LinearWeight, softcap: float | None = None) -> torch.Tensor:
    """See ops.LmHead."""
    return soft_cap(_product(x.values, weight), softcap)


def embed(
    token_ids: torch.Tensor,
    weight: DenseWeight | BlockQuantWeight | NativeWeight | PlaneWeight,
    scale: float = 1.0,
) -> torch.Tensor:
    """See ops.Embed."""
    if isinstance(weight, NativeWeight):
        raise TypeError("a weight packed for the native kernels is read by them only")
    if isinstance(weight, PlaneWeight):
        raise TypeError("a weight packed for the GPU kernels is read by them only")
    if isinstance(weight, DenseWeight):
        rows = weight.data.index_select(0, token_ids).float()
    else:
        rows = dequantize_rows(weight.data, weight.layout, weight.in_features, token_ids)
    return rows if scale == 1.0 else rows.mul_(scale)
