"""Plans steps: who runs which tokens in which blocks, who waits, who gives way. Integers only, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm.cache.block_pool import blocks_for
from edgellm.cache.kv_manager import KVManager
from edgellm.contracts import (
    PENDING,
    Notice,
    PlannedSequence,
    SequenceResult,
    StepPlan,
    StepResult,
)
from edgellm.scheduler import wording
from edgellm.scheduler.lone_decode import lone_decode
from edgellm.scheduler.mixed_pace import shared_rows
from edgellm.scheduler.policy import AGE_BOUND_S, prefill_order, rank
from edgellm.scheduler.results import check_tokens, drop_scored, scores_by_block
from edgellm.scheduler.roster import Roster
from edgellm.scheduler.sequence import Failure, Outcome, Sequence
from edgellm_models.errors import BadInputError, EngineError


@dataclass
class _Chosen:
    """A sequence's share of the step that is being planned."""

    sequence: Sequence
    start: int
    end: int
    draft_limit: int = 0


@dataclass
class _Step:
    """The step that is being planned."""

    budget: int
    """Token rows that are still to give."""
    chosen: dict[int, _Chosen] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    """Ids that give way as soon as nothing of theirs is in flight, and do not run before."""
    again: bool = False
    """A sequence was given up: where nothing else runs, what waits behind it may run now."""
    crowded: bool = False
    """Blocks were short: nobody is admitted any more and drafts get no block."""


class Scheduler:
    """Continuous batching over one KVManager. Not thread-safe; knows ids, lengths and blocks, never tensors.

    A step of at most ``token_budget`` rows: every running decode gets its token, by rank; prefills share
    what is left, running and waiting ones in the order of ``policy.prefill_order``, ``prefill_chunk`` tokens
    each at most, and ``mixed_chunk`` tokens all together beside decodes, whose next tokens wait for them
    (more where more prompts wait than answers run, see ``mixed_pace.shared_rows``);
    drafts get the rest, because a drafted row beside a prefill costs as much as a row of the prompt that
    somebody waits for.

    The caller's loop at depth 1: ``next_step`` may be called with one plan outstanding; ``commit`` takes the
    results in the order of the plans. What ended meanwhile has its slot discarded: its KV is never
    published. The runner executes plans in order, so a freed block may be given away while a step that is in
    flight still writes to it.

    When blocks are short, in this order: cached blocks that nobody uses go (the manager's doing), drafts get
    no block, nobody is admitted, and the last by ``policy.rank`` is preempted: to host memory where there is
    room, else it is computed again later, its tokens so far being its prompt.

    One that waits for a place or for blocks pushes out the last that runs with a lower priority, one per
    step.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_running: int,
        token_budget: int,
        prefill_chunk: int,
        clock: Callable[[], float],
        depth: int = 0,
        mixed_chunk: int | None = None,
        age_bound_s: float = AGE_BOUND_S,
        lookahead: int = 0,
        rope_switch_length: int | None = None,
    ) -> None:
        """``lookahead`` is the most tokens that any sequence drafts; the manager was made with the same."""
        if not 1 <= max_running <= token_budget:
            raise BadInputError(
                f"a step of {token_budget} tokens has no token for each of {max_running} running requests; "
                "raise the budget or run fewer at once"
            )
        if prefill_chunk < 1 or lookahead < 0 or depth not in (0, 1):
            raise BadInputError(
                f"prefill_chunk {prefill_chunk}, lookahead {lookahead} and depth {depth} must be at least 1, "
                "at least 0, and 0 or 1"
            )
        self._kv = kv
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk
        self.mixed_chunk = token_budget if mixed_chunk is None else mixed_chunk
        """Prompt tokens of a step beside as many decodes; may be set anew between two steps."""
        self._clock = clock
        self._depth = depth
        self._age_bound_s = age_bound_s
        self._lookahead = lookahead
        self._roster = Roster(
            kv,
            max_running=max_running,
            lookahead=lookahead,
            rope_switch_length=rope_switch_length,
            clock=clock,
        )
        self._outstanding: deque[StepPlan] = deque()
        self._last_served: dict[int, float] = {}
        self._short: tuple[int, int] | None = None
        """Id and length of the sequence that lacked blocks in the last step."""
        self._turned_away: int | None = None
        """Id of the waiting sequence for which blocks were short in the last step."""
        self._step = 0

    # --- what the caller sees ---

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_outstanding(self) -> int:
        """Plans whose results were not committed yet."""
        return len(self._outstanding)

    def has_work(self) -> bool:
        return bool(self._roster.running or self._roster.waiting or self._outstanding)

    def waiting_ids(self) -> tuple[int, ...]:
        """The queue in the order of service by now."""
        ordered = prefill_order(
            self._roster.waiting.values(), self._clock(), self._age_bound_s, self._last_served
        )
        return tuple(sequence.sequence_id for sequence in ordered)

    def notices(self) -> list[tuple[int, Notice]]:
        """What happened to sequences since the last call: queued_for_blocks, preempted, resumed,
        rope_scaling_switched."""
        notices, self._roster.notices = self._roster.notices, []
        return notices

    def failures(self) -> list[Failure]:
        """Sequences given up since the last call, because even an empty cache has no room for them."""
        failures, self._roster.failures = self._roster.failures, []
        return failures

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. EngineError when its id is in use or it has nothing to run."""
        sequence_id = sequence.sequence_id
        if sequence_id in self._roster.waiting or sequence_id in self._roster.running:
            raise EngineError(f"sequence {sequence_id} is scheduled already")
        if not sequence.token_ids or sequence.max_new_tokens < 1:
            raise EngineError(
                f"sequence {sequence_id} has {len(sequence.token_ids)} prompt tokens and room for "
                f"{sequence.max_new_tokens} answer tokens; it needs at least one of each"
            )
        self._roster.waiting[sequence_id] = sequence

    def finish(self, sequence_id: int) -> None:
        """Ends a sequence wherever it is and frees its blocks. Unknown ids are ignored: it may have ended."""
        self._roster.finish(sequence_id)

    def cancel(self, sequence_id: int) -> None:
        """As ``finish``: at any point, with a step in flight too."""
        self.finish(sequence_id)

    def fork(self, parent_id: int, child: Sequence) -> bool:
        """Starts ``child`` from the KV of a running parent, whose committed tokens must begin the child's.

        False, and nothing done, where that cannot be now: the parent is not running or has a step in flight,
        no place is free, or blocks are short. ``add`` then serves the child with what the prefix cache holds.
        """
        return self._roster.fork(parent_id, child)

    # --- planning ---

    def next_step(self) -> StepPlan | None:
        """The next plan; None when nothing can run, or not before the outstanding results are committed."""
        if len(self._outstanding) > self._depth:
            return None
        lone = self._plan_lone()
        if lone is not None:
            return self._send((lone,))
        while True:
            step = self._plan(self._clock())
            if step.chosen:
                return self._issue(step)
            if not step.again:
                return None

    def _plan_lone(self) -> PlannedSequence | None:
        """What ``_plan`` comes to where one sequence decodes alone; None, and nothing changed, elsewhere."""
        sequence = lone_decode(self._roster) if self._short is None else None
        if sequence is None or not self._roster.grow(sequence, len(sequence.token_ids)):
            return None
        self._turned_away = None
        self._last_served[sequence.priority] = self._clock()
        return self._planned(sequence, sequence.computed, len(sequence.token_ids), 0)

    def _plan(self, now: float) -> _Step:
        step = _Step(self._token_budget)
        for sequence in list(self._roster.running.values()):
            self._roster.restart_outgrown(sequence)
            self._roster.fork_children(sequence)
        self._push_out(step, now)
        self._serve_the_short(step)
        self._plan_decodes(step)
        decodes, kept_back = len(step.chosen), 0
        if decodes:
            rows = shared_rows(self.mixed_chunk, self._roster.num_prompts(), decodes)
            kept_back = max(0, step.budget - rows)
        step.budget -= kept_back
        self._plan_prefills(step, now)
        if len(step.chosen) == decodes:
            step.budget += kept_back
        self._grant_drafts(step)
        for chosen in step.chosen.values():
            self._last_served[chosen.sequence.priority] = now
        return step

    def _is_plannable(self, sequence: Sequence, step: _Step) -> bool:
        """Whether the sequence's next tokens can be planned now."""
        if sequence.sequence_id in step.held or sequence.sequence_id in step.chosen:
            return False
        if sequence.remaining < 1 or sequence.num_answered >= sequence.max_new_tokens:
            return False
        if not sequence.in_flight:
            return True
        if sequence.needs_host and sequence.pending:
            return False
        if sequence.is_at_border:  # only committed blocks can be evicted
            return False
        if any(planned.draft_limit for planned in sequence.in_flight):  # how many come is not known yet
            return False
        if self._roster.outgrows(sequence):
            return False
        return sequence.remaining > 1 or not self._roster.children(sequence)

    def _plan_decodes(self, step: _Step) -> None:
        for sequence in sorted(self._roster.running.values(), key=rank):
            if sequence.sequence_id not in self._roster.running or not self._is_plannable(sequence, step):
                continue
            if sequence.remaining == 1 and self._reserve(sequence, sequence.total, step):
                self._choose(sequence, sequence.total, step)

    def _plan_prefills(self, step: _Step, now: float) -> None:
        candidates = [
            s for s in self._roster.running.values() if s.remaining > 1 and self._is_plannable(s, step)
        ]
        if self._roster.has_place and not step.crowded:
            candidates += [s for s in self._roster.waiting.values() if not self._roster.awaits_parent(s)]
        for sequence in prefill_order(candidates, now, self._age_bound_s, self._last_served):
            if step.budget < 1:
                break
            if sequence.sequence_id in self._roster.running:
                if sequence.sequence_id not in step.held:
                    end = self._chunk_end(sequence, step)
                    if self._reserve(sequence, end, step):
                        self._choose(sequence, end, step)
            elif not step.crowded and self._roster.has_place:
                # Nobody passes one who waits for blocks: it would never see enough of them free.
                step.crowded = not self._admit(sequence, step, now)

    def _chunk_end(self, sequence: Sequence, step: _Step) -> int:
        """Where the next prefill chunk ends: a prompt that others share stops before its last token, so that
        each of them runs that token for itself and draws from its own row."""
        start = sequence.next_position
        end = min(start + self._prefill_chunk, start + step.budget, sequence.total)
        if sequence.eviction is not None:
            end = min(end, sequence.eviction.step_end(start))
        return min(end, sequence.total - 1) if self._roster.children(sequence) else end

    def _choose(self, sequence: Sequence, end: int, step: _Step) -> None:
        start = sequence.next_position
        step.chosen[sequence.sequence_id] = _Chosen(sequence, start, end)
        step.budget -= end - start

    def _grant_drafts(self, step: _Step) -> None:
        """Room for drafted tokens where tokens and blocks are left; never at the price of anything else."""
        for chosen in step.chosen.values():
            sequence = chosen.sequence
            if sequence.draft_limit < 1 or chosen.end < sequence.total or chosen.end - chosen.start > 1:
                continue
            limit = min(
                sequence.draft_limit,
                self._lookahead,
                step.budget,
                sequence.max_new_tokens - sequence.num_answered - 1,
            )
            limit = min(limit, self._roster.room_before_switch(sequence, limit))
            if step.crowded:  # what its last block holds costs nobody anything
                limit = min(limit, -sequence.total % self._kv.block_size)
            if sequence.eviction is not None:  # no draft crosses a border at which blocks may be evicted
                limit = min(limit, sequence.eviction.draft_end(chosen.start) - sequence.total)
            while limit > 0 and not self._roster.grow(sequence, sequence.total + limit):
                limit -= 1
            chosen.draft_limit = max(0, limit)
            sequence.drafting = chosen.draft_limit > 0
            step.budget -= chosen.draft_limit

    def _issue(self, step: _Step) -> StepPlan:
        return self._send(
            tuple(self._planned(c.sequence, c.start, c.end, c.draft_limit) for c in step.chosen.values())
        )

    def _planned(self, sequence: Sequence, start: int, end: int, draft_limit: int) -> PlannedSequence:
        known, total = tuple(sequence.token_ids[start:end]), sequence.total
        return PlannedSequence(
            sequence_id=sequence.sequence_id,
            token_ids=known + (PENDING,) * (end - start - len(known)),
            start_position=start,
            block_tables=self._kv.tables(sequence.sequence_id),
            is_prefill=sequence.num_answered == 0 or end < total or end - start > 1,
            needs_logits=end == total and sequence.start.pooling is None,
            draft_limit=draft_limit,
            total_length=total,
            num_states=sequence.num_states(start, end),
            prompt_logits=sequence.needs_scores(start, end),
            score_blocks=self._roster.score_blocks(sequence, end),
        )

    def _send(self, planned: tuple[PlannedSequence, ...]) -> StepPlan:
        plan = self._roster.make_plan(self._step, planned)
        self._step += 1
        self._outstanding.append(plan)
        return plan

    # --- blocks ---

    def _reserve(self, sequence: Sequence, length: int, step: _Step) -> bool:
        """Blocks for positions below ``length``, preempting whoever ranks last if it must be; False when the
        sequence cannot run in this step."""
        if sequence.is_at_border:
            self._roster.evict(sequence)
        while not self._roster.grow(sequence, length):
            step.crowded = True
            if self._roster.take_back_drafts():
                continue
            victim = max(self._roster.running.values(), key=rank)
            if victim.in_flight or victim.sequence_id in step.chosen:
                # Its blocks are for the next step: only then is it known which of its tokens are there.
                step.held.add(victim.sequence_id)
                self._short = self._short or (sequence.sequence_id, length)
                return False
            if victim is sequence and len(self._roster.running) == 1:
                self._roster.fail(sequence, length)
                step.again = True
                return False
            self._roster.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _serve_the_short(self, step: _Step) -> None:
        """Gives blocks to the sequence that went without in the last step, before anybody else takes them."""
        if self._short is None:
            return
        (sequence_id, length), self._short = self._short, None
        sequence = self._roster.running.get(sequence_id)
        if sequence is not None and sequence.next_position < length <= sequence.total:
            self._reserve(sequence, length, step)

    # --- admission ---

    def _push_out(self, step: _Step, now: float) -> None:
        """Makes the last that runs give way where one of a better priority waits for its place or its blocks.

        Only priorities count here: among equals nobody loses a place to one that came later or is shorter.
        """
        turned_away, self._turned_away = self._turned_away, None
        waiting, running = self._roster.waiting.values(), self._roster.running.values()
        if not waiting or not running:
            return
        last = max(running, key=rank)
        if min(s.priority for s in waiting) >= last.priority:
            return
        urgent = [s for s in waiting if s.priority < last.priority and not self._roster.awaits_parent(s)]
        for first in prefill_order(urgent, now, self._age_bound_s, self._last_served)[:1]:
            if self._roster.has_place and turned_away != first.sequence_id:
                return
            if last.in_flight:
                step.held.add(last.sequence_id)  # its place is free as soon as that is known
            else:
                self._roster.preempt(last, for_urgent=True)

    def _admit(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """Starts or resumes a waiting sequence when blocks for its next chunk and a draft are free.

        One that was preempted waits until all its tokens and a block more fit, so that it is not preempted
        again at once. Neither holds when nothing else runs: then whatever fits must do.
        """
        alone = not self._roster.running
        if sequence.on_host:
            return self._restore(sequence, step, now, alone)
        self._roster.open(sequence)
        end = self._chunk_end(sequence, step)
        worst = end if alone else end + self._lookahead
        if sequence.preempted_at is not None and not alone:
            worst = self._roomy_length(sequence)
        if not self._kv.can_grow(sequence.sequence_id, worst):
            self._roster.release(sequence)
            self._turn_away(sequence, end, step, alone=alone)
            return False
        self._roster.start(sequence, now)
        self._roster.fork_children(sequence)
        end = self._chunk_end(sequence, step)
        if self._reserve(sequence, end, step):
            self._choose(sequence, end, step)
        return True

    def _restore(self, sequence: Sequence, step: _Step, now: float, alone: bool) -> bool:
        length = self._roomy_length(sequence)
        roomy = all(
            pool.num_free >= blocks_for(length, pool.block_size, pool.window, 1 + self._lookahead)
            for pool in self._kv.pools
        )
        if not (roomy or alone) or not self._roster.restore(sequence):
            self._turn_away(sequence, sequence.total, step, alone=alone)
            return False
        self._roster.start(sequence, now)
        self._roster.fork_children(sequence)
        end = self._chunk_end(sequence, step)
        if self._is_plannable(sequence, step) and self._reserve(sequence, end, step):
            self._choose(sequence, end, step)
        return True

    def _roomy_length(self, sequence: Sequence) -> int:
        """The length for which a preempted sequence waits to have blocks; what it evicts needs none."""
        length = sequence.total + self._kv.block_size + self._lookahead
        if sequence.eviction is not None:
            length = min(length, sequence.eviction.max_blocks * self._kv.block_size)
        return length

    def _turn_away(self, sequence: Sequence, length: int, step: _Step, *, alone: bool) -> None:
        """Blocks are short for a waiting sequence: says so once, gives up where it can never change."""
        if alone and not self._outstanding:
            self._roster.fail(sequence, length)
            step.again = True
            return
        self._turned_away = sequence.sequence_id
        if sequence.preempted_at is None and not sequence.told_blocked:
            sequence.told_blocked = True
            self._roster.tell(sequence, wording.queued_for_blocks(length, self._kv.counts()))

    # --- results ---

    def commit(self, result: StepResult) -> list[Outcome]:
        """Takes the results of the oldest outstanding plan; tokens and KV of its sequences become final.

        Sequences that ended meanwhile are passed over. A result with an error ends its sequence.
        """
        if not self._outstanding:
            raise EngineError(f"step {result.step} brought results, but no step is outstanding")
        plan = self._outstanding.popleft()
        if plan.step != result.step or [p.sequence_id for p in plan.sequences] != [
            r.sequence_id for r in result.results
        ]:
            raise EngineError(f"step {plan.step} brought results of other sequences than the planned ones")
        outcomes = []
        for planned, brought in zip(plan.sequences, result.results, strict=True):
            sequence = self._roster.running.get(planned.sequence_id)
            if sequence is not None:
                assert sequence.in_flight[0] is planned
                outcomes.append(self._take(sequence, planned, brought))
        return outcomes

    def _take(self, sequence: Sequence, planned: PlannedSequence, brought: SequenceResult) -> Outcome:
        is_prompt = len(sequence.token_ids) == sequence.prompt_length
        sequence.in_flight.pop(0)
        if brought.error is not None:
            computed = sequence.computed
            self.finish(sequence.sequence_id)
            return Outcome(sequence.sequence_id, planned, brought, computed, is_prompt)
        check_tokens(planned, brought)
        if planned.score_blocks or brought.block_scores:
            sequence.block_scores.extend(scores_by_block(planned, brought))
        sequence.token_ids.extend(brought.token_ids)
        # Of the tokens that one step brought the last has no KV; the others were drafted, so theirs is there.
        computed = planned.start_position + len(planned.token_ids) + max(0, len(brought.token_ids) - 1)
        self._kv.commit(sequence.sequence_id, sequence.token_ids[sequence.computed : computed])
        sequence.computed = computed
        brought = drop_scored(sequence, planned, brought)
        return Outcome(sequence.sequence_id, planned, brought, computed, is_prompt)
