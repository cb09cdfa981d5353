"""Packs weights for the native library: the file's numbers, eight rows interleaved (native/packed.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.int_groups import as_blocks, dequantize_groups
from edgellm_kernels.native_library import load_library
from edgellm_kernels.native_threads import pool
from edgellm_kernels.packed_memory import PACKED_MEMORY
from edgellm_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    IntWeight,
    LinearWeight,
    NativeWeight,
    StackedWeight,
)

TILE_ROWS = 8
SLICE_BYTES = 16 << 20
"""Packed at a time: between two slices whoever reads a mapped file can give back its pages."""
_DENSE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _source(part: HeldPart) -> tuple[str, torch.Tensor]:
    """The ggml type of a part and its rows as they lie in a file, [N, ...]."""
    if isinstance(part, BlockQuantWeight):
        return part.layout.value, part.data
    if isinstance(part, DenseWeight):
        return _DENSE_NAMES[part.data.dtype], part.data
    if isinstance(part, IntWeight):
        # NOTE: what no block type holds exactly (act-order, odd groups) keeps its bits as f32.
        return "F32", dequantize_groups(part, torch.float32)
    raise TypeError(f"a {type(part).__name__} is packed already")


def pack(parts: Sequence[HeldPart], between: Callable[[], None] = lambda: None) -> NativeWeight:
    """Parts of one type and width as one packed matrix, their rows one after another; every part but the last
    has a multiple of TILE_ROWS rows. Reads each part's rows once, and holds no copy of them meanwhile.
    ``between`` is called between two slices of a large part.
    """
    library = load_library()
    assert library is not None, "packing needs the native library"
    type_name = _source_type(parts[0])
    ggml_type = GGML_TYPES_BY_NAME[type_name]
    k = parts[0].shape[1]
    tiles = [-(-part.shape[0] // TILE_ROWS) for part in parts]
    tile_bytes = TILE_ROWS * ggml_type.row_bytes(k)
    data = PACKED_MEMORY.empty(sum(tiles) * tile_bytes)
    rows = sum(part.shape[0] for part in parts)
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.zeros(rows, dtype=torch.float32)
    first_row = first_byte = 0
    for part, count in zip(parts, tiles, strict=True):
        name, source = _source(part)
        assert name == type_name and part.shape[1] == k and first_row % TILE_ROWS == 0
        source = source.contiguous()
        slice_tiles = max(1, SLICE_BYTES // tile_bytes)
        for first in range(0, count, slice_tiles):
            if first:
                between()
            end = min(first + slice_tiles, count)
            rows_here = source[first * TILE_ROWS : end * TILE_ROWS]
            target = data[first_byte + first * tile_bytes : first_byte + end * tile_bytes]
            library.call(
                "edgellm_pack",
                pool(library),
                ggml_type.type_id,
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
    return NativeWeight(data, ggml_type.type_id, rows, k, bias)


def _source_type(part: HeldPart) -> str:
    if isinstance(part, BlockQuantWeight):
        return part.layout.value
    return _DENSE_NAMES[part.data.dtype] if isinstance(part, DenseWeight) else "F32"


def _as_blocks(part: HeldPart) -> HeldPart:
    """Integer grids (GPTQ, AWQ) as the block type that holds the same values, where there is one."""
    return (as_blocks(part) or part) if isinstance(part, IntWeight) else part


def pack_weight(weight: LinearWeight, between: Callable[[], None] = lambda: None) -> LinearWeight:
    """A weight in packed form; neighbouring parts of one type become one matrix. ``between`` as in pack."""
    if not isinstance(weight, StackedWeight):
        return pack([_as_blocks(weight)], between)
    groups: list[list[HeldPart]] = []
    for part in map(_as_blocks, weight.parts):
        last = groups[-1] if groups else []
        joins = bool(last) and _source_type(last[0]) == _source_type(part)
        if joins and all(member.shape[0] % TILE_ROWS == 0 for member in last):
            last.append(part)
        else:
            groups.append([part])
    packed = tuple(pack(group, between) for group in groups)
    return packed[0] if len(packed) == 1 else StackedWeight(packed)
