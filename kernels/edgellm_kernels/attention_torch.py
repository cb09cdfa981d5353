"""Reference of paged attention: tiles over queries and keys with a running softmax in bounded scratch.

Scores of a tile are [kv_heads, queries of the tile, keys of the tile], never [heads, T, T]. Only live blocks
that some query of the tile can see are read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.linear_torch import soft_cap
from edgellm_kernels.operands import HeadShape, Prepared

_SCORE_ELEMENTS = 1 << 21
"""Scores of one tile (8 MiB as f32)."""
_GATHER_ELEMENTS = 1 << 21
"""Key elements that one tile may copy out of scattered blocks."""
_MAX_TILE_QUERIES = 256


@dataclass(frozen=True)
class _Sequence:
    """One sequence's rows and live blocks, as host integers."""

    first_row: int
    last_row: int
    """One past the end."""
    key_length: int
    starts: list[int]
    """Position of each live block's first slot, ascending."""
    run_ends: list[int]
    """For each live block, one past the last block of the run with consecutive ids that it lies in."""
    block_ids: torch.Tensor
    """[live blocks] int64"""


@dataclass(frozen=True)
class TorchAttentionPlan:
    """A group's tables read once per forward pass and shared by its layers."""

    sequences: tuple[_Sequence, ...]


def plan_attention(batch: ForwardBatch, tables: GroupTables, block_size: int) -> TorchAttentionPlan:
    """See ops.PlanAttention."""
    rows = batch.query_starts.tolist()
    lengths = tables.key_lengths.tolist()
    ids_by_sequence = tables.block_table.tolist()
    starts_by_sequence = tables.block_positions.tolist()
    sequences = []
    for s in range(len(rows) - 1):
        if rows[s] == rows[s + 1]:
            continue
        # Blocks behind the last key (room for drafted tokens) hold nothing yet.
        live = [
            (block, start)
            for block, start in zip(ids_by_sequence[s], starts_by_sequence[s], strict=True)
            if block >= 0 and start < lengths[s]
        ]
        ids = [block for block, _ in live]
        run_ends = [len(ids)] * len(ids)
        for i in range(len(ids) - 2, -1, -1):
            run_ends[i] = run_ends[i + 1] if ids[i + 1] == ids[i] + 1 else i + 1
        block_ids = torch.tensor(ids, dtype=torch.int64, device=tables.block_table.device)
        starts = [start for _, start in live]
        sequences.append(_Sequence(rows[s], rows[s + 1], lengths[s], starts, run_ends, block_ids))
    return TorchAttentionPlan(tuple(sequences))


def _read(pages: torch.Tensor, sequence: _Sequence, first: int, last: int) -> torch.Tensor:
    """Slots of live blocks first .. last - 1 as f32 [slots, kv_heads, dim]: a view where the ids are
    consecutive.
    """
    if sequence.run_ends[first] >= last:
        start = int(sequence.block_ids[first])
        blocks = pages[start : start + last - first]
    else:
        blocks = pages.index_select(0, sequence.block_ids[first:last])
    return blocks.reshape(-1, *pages.shape[2:]).float()


def _attend_tile(
    q: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequence: _Sequence,
    shape: HeadShape,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of a few queries of one sequence.

    q [queries, heads, k_dim] f32, already scaled; positions [queries]; keys and values are a layer's pages
    [blocks, block_size, kv_heads, dim]. Returns [queries, heads * v_dim] f32; a query without a visible key
    gives zeros.
    """
    queries, block_size = q.shape[0], keys.shape[1]
    group = shape.num_heads // shape.num_kv_heads
    lowest, highest = int(positions.min()), int(positions.max())
    rows = group * queries
    # [kv_heads, group * queries, k_dim]
    q = q.view(queries, shape.num_kv_heads, group, shape.k_dim).permute(1, 2, 0, 3)
    q = q.reshape(shape.num_kv_heads, rows, shape.k_dim)

    oldest = 0 if window is None else lowest - window + 1
    first = bisect_right(sequence.starts, oldest - block_size)
    end = bisect_left(sequence.starts, min(highest + 1, sequence.key_length))
    tile_keys = min(
        max(256, _SCORE_ELEMENTS // (shape.num_heads * queries)),
        max(256, _GATHER_ELEMENTS // (shape.num_kv_heads * max(shape.k_dim, shape.v_dim))),
    )
    tile_blocks = max(1, tile_keys // block_size)

    weighted = q.new_zeros((shape.num_kv_heads, rows, shape.v_dim))
    total = q.new_zeros((shape.num_kv_heads, rows, 1))
    peak = q.new_full((shape.num_kv_heads, rows, 1), float("-inf"))
    for start in range(first, end, tile_blocks):
        stop = min(start + tile_blocks, end)
        last_start = sequence.starts[stop - 1]
        # Slots behind the newest key hold whatever was there before, NaN included: they are cut off, not
        # masked.
        slots = (stop - start - 1) * block_size + min(block_size, sequence.key_length - last_start)
        k = _read(keys, sequence, start, stop)[:slots]
        v = _read(values, sequence, start, stop)[:slots]
        scores = torch.bmm(q, k.permute(1, 2, 0))  # [kv_heads, group * queries, slots]
        scores = soft_cap(scores, softcap)
        newest = min(last_start + block_size, sequence.key_length) - 1
        if newest > lowest or (window is not None and sequence.starts[start] <= highest - window):
            offsets = torch.arange(block_size, device=q.device)
            starts = torch.tensor(sequence.starts[start:stop], device=q.device)
            key_positions = (starts[:, None] + offsets).flatten()[:slots]
            hidden = key_positions > positions[:, None]  # [queries, slots]
            if window is not None:
                hidden |= key_positions <= positions[:, None] - window
            by_head = scores.view(shape.num_kv_heads, group, queries, slots)
            by_head.masked_fill_(hidden, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # A row without a visible key so far has the peak -inf; subtracting 0 instead keeps exp(-inf) = 0, not
        # NaN.
        shift = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        scores = scores.sub_(shift).exp_()
        decay = peak.sub_(shift).exp_()
        total = total.mul_(decay).add_(scores.sum(-1, keepdim=True))
        weighted = torch.baddbmm(weighted.mul_(decay), scores, v.permute(1, 0, 2))
        peak = new_peak
    weighted /= total.masked_fill_(total == 0, 1.0)
    by_head = weighted.view(shape.num_kv_heads, group, queries, shape.v_dim)
    return by_head.permute(2, 0, 1, 3).reshape(queries, shape.num_heads * shape.v_dim)


def paged_attention(
    q: torch.Tensor,
    kv: KVStorage,
    layer: int,
    tables: GroupTables,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: TorchAttentionPlan | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Prepared:
    """See ops.PagedAttention."""
    keys, values = kv.keys[layer], kv.values[layer]
    tokens, num_heads, k_dim = q.shape
    shape = HeadShape(num_heads, keys.shape[2], k_dim, values.shape[3])
    if plan is None:
        plan = plan_attention(batch, tables, kv.block_size)
    out = torch.zeros((tokens, num_heads * shape.v_dim), dtype=torch.float32, device=q.device)
    q = q.float() * scale
    tile = max(1, min(_MAX_TILE_QUERIES, _SCORE_ELEMENTS // (num_heads * 256)))
    for sequence in plan.sequences:
        for start in range(sequence.first_row, sequence.last_row, tile):
            rows = slice(start, min(start + tile, sequence.last_row))
            out[rows] = _attend_tile(
                q[rows], batch.positions[rows], keys, values, sequence, shape, window, softcap
            )
    return Prepared(out.to(dtype))
