"""What a plan does to stored KV before its tokens run: copies, and which unquantized rows they read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.cache.kv_copies import apply_copies, copy_ring
from edgellm.cache.tail_rings import TailRings, TailSpan
from edgellm.contracts import StepPlan
from edgellm_kernels.batch import TAIL_POSITIONS, KVStorage, TailStorage, TailTables


class KVState:
    """The pages of all groups, those in host memory, and for int4 the rings of the running sequences."""

    def __init__(self, storages: Sequence[KVStorage], host_storages: Sequence[KVStorage] = ()) -> None:
        self.storages = tuple(storages)
        self._host = tuple(host_storages)
        self._tail = self.storages[0].tail if self.storages else None
        self._rings = None
        if self._tail is not None:
            self._rings = TailRings(self._tail.keys.shape[1], self._tail.recent)

    @property
    def has_tail(self) -> bool:
        """Recent rows are kept outside of the pages too (int4)."""
        return self._tail is not None

    def prepare(self, plan: StepPlan) -> TailTables | None:
        """Carries out the plan's copies, forks and releases; the tail tables of its sequences, for int4."""
        if plan.block_copies or plan.host_copies:
            apply_copies(self.storages, self._host, plan.block_copies, plan.host_copies)
        if self._rings is None or self._tail is None:
            return None
        self._move_rings(self._rings, plan)
        if not plan.sequences:
            return None
        starts = [s.start_position for s in plan.sequences]
        counts = [len(s.rows) for s in plan.sequences]
        ids = [s.sequence_id for s in plan.sequences]
        spans = [self._rings.step(*step) for step in zip(ids, starts, counts, strict=True)]
        return build_tail_tables(spans, starts, counts, self._tail)

    def _move_rings(self, rings: TailRings, plan: StepPlan) -> None:
        """What is free is given back before anybody takes a ring: so many are enough as sequences run."""
        gone = {*plan.ended, *plan.preempted}
        forked = [(parent, child) for parent, child in plan.forked if child not in gone]
        for sequence_id in gone - {parent for parent, _ in forked}:
            rings.release(sequence_id)
        for index, (parent, child) in enumerate(forked):
            if parent in gone and all(parent != later for later, _ in forked[index + 1 :]):
                rings.hand_over(parent, child)
            else:
                copied = rings.fork(parent, child)
                if copied is not None:
                    copy_ring(self.storages, *copied)


def build_tail_tables(
    spans: Sequence[TailSpan], starts: Sequence[int], counts: Sequence[int], tail: TailStorage
) -> TailTables:
    """``starts`` and ``counts``: first position and number of new tokens of each sequence of the batch."""
    device = tail.keys.device
    head, recent = tail.head, tail.recent
    read_slots: list[int] = []
    read_positions: list[int] = []
    read_starts = [0]
    write_rows: list[int] = []
    write_slots: list[int] = []
    row = 0
    for span, start, count in zip(spans, starts, counts, strict=True):
        held = [
            *range(span.head_from, min(head, start)),
            *range(max(head, span.tail_from, start - TAIL_POSITIONS + 1), start),
        ]
        read_positions += held
        read_slots += [tail.slot(span.ring, position) for position in held]
        read_starts.append(len(read_slots))
        for position in range(start, start + count):
            # Of more new positions than the ring has slots, the last ones stay.
            if position < head or position >= start + count - recent:
                write_rows.append(row + position - start)
                write_slots.append(tail.slot(span.ring, position))
        row += count

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return TailTables(
        read_slots=tensor(read_slots),
        read_positions=tensor(read_positions),
        read_starts=torch.tensor(read_starts, dtype=torch.int32, device=device),
        write_rows=tensor(write_rows),
        write_slots=tensor(write_slots),
        spans=torch.tensor(
            [[span.head_from, span.tail_from] for span in spans], dtype=torch.int64, device=device
        ).view(-1, 2),
        head=head,
    )
