"""Torch decoders of weights on integer grids (GPTQ, AWQ), and their exact form as GGUF blocks."""

from __future__ import annotations

import torch

from edgellm_kernels.weight_forms import (
    BlockLayout,
    BlockQuantWeight,
    CodeLayout,
    Int4Weight,
    Int8Weight,
    IntWeight,
)

_CHUNK_ELEMENTS = 1 << 22
"""Weights decoded at a time: bounds the scratch memory."""
_BLOCK = 32


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0..15 -> [N, K / 2], as CodeLayout.NIBBLES. K must be even."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def int_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group_size: int,
    zeros: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Int4Weight | Int8Weight:
    """The weight of the codes uint8 [N, K]; the other arguments are IntWeight's fields.

    A ``group_index`` of columns in their own order is dropped. Raises ValueError for shapes that do not go
    together, codes of more bits and groups that are not there.
    """
    rows, columns = codes.shape
    if bits not in (2, 3, 4, 8) or scales.shape[0] != rows or scales.dim() != 2:
        raise ValueError(f"codes {[rows, columns]} of {bits} bits with scales {list(scales.shape)}")
    groups = scales.shape[1]
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zero points {list(zeros.shape)} with scales {list(scales.shape)}")
    if group_index is not None:
        if group_index.shape != (columns,):
            raise ValueError(f"a group index of {list(group_index.shape)} for {columns} columns")
        low, high = int(group_index.min()), int(group_index.max())
        if low < 0 or high >= groups:
            raise ValueError(f"the group index names groups {low} to {high}, there are {groups}")
        if torch.equal(group_index.long(), torch.arange(columns) // group_size):
            group_index = None
    if group_index is None and -(-columns // group_size) != groups:
        raise ValueError(f"{columns} columns in groups of {group_size} with {groups} scales a row")
    if bits == 8:
        return Int8Weight(codes, scales, bits, group_size, columns, zeros, group_index, bias)
    if columns % 2:
        raise ValueError(f"{columns} columns of {bits} bits: an even number is needed")
    return Int4Weight(pack_nibbles(codes), scales, bits, group_size, columns, zeros, group_index, bias)


def codes_of(weight: IntWeight, start: int = 0, end: int | None = None) -> torch.Tensor:
    """The codes of rows start to end: uint8 [rows, K]."""
    data = weight.data[start:end]
    if weight.layout is CodeLayout.BYTES:
        return data
    return torch.stack((data & 0x0F, data >> 4), dim=2).flatten(1)


def dequantize_group_rows(weight: IntWeight, start: int, end: int) -> torch.Tensor:
    """Rows start to end as f32 [rows, K]: scale * (code - zero), each step in f32."""
    steps = codes_of(weight, start, end).float()
    scales = weight.scales[start:end].float()
    zeros = None if weight.zeros is None else weight.zeros[start:end].float()
    if weight.group_index is not None:
        index = weight.group_index.long()
        steps -= 2.0 ** (weight.bits - 1) if zeros is None else zeros[:, index]
        return steps.mul_(scales[:, index])
    rows, columns = steps.shape
    if columns % weight.group_size:
        index = torch.arange(columns, device=steps.device) // weight.group_size
        steps -= 2.0 ** (weight.bits - 1) if zeros is None else zeros[:, index]
        return steps.mul_(scales[:, index])
    grouped = steps.view(rows, -1, weight.group_size)
    grouped -= 2.0 ** (weight.bits - 1) if zeros is None else zeros.unsqueeze(2)
    return grouped.mul_(scales.unsqueeze(2)).view(rows, columns)


def dequantize_groups(weight: IntWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole weight as [N, K] in ``dtype``, some rows at a time."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.data.device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        end = min(rows, start + step)
        out[start:end] = dequantize_group_rows(weight, start, end)
    return out


def as_blocks(weight: IntWeight) -> BlockQuantWeight | None:
    """The same values to the last bit as GGUF blocks, so that kernels of those run GPTQ and AWQ weights.

    Codes without their zero points become Q4_0 (-8 to 7: symmetric up to 4 bits), Q5_0 (-16 to 15: any zero
    point up to 4 bits) or Q8_0. None where that is not exact: act-order, groups that are no whole blocks of
    32, scales that f16 cannot hold, differences beyond int8.
    """
    rows, columns = weight.shape
    if weight.group_index is not None or weight.group_size % _BLOCK or columns % _BLOCK:
        return None
    halves = weight.scales.to(torch.float16)
    if not torch.equal(halves.float(), weight.scales.float()):
        return None
    if weight.bits == 8 and weight.zeros is not None and not bool((weight.zeros == 128).all()):
        return None
    if weight.bits == 8:
        layout, nbytes = BlockLayout.Q8_0, 34
    elif weight.zeros is None:
        layout, nbytes = BlockLayout.Q4_0, 18
    else:
        layout, nbytes = BlockLayout.Q5_0, 22
    per_row = columns // _BLOCK
    out = torch.empty((rows, per_row * nbytes), dtype=torch.uint8, device=weight.data.device)
    index = torch.arange(per_row, device=out.device) * _BLOCK // weight.group_size
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        end = min(rows, start + step)
        blocks = out[start:end].view(-1, nbytes)
        scales = halves[start:end][:, index].contiguous().view(torch.uint8).view(-1, 2)
        steps = codes_of(weight, start, end).to(torch.int16)
        if weight.zeros is None or weight.bits == 8:
            steps = steps - (1 << (weight.bits - 1))
        else:
            steps = steps - weight.zeros[start:end][:, index].to(torch.int16).repeat_interleave(_BLOCK, 1)
        _fill(blocks, layout, scales, steps.reshape(-1, _BLOCK))
    return BlockQuantWeight(out, layout, columns, weight.bias)


def _fill(blocks: torch.Tensor, layout: BlockLayout, scales: torch.Tensor, steps: torch.Tensor) -> None:
    """Write the blocks' bytes. scales: uint8 [blocks, 2] (f16); steps: int16 [blocks, 32], code - zero."""
    blocks[:, :2] = scales
    half = _BLOCK // 2
    if layout is BlockLayout.Q8_0:
        blocks[:, 2:] = steps.to(torch.int8).view(torch.uint8)
        return
    codes = (steps + (8 if layout is BlockLayout.Q4_0 else 16)).to(torch.uint8)
    low = codes & 0x0F
    blocks[:, -half:] = low[:, :half] | (low[:, half:] << 4)
    if layout is BlockLayout.Q5_0:
        fifth = (codes >> 4).view(-1, 4, 8)
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        blocks[:, 2:6] = (fifth << shifts).sum(dim=2, dtype=torch.uint8)
