"""Turns a StepPlan's integers into the tensors of a ForwardBatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from edgellm.contracts import PENDING, PlannedSequence
from edgellm_kernels.batch import ForwardBatch, GroupTables, TailTables


def build_batch(
    sequences: Sequence[PlannedSequence],
    block_size: int,
    device: str = "cpu",
    tail: TailTables | None = None,
    groups: range | None = None,
    drawn_at: Mapping[int, int] | None = None,
) -> ForwardBatch:
    """The batch of a plan's sequences, in order, with the logit rows that ``num_logit_rows`` counts.

    ``groups``: those of the sequences' layer groups that it is about, where they are not all of one model.
    ``drawn_at``: by sequence id the place of its PENDING id among what the step before drew.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    pending: list[int] = []
    for sequence in sequences:
        if drawn_at is not None:
            place = drawn_at.get(sequence.sequence_id, -1)
            pending.extend(place if token_id == PENDING else -1 for token_id in sequence.rows)
        token_ids.extend(sequence.rows)
        positions.extend(range(sequence.start_position, sequence.start_position + len(sequence.rows)))
        query_starts.append(len(token_ids))
        logit_rows.extend(range(len(token_ids) - num_logit_rows(sequence), len(token_ids)))
    key_lengths = [s.start_position + len(s.rows) for s in sequences]
    groups = range(len(sequences[0].block_tables)) if groups is None else groups
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        max_query=max(len(s.rows) for s in sequences),
        max_key=-(-max(key_lengths) // block_size) * block_size,
        rope_lengths=torch.tensor(
            [max(s.total_length, keys) for s, keys in zip(sequences, key_lengths, strict=True)],
            dtype=torch.int64,
            device=device,
        ),
        pending=torch.tensor(pending, dtype=torch.int64, device=device)
        if any(p >= 0 for p in pending)
        else None,
        groups=tuple(_group_tables(sequences, g, block_size, key_lengths, device, tail) for g in groups),
    )


def num_logit_rows(sequence: PlannedSequence) -> int:
    """How many of its last rows are read: all of a chunk whose prompt is scored, those whose states are
    pooled, else one to draw from and one behind each drafted token."""
    if sequence.num_states:
        return sequence.num_states
    own = len(sequence.token_ids) if sequence.prompt_logits else int(sequence.needs_logits)
    return own + len(sequence.draft_token_ids)


def _group_tables(
    sequences: Sequence[PlannedSequence],
    group: int,
    block_size: int,
    key_lengths: list[int],
    device: str,
    tail: TailTables | None,
) -> GroupTables:
    live_blocks: list[list[int]] = []
    live_positions: list[list[int]] = []
    slots: list[int] = []
    for sequence in sequences:
        blocks = sequence.block_tables[group]
        live = [index for index, block in enumerate(blocks) if block >= 0]
        live_blocks.append([blocks[index] for index in live])
        live_positions.append([index * block_size for index in live])
        for position in range(sequence.start_position, sequence.start_position + len(sequence.rows)):
            block = blocks[position // block_size]
            assert block >= 0, f"position {position} of sequence {sequence.sequence_id} has no block"
            slots.append(block * block_size + position % block_size)
    width = max(len(blocks) for blocks in live_blocks)

    def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
        filled = [row + [filler] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.int32, device=device)

    return GroupTables(
        block_table=padded(live_blocks, -1),
        block_positions=padded(live_positions, 0),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        key_lengths=torch.tensor(key_lengths, dtype=torch.int32, device=device),
        tail=tail,
    )
