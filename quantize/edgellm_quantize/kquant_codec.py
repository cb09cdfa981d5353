"""Encoders of the GGUF block types: rows of weights to the bytes of a file, natively or in numpy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.native_library import NativeLibrary, load_library, why_missing
from edgellm_models.errors import UsageError
from edgellm_quantize.block_grids import (
    F16_MAX,
    GRIDS,
    Array,
    BlockGrid,
    BlockParams,
    pack,
    round_column,
    unpack,
)
from edgellm_quantize.block_search import SearchPlan, fit, search_plan

__all__ = [
    "BlockParams",
    "Encoded",
    "encode",
    "encode_rows",
    "fit_blocks",
    "pack",
    "reach",
    "round_column",
    "unpack",
]

_NUMPY_CHUNK = 1 << 17
"""Weights that the numpy encoder takes at a time, so that its arrays stay in the cache."""
_NATIVE_CHUNK = 1 << 18
"""Weights of one call of the native encoder: enough to forget the call, few enough to share the cores."""
IMPORTANCE_FLOOR = 1e-3
"""Columns without importance count this share of the mean: a calibration text never proves that an input is
always zero."""


@dataclass(frozen=True)
class Encoded:
    """Rows as they lie in a file."""

    data: Array
    """uint8 [n, row bytes]."""
    clipped: int
    """Weights beyond what the type's f16 scales reach: they were cut."""


def encode(rows: Array, type_name: str, importance: Array | None = None, effort: str = "default") -> Array:
    """Bytes uint8 [n, row bytes] of ``rows`` f32 [n, k] as one of block_grids.GRIDS.

    ``importance`` f32 [k] (or [n, k]) weights the squared error of a column; only its ratios matter.
    ``effort`` is fast, default or best. The same input gives the same bytes on every machine and any number
    of threads. UsageError if k is no multiple of the block, ValueError for NaN and infinity.
    """
    return encode_rows(rows, type_name, importance, effort).data


def encode_rows(
    rows: Array,
    type_name: str,
    importance: Array | None = None,
    effort: str = "default",
    *,
    threads: int | None = None,
    native: bool | None = None,
) -> Encoded:
    """``encode`` that also says what was cut. ``threads`` None takes all cores.

    ``native`` None takes the native encoder where there is one; its bytes are the numpy encoder's.
    """
    grid = GRIDS[type_name]
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    count, width = rows.shape
    if width % grid.elements:
        raise UsageError(
            f"rows of {width} weights are no whole number of {type_name} blocks of {grid.elements}"
        )
    weights = None if importance is None else normalized_importance(importance)
    if weights is not None and weights.shape not in ((width,), rows.shape):
        raise ValueError(f"importance of shape {weights.shape} for rows of {width} weights")
    plan = search_plan(type_name, effort, weighted=weights is not None)
    library = load_library() if native is None or native else None
    if native and library is None:
        raise ValueError(f"there is no native library: {why_missing()}")
    out = np.empty((count, width // grid.elements * grid.nbytes), dtype=np.uint8)
    most = np.float32(reach(type_name))

    def part(start: int, stop: int) -> int:
        chunk = rows[start:stop]
        local = weights if weights is None or weights.ndim == 1 else weights[start:stop]
        largest = max(float(chunk.max()), -float(chunk.min())) if chunk.size else 0.0
        if not np.isfinite(largest):
            raise ValueError("a weight is not finite")
        if library is None:
            out[start:stop] = _in_numpy(chunk, local, grid, plan)
        else:
            _native(library, chunk, local, grid, plan, out[start:stop])
        return int(np.count_nonzero(np.abs(chunk) > most)) if largest > most else 0

    step = max(1, (_NATIVE_CHUNK if library else _NUMPY_CHUNK) // max(1, width))
    starts = range(0, count, step)
    workers = min(threads or usable_cores(), len(starts))
    if workers <= 1:
        clipped = sum(part(start, min(count, start + step)) for start in starts)
    else:
        with ThreadPoolExecutor(workers) as pool:
            clipped = sum(pool.map(lambda start: part(start, min(count, start + step)), starts))
    return Encoded(out, clipped)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_numpy(rows: Array, importance: Array | None, grid: BlockGrid, plan: SearchPlan) -> Array:
    blocks = rows.reshape(-1, grid.elements)
    if importance is not None:
        importance = np.broadcast_to(importance, rows.shape).reshape(blocks.shape)
    params, codes = fit(blocks, importance, grid.type_name, plan)
    return pack(params, codes).reshape(len(rows), -1)


def _native(
    library: NativeLibrary,
    rows: Array,
    importance: Array | None,
    grid: BlockGrid,
    plan: SearchPlan,
    out: Array,
) -> None:
    """The same by the native encoder, on this thread; ctypes lets other Python threads run meanwhile."""
    numbers = plan.as_array()
    shared = importance is None or importance.ndim == 1
    weights = None if importance is None else np.ascontiguousarray(importance)
    library.call(
        "edgellm_encode_rows",
        GGML_TYPES_BY_NAME[grid.type_name].type_id,
        rows.ctypes.data,
        None if weights is None else weights.ctypes.data,
        0 if shared else rows.shape[1],
        rows.shape[0],
        rows.shape[1],
        numbers.ctypes.data,
        len(numbers),
        out.ctypes.data,
    )


def reach(type_name: str) -> float:
    """The greatest magnitude that a block can hold."""
    grid = GRIDS[type_name]
    code = 127 if type_name == "Q8_0" else max(grid.zero, grid.max_code - grid.zero)
    if grid.scale_range is None:
        return float(F16_MAX * (code + grid.has_offset))
    scale = max(abs(bound) for bound in grid.scale_range)
    return float(F16_MAX * (scale * code))


def normalized_importance(importance: Array) -> Array:
    """Importance with a mean of 1 and a floor (IMPORTANCE_FLOOR). ValueError if negative or not finite."""
    values = np.asarray(importance, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("importance must be finite and not negative")
    mean = values.mean(axis=-1, keepdims=True)
    scaled = np.divide(values, mean, out=np.ones_like(values), where=mean > 0)
    floored: Array = np.maximum(scaled, IMPORTANCE_FLOOR).astype(np.float32)
    return floored


def fit_blocks(
    blocks: Array, type_name: str, importance: Array | None = None, effort: str = "default"
) -> BlockParams:
    """The best scales of ``blocks`` f32 [n, elements], one block of each row: where error feedback begins.

    ``importance`` f32 [elements] or [n, elements]. Then round the columns in order with ``round_column`` on
    the compensated values, and give all codes uint8 [n, elements] to ``pack`` with these scales.
    """
    if blocks.ndim != 2 or blocks.shape[1] != GRIDS[type_name].elements:
        raise ValueError(f"a {type_name} block has {GRIDS[type_name].elements} weights, not {blocks.shape}")
    return unpack(encode(blocks, type_name, importance, effort), type_name)[0]
