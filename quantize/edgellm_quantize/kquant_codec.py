"""Encoders of the GGUF block types: rows of weights to the bytes of a file, natively or in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_models.errors import UsageError
from edgellm_quantize.block_grids import GRIDS, Array, BlockParams, pack, round_column, unpack
from edgellm_quantize.block_search import fit, search_plan

__all__ = [
    "BlockParams",
    "Encoded",
    "encode",
    "encode_rows",
    "fit_blocks",
    "pack",
    "round_column",
    "unpack",
]

_CHUNK_BLOCK_WEIGHTS = 1 << 17
"""Weights that the numpy encoder takes at a time, so that its arrays stay in the cache."""
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

    ``importance`` f32 [k] (or [n, k]) weights the squared error of a column; only its ratios matter. ``effort``
    is fast, default or best. The same input gives the same bytes on every machine and any number of threads.
    UsageError if k is no multiple of the block, ValueError for NaN and infinity.
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
    """``encode`` that also says what was cut. ``threads`` None takes all cores; ``native`` None chooses."""
    grid = GRIDS[type_name]
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    count, width = rows.shape
    if width % grid.elements:
        raise UsageError(
            f"rows of {width} weights are no whole number of {type_name} blocks of {grid.elements}"
        )
    if not np.isfinite(rows).all():
        raise ValueError("a weight is not finite")
    per_block = width // grid.elements
    blocks = rows.reshape(count * per_block, grid.elements)
    weights = None if importance is None else normalized_importance(importance)
    if weights is not None and weights.shape not in ((width,), rows.shape):
        raise ValueError(f"importance of shape {weights.shape} for rows of {width} weights")
    out = np.empty((len(blocks), grid.nbytes), dtype=np.uint8)
    plan = search_plan(type_name, effort, weighted=weights is not None)
    # Whole rows at a time, so that a chunk's importance is a repetition of the columns'.
    step = max(1, _CHUNK_BLOCK_WEIGHTS // max(1, width))
    for start in range(0, count, step):
        stop = min(count, start + step)
        chunk = blocks[start * per_block : stop * per_block]
        local = None
        if weights is not None:
            local = weights if weights.ndim == 1 else weights[start:stop]
            local = np.broadcast_to(local, (stop - start, width)).reshape(chunk.shape)
        params, codes = fit(chunk, local, type_name, plan)
        out[start * per_block : stop * per_block] = pack(params, codes)
    reach = np.float32(65504) * np.float32(_reach(type_name))
    return Encoded(out.reshape(count, per_block * grid.nbytes), int(np.count_nonzero(np.abs(rows) > reach)))


def _reach(type_name: str) -> float:
    """The greatest magnitude that a block can hold, as a multiple of the greatest f16."""
    grid = GRIDS[type_name]
    code = 127 if type_name == "Q8_0" else max(grid.zero, grid.max_code - grid.zero)
    if grid.scale_range is None:
        return float(code + grid.has_offset)
    scale = max(abs(bound) for bound in grid.scale_range)
    return float(scale * code)


def normalized_importance(importance: Array) -> Array:
    """Importance with a mean of 1 and a floor (IMPORTANCE_FLOOR). ValueError if negative or not finite."""
    values = np.asarray(importance, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("importance must be finite and not negative")
    mean = values.mean(axis=-1, keepdims=True)
    scaled = np.divide(values, mean, out=np.ones_like(values), where=mean > 0)
    return np.maximum(scaled, IMPORTANCE_FLOOR).astype(np.float32)


def fit_blocks(
    blocks: Array, type_name: str, importance: Array | None = None, effort: str = "default"
) -> BlockParams:
    """The best scales of ``blocks`` f32 [n, elements], one block of each of n rows: the start of error feedback.

    ``importance`` f32 [elements] or [n, elements]. Then round the columns in order with ``round_column`` on the
    compensated values, and give all codes uint8 [n, elements] to ``pack`` with these scales.
    """
    if blocks.ndim != 2 or blocks.shape[1] != GRIDS[type_name].elements:
        raise ValueError(f"a {type_name} block has {GRIDS[type_name].elements} weights, not {blocks.shape}")
    return unpack(encode(blocks, type_name, importance, effort), type_name)[0]
