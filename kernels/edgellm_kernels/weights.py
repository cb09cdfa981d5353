"""The forms of weights, and the only place that changes a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from edgellm_kernels import gpu_layouts, native_packing
from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.int_groups import dequantize_groups
from edgellm_kernels.weight_forms import (
    BlockLayout,
    BlockQuantWeight,
    CodeLayout,
    DenseWeight,
    HeldPart,
    Int4Weight,
    Int8Weight,
    IntWeight,
    LinearPart,
    LinearWeight,
    NativeWeight,
    PlaneWeight,
    StackedWeight,
)

__all__ = [
    "BlockLayout",
    "BlockQuantWeight",
    "CodeLayout",
    "DenseWeight",
    "HeldPart",
    "Int4Weight",
    "Int8Weight",
    "IntWeight",
    "LinearPart",
    "LinearWeight",
    "NativeWeight",
    "PlaneWeight",
    "StackedWeight",
    "dense_bytes",
    "prepare",
]


def dense_bytes(weight: LinearWeight, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that ``prepare(weight, hold="dense")`` takes, before anything is allocated."""
    rows, columns = weight.shape
    return rows * columns * dtype.itemsize + rows * 4


def _float_data(part: HeldPart, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[N, K] in ``dtype``; the very tensor of the file (no copy) where it has that type already."""
    if isinstance(part, DenseWeight):
        return part.data.to(device=device, dtype=dtype)
    if isinstance(part, NativeWeight | PlaneWeight):
        raise TypeError("a packed weight is not prepared again")
    if isinstance(part, IntWeight):
        return dequantize_groups(part, dtype).to(device)
    return dequantize(part.data.to(device), part.layout, part.in_features).to(dtype)


def _move(part: HeldPart, device: torch.device) -> HeldPart:
    if isinstance(part, PlaneWeight):
        raise TypeError("a packed weight is not prepared again")
    bias = None if part.bias is None else part.bias.to(device=device, dtype=torch.float32)
    if isinstance(part, IntWeight):
        return replace(
            part,
            data=part.data.to(device),
            scales=part.scales.to(device),
            zeros=None if part.zeros is None else part.zeros.to(device),
            group_index=None if part.group_index is None else part.group_index.to(device),
            bias=bias,
        )
    return replace(part, data=part.data.to(device), bias=bias)


def _join_dense(parts: Sequence[HeldPart], dtype: torch.dtype, device: torch.device) -> DenseWeight:
    """The parts' rows one after another, converted part by part: scratch memory is one part's, not all
    parts'.
    """
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    data = torch.empty((rows, columns), dtype=dtype, device=device)
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.zeros(rows, dtype=torch.float32, device=device)
    start = 0
    for part in parts:
        end = start + part.shape[0]
        data[start:end] = _float_data(part, dtype, device)
        if bias is not None and part.bias is not None:
            bias[start:end] = part.bias
        start = end
    return DenseWeight(data, bias)


def _packed(weight: LinearWeight, between: Callable[[], None]) -> LinearWeight:
    return native_packing.pack_weight(weight, between)


def _in_planes(weight: LinearWeight, device: torch.device, dtype: torch.dtype) -> LinearWeight:
    if isinstance(weight, StackedWeight):
        _check_widths(weight)
    return gpu_layouts.pack_weight(weight, device, dtype)


def _check_widths(weight: StackedWeight) -> None:
    widths = {part.shape[1] for part in weight.parts}
    if len(widths) != 1:
        raise ValueError(f"stacked weights must share in_features, not {sorted(widths)}")


def prepare(
    weight: LinearWeight,
    device: torch.device | str = "cpu",
    op: str = "linear",
    hold: str = "dense",
    dtype: torch.dtype = torch.float32,
    between: Callable[[], None] = lambda: None,
) -> LinearWeight:
    """Bring a weight from the form of its file into the form in which ``op`` uses it.

    Args:
        op: linear, gate_up, lm_head or embed. An embedding table stays as it is: only looked-up rows are
        decoded. hold: ``dense`` decodes to ``dtype`` once and joins stacked parts into one matrix. ``blocks``
        keeps the file's
            bytes (on the CPU they stay in the mapped file) and the op decodes them at every call; parts are
            then left apart, since joining would copy the file into memory for no gain. ``native`` packs the
            file's blocks for the native library: CPU and f32 only, about the file's size. ``planes`` packs
            them for the GPU kernels, about the file's size; dense parts become floats of ``dtype``.
        dtype: what the torch ops compute in.
        between: called between two parts of a large weight that is packed for the native library.

    Decoding a prepared weight gives the same f32 bits as decoding the file. Raises ValueError for parts that
    do not fit each other, or an unknown ``op`` or ``hold``.
    """
    device = torch.device(device)
    if op not in ("linear", "gate_up", "lm_head", "embed"):
        raise ValueError(f"no op {op!r} takes a weight")
    if hold not in ("dense", "blocks", "native", "planes"):
        raise ValueError(f"hold must be dense, blocks, native or planes, not {hold!r}")
    if hold == "planes" and op != "embed":
        return _in_planes(weight, device, dtype)
    if isinstance(weight, StackedWeight):
        _check_widths(weight)
        if hold == "native":
            return _packed(weight, between)
        if hold == "blocks":
            return StackedWeight(tuple(_move(part, device) for part in weight.parts))
        return _join_dense(weight.parts, dtype, device)
    if op == "embed" or hold == "blocks":
        return _move(weight, device)
    if hold == "native":
        return _packed(weight, between)
    bias = None if weight.bias is None else weight.bias.to(device=device, dtype=torch.float32)
    return DenseWeight(_float_data(weight, dtype, device), bias)
