"""What the torch attention of a group's layers shares in one forward pass: tables read once, on the host.

Sequences with few queries each (decoding, verification) are joined into padded batches, so that sixteen of
them cost one gather and a few batched products per layer instead of sixteen of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import torch

from edgellm_kernels.batch import TAIL_POSITIONS, ForwardBatch, GroupTables

MAX_BATCHED_QUERIES = 16
"""Query rows per sequence up to which sequences are joined; beyond, one sequence fills the products alone."""
MAX_BATCH_ELEMENTS = 1 << 19
"""Key elements that a joined batch gathers, padding included (2 MiB as f32: they are still in the cache when
they are multiplied).
"""


@dataclass(frozen=True)
class Staged:
    """The unquantized rows of one sequence that this step may read (TailStorage.staged)."""

    positions: list[int]
    """Ascending; only positions in live blocks."""
    rows: list[int]
    """Where they lie in the staged tensors."""
    head: int
    head_from: int
    """Positions from here on and below ``head`` are unquantized."""
    tail_from: int
    """Positions from here on are unquantized for queries less than TAIL_POSITIONS later."""

    def needed(self, lowest: int, highest: int) -> tuple[list[int], list[int]]:
        """Positions and rows that queries at lowest .. highest can see."""
        end = bisect_right(self.positions, highest)
        head = bisect_left(self.positions, self.head, 0, end)
        recent = bisect_right(self.positions, lowest - TAIL_POSITIONS, head, end)
        return (
            self.positions[:head] + self.positions[recent:end],
            self.rows[:head] + self.rows[recent:end],
        )


@dataclass(frozen=True)
class PlannedRows:
    """One sequence's rows and live blocks, as host integers."""

    first_row: int
    last_row: int
    """One past the end."""
    lowest: int
    """Position of the first query; they ascend."""
    highest: int
    key_length: int
    starts: list[int]
    """Position of each live block's first slot, ascending."""
    run_ends: list[int]
    """For each live block, one past the last block of the run with consecutive ids that it lies in."""
    ids: list[int]
    block_ids: torch.Tensor
    """[live blocks] int64"""
    staged: Staged | None

    def block_range(self, window: int | None, block_size: int, lowest: int, highest: int) -> tuple[int, int]:
        """The live blocks that queries at lowest .. highest can see: first, one past the last."""
        oldest = 0 if window is None else lowest - window + 1
        first = bisect_right(self.starts, oldest - block_size)
        return first, bisect_left(self.starts, min(highest + 1, self.key_length))


@dataclass(frozen=True)
class JoinedRows:
    """Sequences with equally many queries whose attention is computed at once.

    The keys of each are ``slots`` page slots, padded with its own first block, then ``extra`` staged rows.
    """

    rows: torch.Tensor
    """[sequences * queries] int64"""
    sequences: int
    queries: int
    block_ids: torch.Tensor
    """[sequences * blocks] int64"""
    hidden: torch.Tensor
    """[sequences, queries, slots + extra] bool: what a query does not see."""
    empty_slots: torch.Tensor | None
    """int64 indices into [sequences * (slots + extra)]: slots behind the newest key, perhaps NaN."""
    staged_rows: torch.Tensor | None
    """[sequences * extra] int64"""


class Scratch:
    """Two buffers for all layers of a forward pass: fresh memory would cost more than the copy into it."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, index: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """f32, uninitialized, valid until the same index is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(index)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[index] = torch.empty(size, dtype=torch.float32, device=device)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class TorchAttentionPlan:
    """A group's tables read once per forward pass and shared by its layers."""

    sequences: tuple[PlannedRows, ...]
    block_size: int
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    _split: dict[tuple[int | None, int], tuple[list[JoinedRows], list[PlannedRows]]] = field(
        default_factory=dict, repr=False
    )

    def split(self, window: int | None, slot_elements: int) -> tuple[list[JoinedRows], list[PlannedRows]]:
        """The sequences that are computed at once and those computed alone.

        ``slot_elements`` is the size of one position's keys. Made for the first layer that asks, as all
        layers of a group ask alike.
        """
        key = (window, slot_elements)
        if key not in self._split:
            self._split[key] = _split(self, window, slot_elements)
        return self._split[key]


def plan_attention(batch: ForwardBatch, tables: GroupTables, block_size: int) -> TorchAttentionPlan:
    """See ops.PlanAttention."""
    rows = batch.query_starts.tolist()
    positions = batch.positions.tolist()
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
        own = positions[rows[s] : rows[s + 1]]
        starts = [start for _, start in live]
        sequences.append(
            PlannedRows(
                rows[s],
                rows[s + 1],
                own[0],
                own[-1],
                lengths[s],
                starts,
                run_ends,
                ids,
                torch.tensor(ids, dtype=torch.int64, device=tables.block_table.device),
                _staged(s, rows[s], own, set(starts), tables, block_size),
            )
        )
    return TorchAttentionPlan(tuple(sequences), block_size)


def _staged(
    s: int, first_row: int, own: list[int], starts: set[int], tables: GroupTables, block_size: int
) -> Staged | None:
    tail = tables.tail
    if tail is None:
        return None
    first, end = (int(n) for n in tail.read_starts[s : s + 2])
    held = tail.read_positions[first:end].tolist()
    num_held = tail.read_positions.shape[0]
    rows = list(range(first, end)) + [num_held + first_row + i for i in range(len(own))]
    # A block that was evicted takes its unquantized rows along.
    kept = [
        (position, row)
        for position, row in zip(held + own, rows, strict=True)
        if position - position % block_size in starts
    ]
    head_from, tail_from = (int(n) for n in tail.spans[s])
    return Staged([p for p, _ in kept], [r for _, r in kept], tail.head, head_from, tail_from)


def _split(
    plan: TorchAttentionPlan, window: int | None, slot_elements: int
) -> tuple[list[JoinedRows], list[PlannedRows]]:
    size = plan.block_size
    alone: list[PlannedRows] = []
    by_queries: dict[int, list[tuple[int, PlannedRows]]] = {}
    for sequence in plan.sequences:
        queries = sequence.last_row - sequence.first_row
        first, end = sequence.block_range(window, size, sequence.lowest, sequence.highest)
        if queries > MAX_BATCHED_QUERIES or first == end:
            alone.append(sequence)
        else:
            by_queries.setdefault(queries, []).append((end - first, sequence))
    joined = []
    for few in by_queries.values():
        few.sort(key=lambda item: (-item[0], item[1].first_row))
        start = 0
        while start < len(few):
            blocks = few[start][0]
            most = max(1, MAX_BATCH_ELEMENTS // (blocks * size * slot_elements))
            stop = start + 1
            # Padding a sequence to over twice its blocks costs more than its own products would.
            while stop < min(len(few), start + most) and 2 * few[stop][0] >= blocks:
                stop += 1
            members = [sequence for _, sequence in few[start:stop]]
            if len(members) == 1:
                alone.append(members[0])
            else:
                joined.append(_join(members, blocks, window, size))
            start = stop
    return joined, alone


def _join(members: list[PlannedRows], blocks: int, window: int | None, size: int) -> JoinedRows:
    device = members[0].block_ids.device
    ids: list[list[int]] = []
    starts: list[list[int]] = []
    extra_positions: list[list[int]] = []
    extra_rows: list[list[int]] = []
    ranges = [m.block_range(window, size, m.lowest, m.highest) for m in members]
    for member, (first, end) in zip(members, ranges, strict=True):
        padding = blocks - (end - first)
        ids.append(member.ids[first:end] + [member.ids[first]] * padding)
        # Padding starts behind every key, so that it is hidden and empty like any slot without one.
        starts.append(member.starts[first:end] + [member.key_length] * padding)
        if member.staged is not None:
            positions, rows = member.staged.needed(member.lowest, member.highest)
            extra_positions.append(positions)
            extra_rows.append(rows)
    lengths = torch.tensor([m.key_length for m in members], device=device)
    start_table = torch.tensor(starts, device=device)
    keys = (start_table[:, :, None] + torch.arange(size, device=device)).flatten(1)  # [sequences, slots]
    empty = keys >= lengths[:, None]
    queries = torch.stack([torch.arange(m.lowest, m.highest + 1, device=device) for m in members])
    hidden = hidden_keys(keys, queries, window) | empty[:, None, :]
    staged_rows = None
    if extra_rows:
        spans = torch.tensor(
            [[m.staged.head, m.staged.head_from, m.staged.tail_from] for m in members if m.staged],
            device=device,
        )
        hidden |= unquantized(keys, queries, spans)
        extra = max(len(rows) for rows in extra_rows)
        # Any staged row pads: what is stored is finite, and it is hidden.
        rows_table = [rows + [0] * (extra - len(rows)) for rows in extra_rows]
        positions_table = [
            p + [m.key_length] * (extra - len(p)) for p, m in zip(extra_positions, members, strict=True)
        ]
        staged_rows = torch.tensor(rows_table, device=device).flatten()
        staged_keys = torch.tensor(positions_table, device=device)
        hidden_extra = hidden_keys(staged_keys, queries, window) | ~unquantized(staged_keys, queries, spans)
        hidden = torch.cat((hidden, hidden_extra), dim=2)
    # Padding repeats a block that is full, unless it is the only one.
    unwritten = empty & (start_table < lengths[:, None]).repeat_interleave(size, dim=1)
    only = [end - first == 1 for first, end in ranges]
    unwritten |= empty & torch.tensor(only, device=device)[:, None]
    places = unwritten.nonzero()
    empty_slots = (places[:, 0] * hidden.shape[2] + places[:, 1]) if len(places) else None
    rows = [row for m in members for row in range(m.first_row, m.last_row)]
    return JoinedRows(
        torch.tensor(rows, device=device),
        len(members),
        members[0].last_row - members[0].first_row,
        torch.tensor(ids, device=device).flatten(),
        hidden,
        empty_slots,
        staged_rows,
    )


def hidden_keys(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Positions [.., keys] and [.., queries] -> bool [.., queries, keys]: later than the query, or behind its
    window.
    """
    keys, queries = keys[..., None, :], queries[..., :, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def unquantized(keys: torch.Tensor, queries: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """bool [.., queries, keys]: which keys a query reads from the staged rows and not from the pages.

    ``spans`` [.., 3] are Staged's head, head_from and tail_from.
    """
    head, head_from, tail_from = (spans[..., i, None, None] for i in range(3))
    keys, queries = keys[..., None, :], queries[..., :, None]
    recent = (keys > queries - TAIL_POSITIONS) & (keys >= tail_from)
    return torch.where(keys < head, keys >= head_from, recent)
