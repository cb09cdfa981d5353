"""Integer grids (GPTQ, AWQ) as rows of units that the native library packs: codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm_kernels.int_groups import codes_of
from edgellm_kernels.weight_forms import CodeLayout, IntWeight

_HEADER_BYTES = 3
"""Of a unit: f16 scale, zero point."""
_CHUNK_ELEMENTS = 1 << 22
"""Weights brought into units at a time: bounds the scratch memory."""


@dataclass(frozen=True)
class GridType:
    """A grid format of native/packed.h: ``unit`` weights with one scale and one zero point."""

    type_id: int
    bits: int
    """4 (codes of 2 and 3 bits too) or 8"""
    unit: int

    @property
    def unit_bytes(self) -> int:
        return _HEADER_BYTES + self.unit * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        return columns // self.unit * self.unit_bytes


GRID_TYPES = (
    GridType(1003, 4, 128),
    GridType(1002, 4, 64),
    GridType(1001, 4, 32),
    GridType(1005, 8, 128),
    GridType(1004, 8, 32),
)
"""Per number of bits the widest first."""


def column_order(weight: IntWeight) -> torch.Tensor | None:
    """int64 [K] that puts the columns of each group beside each other, group after group; None where they lie
    so. ValueError where that gives groups of another size than ``group_size``.
    """
    if weight.group_index is None:
        return None
    index = weight.group_index.long()
    counts = torch.bincount(index, minlength=weight.scales.shape[1])
    if not bool((counts == weight.group_size).all()):
        raise ValueError(f"groups of {sorted(set(counts.tolist()))} columns, not of {weight.group_size}")
    return torch.argsort(index, stable=True)


def grid_type(weight: IntWeight) -> GridType | None:
    """The format that holds exactly this weight, or None: groups that are no whole units, uneven groups in
    act-order, scales that f16 cannot hold.
    """
    columns = weight.shape[1]
    if not torch.equal(weight.scales.to(torch.float16).float(), weight.scales.float()):
        return None
    try:
        column_order(weight)
    except ValueError:
        return None
    bits = 8 if weight.layout is CodeLayout.BYTES else 4
    for kind in GRID_TYPES:
        if kind.bits == bits and columns % kind.unit == 0 and weight.group_size % kind.unit == 0:
            return kind
    return None


def grid_rows(weight: IntWeight, kind: GridType, order: torch.Tensor | None) -> torch.Tensor:
    """uint8 [N, row bytes], columns in ``order`` (``column_order``): per unit scale, zero point and codes."""
    rows, columns = weight.shape
    units = columns // kind.unit
    group = torch.arange(units, device=weight.data.device) * kind.unit // weight.group_size
    out = torch.empty((rows, units, kind.unit_bytes), dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        end = min(rows, start + step)
        scales = weight.scales[start:end].to(torch.float16)[:, group].contiguous()
        out[start:end, :, :2] = scales.view(torch.uint8).view(end - start, units, 2)
        if weight.zeros is None:
            out[start:end, :, 2] = 1 << (weight.bits - 1)
        else:
            out[start:end, :, 2] = weight.zeros[start:end][:, group]
        codes = codes_of(weight, start, end)
        codes = (codes if order is None else codes[:, order]).reshape(end - start, units, kind.unit)
        if kind.bits == 4:
            codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
        out[start:end, :, _HEADER_BYTES:] = codes
    return out.view(rows, -1)
