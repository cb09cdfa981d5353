"""Who waits, who runs, and the KV that each holds: every change of one sequence's state. No decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm.cache.kv_manager import KVManager
from edgellm.contracts import BlockCopy, HostCopy, Notice, PlannedSequence, SequenceStart, StepPlan
from edgellm.scheduler import wording
from edgellm.scheduler.policy import kv_salt
from edgellm.scheduler.sequence import Failure, Sequence


class Roster:
    """The sequences of one scheduler, and what their changes make the next plan carry."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_running: int,
        lookahead: int,
        rope_switch_length: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.max_running = max_running
        self.lookahead = lookahead
        self.rope_switch_length = rope_switch_length
        self._clock = clock
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.notices: list[tuple[int, Notice]] = []
        self.failures: list[Failure] = []
        self._ended: list[int] = []
        self._forked: list[tuple[int, int]] = []
        self._preempted: list[int] = []
        self._block_copies: list[BlockCopy] = []
        self._host_copies: list[HostCopy] = []

    @property
    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) < self.max_running

    def num_prompts(self) -> int:
        """Sequences that are read, or could be: as many of those that wait as there are places."""
        reading = sum(sequence.remaining > 1 for sequence in self.running.values())
        return reading + min(len(self.waiting), self.max_running - len(self.running))

    def num_free(self) -> int:
        """Blocks that can be had, over all groups."""
        return sum(pool.num_free for pool in self.kv.pools)

    def make_plan(self, step: int, planned: tuple[PlannedSequence, ...]) -> StepPlan:
        """The plan of these sequences with everything that has come up since the last one."""
        started: list[SequenceStart] = []
        for one in planned:
            sequence = self.running[one.sequence_id]
            sequence.in_flight.append(one)
            if not sequence.announced:
                sequence.announced = True
                started.append(sequence.start)
        plan = StepPlan(
            step,
            planned,
            tuple(started),
            tuple(self._ended),
            tuple(self._block_copies),
            tuple(self._host_copies),
            tuple(self._forked),
            tuple(self._preempted),
        )
        self._ended, self._forked, self._preempted = [], [], []
        self._block_copies, self._host_copies = [], []
        return plan

    # --- coming and going ---

    def start(self, sequence: Sequence, now: float) -> None:
        """Makes a waiting sequence, whose KV is on the device, a running one."""
        del self.waiting[sequence.sequence_id]
        self.running[sequence.sequence_id] = sequence
        sequence.told_blocked = False
        if sequence.preempted_at is not None:
            waited = now - sequence.preempted_at
            kept, again = sequence.computed, sequence.remaining - 1
            self.tell(sequence, wording.resumed(waited, kept, again, lost_tail=self.kv.has_tail))
            sequence.preempted_at = None
        elif not sequence.announced:
            sequence.cached_tokens = sequence.computed

    def preempt(self, sequence: Sequence, *, for_urgent: bool = False) -> None:
        """Makes a running sequence with nothing in flight wait, its KV on the host or dropped.

        ``for_urgent``: not for want of blocks of those that run, but for one that waits.
        """
        assert not sequence.in_flight, "what is in flight writes to the blocks that would be given away"
        lost = sequence.computed
        copies = self.kv.offload(sequence.sequence_id) if lost else None
        if copies is None:
            self.release(sequence)
        else:
            self._host_copies.extend(copies)
            sequence.on_host = True
        del self.running[sequence.sequence_id]
        self.waiting[sequence.sequence_id] = sequence
        sequence.preempted_at = self._clock()
        self._preempted.append(sequence.sequence_id)
        self.tell(sequence, wording.preempted(lost, to_host=sequence.on_host, for_urgent=for_urgent))

    def finish(self, sequence_id: int) -> None:
        """Ends a sequence wherever it is and frees its blocks. Unknown ids are ignored: it may have ended."""
        sequence = self.running.pop(sequence_id, None) or self.waiting.pop(sequence_id, None)
        if sequence is None:
            return
        self.release(sequence)
        self.kv.forget(sequence_id)
        sequence.in_flight.clear()
        if sequence.announced:
            self._ended.append(sequence_id)
        else:  # forked, and gone before a plan has named it
            self._forked = [pair for pair in self._forked if pair[1] != sequence_id]

    def fail(self, sequence: Sequence, length: int) -> None:
        """Gives a sequence up: ``length`` positions can never have blocks."""
        self.finish(sequence.sequence_id)
        self.failures.append(Failure(sequence.sequence_id, wording.no_room(length, self.kv.counts())))

    def tell(self, sequence: Sequence, notice: Notice) -> None:
        self.notices.append((sequence.sequence_id, notice))

    # --- KV ---

    def open(self, sequence: Sequence) -> None:
        """Takes the blocks that the prefix cache holds for a sequence."""
        sequence.rope_is_short = self.is_short(sequence)
        sequence.computed = self.kv.open(
            sequence.sequence_id,
            sequence.token_ids,
            salt=kv_salt(sequence),
            conversation_id=sequence.conversation_id,
            most=None if sequence.eviction is None else sequence.eviction.reuse_limit,
            publishes=sequence.start.pooling is None,  # nobody could reuse it: see kv_salt
        )
        sequence.has_kv = True

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks of a sequence back, on device or host."""
        if sequence.has_kv:
            self.kv.free(sequence.sequence_id)
        sequence.has_kv = sequence.on_host = False
        sequence.computed = 0
        sequence.block_scores.clear()
        sequence.dropped.restart()

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Slots for positions below ``length``; False, and nothing changed, when blocks are short."""
        copies = self.kv.grow(sequence.sequence_id, length)
        if copies is not None:
            self._block_copies.extend(copies)
        return copies is not None

    def evict(self, sequence: Sequence) -> None:
        """Drops what goes at the border that the sequence has reached. A second call finds nothing to drop.

        Layers with a window free blocks by themselves and are left alone.
        """
        plan, border = sequence.eviction, sequence.next_position
        assert plan is not None and not sequence.in_flight, "what is in flight is not committed"
        tables = self.kv.tables(sequence.sequence_id)
        lost: list[int] = []
        for group, layout in enumerate(self.kv.groups):
            if layout.window is None:
                live = [i for i in range(border // plan.block_size) if tables[group][i] >= 0]
                lost = plan.victims(border, live, [scores[group] for scores in sequence.block_scores])
                self.kv.evict(sequence.sequence_id, group, lost)
        if lost:  # of equally many in every group
            sequence.dropped.add(lost, plan.block_size)
            if sequence.dropped.is_news:
                self.tell(sequence, wording.evicted(plan, sequence.dropped, border))

    def score_blocks(self, sequence: Sequence, end: int) -> tuple[tuple[int, ...], ...]:
        """For ``PlannedSequence.score_blocks`` of a step that ends before ``end``."""
        if sequence.eviction is None:
            return ()
        indices = sequence.blocks_to_score(end)
        if not indices:
            return ()
        tables = self.kv.tables(sequence.sequence_id)
        return tuple(
            tuple(table[i] for i in indices) if layout.window is None else ()
            for layout, table in zip(self.kv.groups, tables, strict=True)
        )

    def restore(self, sequence: Sequence) -> bool:
        """Brings KV back from the host; False, and nothing changed, when blocks are short."""
        copies = self.kv.restore(sequence.sequence_id)
        if copies is not None:
            self._host_copies.extend(copies)
            sequence.on_host = False
        return copies is not None

    def take_back_drafts(self) -> bool:
        """Takes back the blocks that only drafted tokens would have needed; whether there were any."""
        free = self.num_free()
        for sequence in self.running.values():
            if sequence.drafting and not sequence.in_flight:
                sequence.drafting = not self.grow(sequence, sequence.total)
        return self.num_free() > free

    # --- forks ---

    def fork(self, parent_id: int, child: Sequence) -> bool:
        """As ``Scheduler.fork``."""
        parent = self.running.get(parent_id)
        if parent is None or parent.in_flight or not self.has_place:
            return False
        shared = parent.computed
        assert child.token_ids[:shared] == parent.token_ids[:shared], "a fork must begin as its parent"
        assert len(child.token_ids) > shared, "a fork needs a token of its own to run"
        if shared < 1 or parent.rope_is_short != self.is_short(child):
            return False
        self.kv.fork(parent_id, child.sequence_id)
        if not self.kv.can_grow(child.sequence_id, len(child.token_ids) + self.lookahead):
            self.kv.free(child.sequence_id)
            return False
        child.has_kv = True
        child.fork_parent = None  # it has KV of its own: preempted, it waits for itself
        child.computed = child.cached_tokens = shared
        child.block_scores = list(parent.block_scores)
        child.dropped = replace(parent.dropped)
        child.rope_is_short = parent.rope_is_short
        self.waiting.pop(child.sequence_id, None)
        self.running[child.sequence_id] = child
        self._forked.append((parent_id, child.sequence_id))
        return True

    def children(self, parent: Sequence) -> list[Sequence]:
        """Waiting sequences that share the parent's prompt as soon as it is computed."""
        if parent.num_answered or parent.total < 2:
            return []
        return [s for s in self.waiting.values() if s.fork_parent == parent.sequence_id]

    def awaits_parent(self, child: Sequence) -> bool:
        """Whether a sequence's parent will still come to the end of the prompt."""
        if child.fork_parent is None:
            return False
        parent = self.running.get(child.fork_parent) or self.waiting.get(child.fork_parent)
        return parent is not None and not parent.num_answered and parent.total > 1

    def fork_children(self, parent: Sequence) -> None:
        """Forks all children of a prompt that is computed but for its last token.

        Those that find no place now wait like any other: the prefix cache holds the whole blocks for them.
        """
        if parent.in_flight or parent.computed < parent.total - 1:
            return
        for child in self.children(parent):
            if not self.fork(parent.sequence_id, child):
                child.fork_parent = None

    # --- the rope's two scalings ---

    def is_short(self, sequence: Sequence) -> bool:
        """Whether KV that is computed for these tokens is that of the short scaling."""
        return self.rope_switch_length is None or len(sequence.token_ids) <= self.rope_switch_length

    def outgrows(self, sequence: Sequence) -> bool:
        """Whether the next step would mix KV of both scalings."""
        limit = self.rope_switch_length
        return limit is not None and sequence.rope_is_short and sequence.total > limit

    def room_before_switch(self, sequence: Sequence, most: int) -> int:
        """How many tokens, of ``most``, fit before the scaling changes: no step has both."""
        limit = self.rope_switch_length
        return most if limit is None or not sequence.rope_is_short else min(most, limit - sequence.total)

    def restart_outgrown(self, sequence: Sequence) -> None:
        """Makes a sequence that has outgrown the rope's short scaling start again from its first token."""
        if sequence.in_flight or not self.outgrows(sequence):
            return
        assert self.rope_switch_length is not None
        self.release(sequence)
        self.open(sequence)
        self._preempted.append(sequence.sequence_id)
        self.tell(sequence, wording.rope_switched(self.rope_switch_length, sequence.total))
