"""Packs weights for the native library: the file's numbers, eight rows interleaved (native/packed.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME, GGMLType
from edgellm_kernels.int_groups import as_blocks, dequantize_groups
from edgellm_kernels.native_grids import GridType, column_order, grid_rows, grid_type
from edgellm_kernels.native_library import load_library
from edgellm_kernels.native_threads import pool
from edgellm_kernels.packed_memory import PACKED_MEMORY
from edgellm_kernels.weight_forms import (
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    Int4Weight,
    Int8Weight,
    IntWeight,
    LinearWeight,
    NativeWeight,
    StackedWeight,
)

TILE_ROWS = 8
SLICE_BYTES = 16 << 20
"""Packed at a time: between two slices whoever reads a mapped file can give back its pages."""
_DENSE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Source:
    """A part and the form in which the library packs it."""

    part: BlockQuantWeight | DenseWeight | Int4Weight | Int8Weight
    form: GGMLType | GridType
    order: torch.Tensor | None = None
    """int64 [K]: see NativeWeight."""

    def rows(self) -> torch.Tensor:
        """[N, ...], the bytes that edgellm_pack reads."""
        if isinstance(self.part, IntWeight):
            if isinstance(self.form, GridType):
                return grid_rows(self.part, self.form, self.order)
            # NOTE: what no format holds exactly (odd groups, scales beyond f16) keeps its bits as f32.
            return dequantize_groups(self.part, torch.float32)
        return self.part.data

    def joins(self, other: _Source) -> bool:
        """Whether both can be parts of one matrix."""
        if self.order is None or other.order is None:
            return self.form == other.form and self.order is other.order
        return self.form == other.form and torch.equal(self.order, other.order)


def _source(part: HeldPart) -> _Source:
    if isinstance(part, BlockQuantWeight):
        return _Source(part, GGML_TYPES_BY_NAME[part.layout.value])
    if isinstance(part, DenseWeight):
        return _Source(part, GGML_TYPES_BY_NAME[_DENSE_NAMES[part.data.dtype]])
    if isinstance(part, Int4Weight | Int8Weight):
        return _grid_source(part)
    raise TypeError(f"a {type(part).__name__} is packed already")


def _grid_source(part: Int4Weight | Int8Weight) -> _Source:
    """An integer grid (GPTQ, AWQ) in the smallest form that holds the same values to the last bit."""
    kind, columns = grid_type(part), part.shape[1]
    blocks = as_blocks(part) if kind is None or kind.unit == 32 else None
    if blocks is not None:
        block_type = GGML_TYPES_BY_NAME[blocks.layout.value]
        if kind is None or block_type.row_bytes(columns) < kind.row_bytes(columns):
            return _Source(blocks, block_type)
    if kind is None:
        return _Source(part, GGML_TYPES_BY_NAME["F32"])
    return _Source(part, kind, column_order(part))


def _pack(sources: Sequence[_Source], between: Callable[[], None]) -> NativeWeight:
    """Sources that join as one packed matrix, their rows one after another; every one but the last has a
    multiple of TILE_ROWS rows. Reads each part's rows once, and holds no copy of them meanwhile.
    ``between`` is called between two slices of a large part.
    """
    library = load_library()
    assert library is not None, "packing needs the native library"
    form, k = sources[0].form, sources[0].part.shape[1]
    parts = [source.part for source in sources]
    tiles = [-(-part.shape[0] // TILE_ROWS) for part in parts]
    tile_bytes = TILE_ROWS * form.row_bytes(k)
    data = PACKED_MEMORY.empty(sum(tiles) * tile_bytes)
    rows = sum(part.shape[0] for part in parts)
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.zeros(rows, dtype=torch.float32)
    first_row = first_byte = 0
    for source, part, count in zip(sources, parts, tiles, strict=True):
        assert source.joins(sources[0]) and part.shape[1] == k and first_row % TILE_ROWS == 0
        from_rows = source.rows().contiguous()
        slice_tiles = max(1, SLICE_BYTES // tile_bytes)
        for first in range(0, count, slice_tiles):
            if first:
                between()
            end = min(first + slice_tiles, count)
            rows_here = from_rows[first * TILE_ROWS : end * TILE_ROWS]
            target = data[first_byte + first * tile_bytes : first_byte + end * tile_bytes]
            library.call(
                "edgellm_pack",
                pool(library),
                form.type_id,
                rows_here.data_ptr(),
                rows_here.shape[0],
                k,
                target.data_ptr(),
                target.numel(),
            )
        if bias is not None and part.bias is not None:
            bias[first_row : first_row + part.shape[0]] = part.bias
        first_row += part.shape[0]
        first_byte += count * tile_bytes
    return NativeWeight(data, form.type_id, rows, k, bias, sources[0].order)


def pack_weight(weight: LinearWeight, between: Callable[[], None] = lambda: None) -> LinearWeight:
    """A weight in packed form; neighbouring parts of one form and order become one matrix. ``between``:
    called between two slices of a large part."""
    if not isinstance(weight, StackedWeight):
        return _pack([_source(weight)], between)
    groups: list[list[_Source]] = []
    for source in map(_source, weight.parts):
        last = groups[-1] if groups else []
        if last and last[0].joins(source) and all(s.part.shape[0] % TILE_ROWS == 0 for s in last):
            last.append(source)
        else:
            groups.append([source])
    packed = tuple(_pack(group, between) for group in groups)
    return packed[0] if len(packed) == 1 else StackedWeight(packed)
