"""Reference of paged attention: tiles over queries and keys with a running softmax in bounded scratch.

Scores of a tile are [kv_heads, queries of the tile, keys of the tile], never [heads, T, T]. Only live blocks
that some query of the tile can see are read; quantized blocks are decoded tile by tile.
"""

from __future__ import annotations

import torch

from edgellm_kernels.attention_plan_torch import (
    JoinedRows,
    PlannedRows,
    Scratch,
    TorchAttentionPlan,
    hidden_keys,
    plan_attention,
    unquantized,
)
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.kv_store_torch import hadamard, read_blocks, read_blocks_into
from edgellm_kernels.linear_torch import soft_cap
from edgellm_kernels.operands import HeadShape, Prepared

__all__ = ["paged_attention", "plan_attention"]

_SCORE_ELEMENTS = 1 << 21
"""Scores of one tile (8 MiB as f32)."""
_GATHER_ELEMENTS = 1 << 21
"""Key elements that one tile may copy out of scattered blocks."""
_MAX_TILE_QUERIES = 256


def _read(
    pages: torch.Tensor, scale_pages: torch.Tensor | None, sequence: PlannedRows, first: int, last: int
) -> torch.Tensor:
    """Slots of live blocks first .. last - 1 as f32 [slots, kv_heads, dim]: of f32 pages a view where the ids
    are consecutive.
    """
    if sequence.run_ends[first] >= last:
        start = sequence.ids[first]
        blocks = read_blocks(pages, scale_pages, (start, start + last - first))
    else:
        blocks = read_blocks(pages, scale_pages, sequence.block_ids[first:last])
    return blocks.reshape(-1, *blocks.shape[2:])


def _layer_pages(
    kv: KVStorage, layer: int
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]:
    """Keys and values of a layer, each with its scales."""
    return (
        (kv.keys[layer], None if kv.key_scales is None else kv.key_scales[layer]),
        (kv.values[layer], None if kv.value_scales is None else kv.value_scales[layer]),
    )


class _RunningSoftmax:
    """softmax(q k^T) v over keys that come in parts, of a few queries of one sequence."""

    def __init__(
        self, q: torch.Tensor, shape: HeadShape, softcap: float | None, sinks: torch.Tensor | None
    ) -> None:
        """q [queries, heads, k_dim] f32, already scaled; sinks [heads] f32."""
        self.shape, self.softcap = shape, softcap
        self.queries = q.shape[0]
        self.group = shape.num_heads // shape.num_kv_heads
        rows = self.group * self.queries
        # [kv_heads, group * queries, k_dim]
        q = q.view(self.queries, shape.num_kv_heads, self.group, shape.k_dim).permute(1, 2, 0, 3)
        self.q = q.reshape(shape.num_kv_heads, rows, shape.k_dim)
        self.weighted = q.new_zeros((shape.num_kv_heads, rows, shape.v_dim))
        self.total = q.new_zeros((shape.num_kv_heads, rows, 1))
        self.peak = q.new_full((shape.num_kv_heads, rows, 1), float("-inf"))
        if sinks is not None:  # as a key without a value, seen before all others
            by_row = sinks.float().view(shape.num_kv_heads, self.group, 1).expand(-1, -1, self.queries)
            self.peak.copy_(by_row.reshape(shape.num_kv_heads, rows, 1))
            self.total.copy_(self.peak != float("-inf"))

    def add(self, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """k, v [slots, kv_heads, dim]; hidden bool [queries, slots]."""
        scores = torch.bmm(self.q, k.permute(1, 2, 0))  # [kv_heads, group * queries, slots]
        scores = soft_cap(scores, self.softcap)
        if hidden is not None:
            by_head = scores.view(self.shape.num_kv_heads, self.group, self.queries, -1)
            by_head.masked_fill_(hidden, float("-inf"))
        new_peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # A row without a visible key so far has the peak -inf; subtracting 0 instead keeps exp(-inf) = 0, not
        # NaN.
        shift = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        scores = scores.sub_(shift).exp_()
        decay = self.peak.sub_(shift).exp_()
        self.total = self.total.mul_(decay).add_(scores.sum(-1, keepdim=True))
        self.weighted = torch.baddbmm(self.weighted.mul_(decay), scores, v.permute(1, 0, 2))
        self.peak = new_peak

    def result(self) -> torch.Tensor:
        """[queries, heads * v_dim]; a query without a visible key gives zeros."""
        weighted = self.weighted / self.total.masked_fill(self.total == 0, 1.0)
        by_head = weighted.view(self.shape.num_kv_heads, self.group, self.queries, self.shape.v_dim)
        return by_head.permute(2, 0, 1, 3).reshape(self.queries, self.shape.num_heads * self.shape.v_dim)


def _attend_tile(
    q: torch.Tensor,
    positions: torch.Tensor,
    first_query: int,
    kv: KVStorage,
    layer: int,
    sequence: PlannedRows,
    shape: HeadShape,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a few queries of one sequence, the first at position ``first_query``.

    q [queries, heads, k_dim] f32, already scaled; positions [queries]. Returns [queries, heads * v_dim] f32.
    """
    queries, block_size = q.shape[0], kv.block_size
    lowest, highest = first_query, first_query + queries - 1
    softmax = _RunningSoftmax(q, shape, softcap, sinks)
    keys, values = _layer_pages(kv, layer)
    staged = sequence.staged
    spans = None
    if staged is not None:
        spans = torch.tensor([staged.head, staged.head_from, staged.tail_from], device=q.device)

    first, end = sequence.block_range(window, block_size, lowest, highest)
    tile_keys = min(
        max(256, _SCORE_ELEMENTS // (shape.num_heads * queries)),
        max(256, _GATHER_ELEMENTS // (shape.num_kv_heads * max(shape.k_dim, shape.v_dim))),
    )
    tile_blocks = max(1, tile_keys // block_size)
    for start in range(first, end, tile_blocks):
        stop = min(start + tile_blocks, end)
        last_start = sequence.starts[stop - 1]
        # Slots behind the newest key hold whatever was there before, NaN included: they are cut off, not
        # masked.
        slots = (stop - start - 1) * block_size + min(block_size, sequence.key_length - last_start)
        k = _read(*keys, sequence, start, stop)[:slots]
        v = _read(*values, sequence, start, stop)[:slots]
        newest = min(last_start + block_size, sequence.key_length) - 1
        hidden = None
        behind = window is not None and sequence.starts[start] <= highest - window
        if newest > lowest or behind or spans is not None:
            offsets = torch.arange(block_size, device=q.device)
            starts = torch.tensor(sequence.starts[start:stop], device=q.device)
            key_positions = (starts[:, None] + offsets).flatten()[:slots]
            hidden = hidden_keys(key_positions, positions, window)
            if spans is not None:
                hidden |= unquantized(key_positions, positions, spans)
        softmax.add(k, v, hidden)
    if staged is not None and spans is not None:
        needed, rows = staged.needed(lowest, highest)
        staged_k, staged_v = _staged_rows(kv, torch.tensor(rows, device=q.device))
        key_positions = torch.tensor(needed, device=q.device)
        hidden = hidden_keys(key_positions, positions, window)
        hidden |= ~unquantized(key_positions, positions, spans)
        if rows:
            softmax.add(staged_k, staged_v, hidden)
    return softmax.result()


def _staged_rows(kv: KVStorage, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert kv.tail is not None and kv.tail.staged is not None, "tail tables need a storage that staged rows"
    keys, values = kv.tail.staged
    rows = rows.long()
    return keys.index_select(0, rows).float(), values.index_select(0, rows).float()


def _attend_joined(
    q: torch.Tensor,
    kv: KVStorage,
    layer: int,
    joined: JoinedRows,
    scratch: Scratch,
    shape: HeadShape,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of several sequences with equally many queries.

    q [sequences * queries, heads, k_dim] f32, already scaled. Returns [sequences * queries, heads * v_dim].
    """
    sequences, queries = joined.sequences, joined.queries
    group = shape.num_heads // shape.num_kv_heads
    keys, values = _layer_pages(kv, layer)
    # [sequences, slots + extra, kv_heads, dim]
    num_keys = joined.hidden.shape[2]
    k = scratch.take(0, (sequences, num_keys, shape.num_kv_heads, shape.k_dim), q.device)
    v = scratch.take(1, (sequences, num_keys, shape.num_kv_heads, shape.v_dim), q.device)
    slots = len(joined.block_ids) // sequences * kv.block_size
    read_blocks_into(*keys, joined.block_ids, k[:, :slots])
    read_blocks_into(*values, joined.block_ids, v[:, :slots])
    if joined.staged_rows is not None:
        staged_k, staged_v = _staged_rows(kv, joined.staged_rows)
        k[:, slots:] = staged_k.view(sequences, -1, *k.shape[2:])
        v[:, slots:] = staged_v.view(sequences, -1, *v.shape[2:])
    if joined.empty_slots is not None:
        v.view(-1, *v.shape[2:]).index_fill_(0, joined.empty_slots, 0.0)  # 0 * NaN would be NaN
    # [kv_heads, sequences, group * queries, k_dim]
    q = q.view(sequences, queries, shape.num_kv_heads, group, shape.k_dim).permute(2, 0, 3, 1, 4)
    q = q.reshape(shape.num_kv_heads, sequences, group * queries, shape.k_dim)
    scores = q.new_empty((shape.num_kv_heads, sequences, group * queries, k.shape[1]))
    for head in range(shape.num_kv_heads):  # one product per head reads k as it lies, without a copy
        torch.bmm(q[head], k[:, :, head].transpose(1, 2), out=scores[head])
    scores = soft_cap(scores, softcap)
    by_query = scores.view(shape.num_kv_heads, sequences, group, queries, -1)
    by_query.masked_fill_(joined.hidden[:, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        by_row = sinks.float().view(shape.num_kv_heads, 1, group, 1).expand(-1, -1, -1, queries)
        by_row = by_row.reshape(shape.num_kv_heads, 1, group * queries, 1)
        peak = torch.maximum(peak, by_row)
    scores = scores.sub_(peak.masked_fill_(peak == float("-inf"), 0.0)).exp_()
    total = scores.sum(-1, keepdim=True)
    if sinks is not None:
        total += (by_row - peak).exp()
    weighted = q.new_empty((shape.num_kv_heads, sequences, group * queries, shape.v_dim))
    for head in range(shape.num_kv_heads):
        torch.bmm(scores[head], v[:, :, head], out=weighted[head])
    weighted /= total.masked_fill_(total == 0, 1.0)
    by_query = weighted.view(shape.num_kv_heads, sequences, group, queries, shape.v_dim)
    return by_query.permute(1, 3, 0, 2, 4).reshape(sequences * queries, shape.num_heads * shape.v_dim)


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
    sinks: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Prepared:
    """See ops.PagedAttention."""
    tokens, num_heads, k_dim = q.shape
    shape = HeadShape(num_heads, kv.keys.shape[3], k_dim, kv.v_dim)
    if plan is None:
        plan = plan_attention(batch, tables, kv.block_size)
    out = torch.zeros((tokens, num_heads * shape.v_dim), dtype=torch.float32, device=q.device)
    q = q.float() * scale
    if kv.rotates_keys:
        q = hadamard(q)
    joined, alone = plan.split(window, shape.num_kv_heads * max(shape.k_dim, shape.v_dim))
    for group in joined:
        out[group.rows] = _attend_joined(q[group.rows], kv, layer, group, plan.scratch, shape, softcap, sinks)
    tile = max(1, min(_MAX_TILE_QUERIES, _SCORE_ELEMENTS // (num_heads * 256)))
    for sequence in alone:
        for start in range(sequence.first_row, sequence.last_row, tile):
            rows = slice(start, min(start + tile, sequence.last_row))
            first_query = sequence.lowest + start - sequence.first_row
            out[rows] = _attend_tile(
                q[rows],
                batch.positions[rows],
                first_query,
                kv,
                layer,
                sequence,
                shape,
                window,
                softcap,
                sinks,
            )
    if kv.rotates_values:
        out = hadamard(out.view(tokens, num_heads, shape.v_dim)).view(tokens, -1)
    return Prepared(out.to(dtype))
