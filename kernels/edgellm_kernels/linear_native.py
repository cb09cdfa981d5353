"""The linear ops of the native library: packed weights times f32 or 16-bit activations."""

from __future__ import annotations

from dataclasses import replace

import torch

from edgellm_kernels import linear_torch
from edgellm_kernels.native_library import NativeLibrary, load_library
from edgellm_kernels.native_threads import pool
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    LinearWeight,
    NativeWeight,
    PlaneWeight,
    StackedWeight,
)

ACTIVATION_BLOCK = 32
ACTIVATION_BLOCK_BYTES = 80
"""ActivationBlock of activations.h: 32 int16, scale, scaled sum and two sums."""
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def _library() -> NativeLibrary:
    library = load_library()
    assert library is not None, "chosen without a native library"
    return library


def quantize(values: torch.Tensor) -> torch.Tensor | None:
    """f32 [tokens, K] as blocks of 16-bit integers, uint8 [tokens, K / 32 * 80]; None where K has no whole
    number of blocks: no block format has such rows.
    """
    rows, k = values.shape
    if k % ACTIVATION_BLOCK:
        return None
    blocks = torch.empty((rows, k // ACTIVATION_BLOCK * ACTIVATION_BLOCK_BYTES), dtype=torch.uint8)
    library = _library()
    library.call("edgellm_quantize", pool(library), values.data_ptr(), rows, k, blocks.data_ptr())
    return blocks


def _with_blocks(x: Prepared, exact: bool) -> Prepared:
    """x with contiguous f32 values and, unless ``exact``, their blocks."""
    values = x.values.contiguous()
    assert values.dtype == torch.float32 and values.ndim == 2
    if exact or x.quantized is not None:
        return x if values is x.values else replace(x, values=values)
    return Prepared(values, quantize(values))


def _in_order(x: Prepared, order: torch.Tensor, exact: bool) -> Prepared:
    """x with its columns in the order of a weight's, quantized anew."""
    return _with_blocks(Prepared(x.values.index_select(1, order)), exact)


def _multiply(x: Prepared, weight: NativeWeight, out: torch.Tensor, add: torch.Tensor | None) -> None:
    """out[...] = x @ weight.T + bias + add; out and add are column ranges of contiguous rows."""
    assert x.values.shape[1] == weight.in_features and out.stride(0) >= weight.out_features
    assert add is None or (add.shape == out.shape and add.stride() == out.stride())
    library = _library()
    library.call(
        "edgellm_linear",
        pool(library),
        weight.type_id,
        weight.data.data_ptr(),
        weight.out_features,
        weight.in_features,
        None if weight.bias is None else weight.bias.data_ptr(),
        x.values.data_ptr(),
        None if x.quantized is None else x.quantized.data_ptr(),
        x.num_tokens,
        out.data_ptr(),
        out.stride(0),
        None if add is None else add.data_ptr(),
    )


def _product(x: Prepared, weight: LinearWeight, exact: bool, add: torch.Tensor | None = None) -> torch.Tensor:
    whole = _with_blocks(x, exact)
    parts: tuple[HeldPart, ...] = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    out = torch.empty((whole.num_tokens, weight.shape[0]), dtype=torch.float32)
    add = None if add is None else add.contiguous()
    start = 0
    for part in parts:
        columns = slice(start, start + part.shape[0])
        if not isinstance(part, NativeWeight):
            raise TypeError(f"the native kernels need packed weights, not {type(part).__name__}")
        given = whole if part.order is None else _in_order(whole, part.order, exact)
        _multiply(given, part, out[:, columns], None if add is None else add[:, columns])
        start = columns.stop
    return out


def linear(
    x: Prepared, weight: LinearWeight, add: torch.Tensor | None = None, *, exact: bool = False
) -> torch.Tensor:
    """See ops.Linear."""
    return _product(x, weight, exact, add)


def gate_up(x: Prepared, weight: LinearWeight, activation: str, *, exact: bool = False) -> Prepared:
    """See ops.GateUp."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be silu or gelu_tanh, not {activation!r}")
    both = _product(x, weight, exact)
    rows, n = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, n), dtype=torch.float32)
    blocks = None
    if not exact and n % ACTIVATION_BLOCK == 0:
        blocks = torch.empty((rows, n // ACTIVATION_BLOCK * ACTIVATION_BLOCK_BYTES), dtype=torch.uint8)
    library = _library()
    library.call(
        "edgellm_gate",
        pool(library),
        _ACTIVATIONS[activation],
        both.data_ptr(),
        rows,
        n,
        out.data_ptr(),
        None if blocks is None else blocks.data_ptr(),
    )
    return Prepared(out, blocks)


def lm_head(
    x: Prepared, weight: LinearWeight, softcap: float | None = None, *, exact: bool = False
) -> torch.Tensor:
    """See ops.LmHead."""
    return linear_torch.soft_cap(_product(x, weight, exact), softcap)


def embed(
    token_ids: torch.Tensor,
    weight: DenseWeight | BlockQuantWeight | NativeWeight | PlaneWeight,
    scale: float = 1.0,
) -> torch.Tensor:
    """See ops.Embed. An embedding that is not the head too stays in the file's form: torch reads its rows."""
    if not isinstance(weight, NativeWeight):
        return linear_torch.embed(token_ids, weight, scale)
    assert weight.order is None, "an embedding has no act-order"
    ids = token_ids.to(torch.int64).contiguous()
    out = torch.empty((ids.shape[0], weight.in_features), dtype=torch.float32)
    library = _library()
    library.call(
        "edgellm_decode_rows",
        pool(library),
        weight.type_id,
        weight.data.data_ptr(),
        weight.out_features,
        weight.in_features,
        ids.data_ptr(),
        ids.shape[0],
        scale,
        out.data_ptr(),
    )
    return out
