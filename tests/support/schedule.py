"""Drives a Scheduler over a KVManager and the paged fake runner, as an engine would, at depth 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import Notice, SamplingParams, SequenceStart, StepPlan
from edgellm.scheduler.scheduler import Scheduler
from edgellm.scheduler.sequence import Outcome, Sequence
from tests.support.fake_runner import PagedFakeRunner


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Setup:
    """The numbers of one schedule."""

    num_blocks: int = 64
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    max_running: int = 4
    token_budget: int = 64
    prefill_chunk: int = 16
    mixed_chunk: int | None = None
    depth: int = 0
    lookahead: int = 0
    accept: int = 0
    host_blocks: int = 0
    prefix_cache: bool = True
    age_bound_s: float = 1e9
    rope_switch_length: int | None = None
    error_at: dict[int, int] = field(default_factory=dict)
    check_reads: bool = True
    check_every_step: bool = True


class Schedule:
    """The loop of an engine without text: plans, runs, commits, ends answers at their length."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock()
        groups = [GroupLayout(window, setup.num_blocks) for window in setup.windows]
        self.kv = KVManager(
            groups,
            setup.block_size,
            lookahead=setup.lookahead + setup.depth,
            host_blocks=[setup.host_blocks] * len(groups),
            enable_prefix_cache=setup.prefix_cache,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_running=setup.max_running,
            token_budget=setup.token_budget,
            prefill_chunk=setup.prefill_chunk,
            mixed_chunk=setup.mixed_chunk,
            clock=self.clock,
            depth=setup.depth,
            age_bound_s=setup.age_bound_s,
            lookahead=setup.lookahead,
            rope_switch_length=setup.rope_switch_length,
        )
        self.runner = PagedFakeRunner(
            setup.block_size,
            setup.windows,
            accept=setup.accept,
            rope_switch_length=setup.rope_switch_length,
            error_at=setup.error_at,
            check_reads=setup.check_reads,
        )
        self.sequences: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = {}
        self.finished_at: dict[int, int] = {}
        """Sequence id -> steps executed when it ended."""
        self.errors: dict[int, str] = {}
        self.notices: list[tuple[int, Notice]] = []
        self.outcomes: list[list[Outcome]] = []
        self.unrun: list[StepPlan] = []
        self._next_id = 0

    @property
    def plans(self) -> list[StepPlan]:
        return self.runner.plans

    def make(
        self,
        prompt: Many[int],
        max_new_tokens: int,
        *,
        sample: int = 0,
        prompt_logprobs: int | None = None,
        pooling: str | None = None,
        arrival: float | None = None,
        **fields: object,
    ) -> Sequence:
        """A sequence with the next id, not added yet."""
        start = SequenceStart(
            self._next_id,
            tuple(prompt),
            SamplingParams(),
            1,
            sample,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
        )
        self._next_id += 1
        when = self.clock.now if arrival is None else arrival
        return Sequence(start, when, max_new_tokens, **fields)  # type: ignore[arg-type]

    def add(self, prompt: Many[int], max_new_tokens: int, **fields: object) -> int:
        """Queues a sequence and returns its id."""
        sequence = self.make(prompt, max_new_tokens, **fields)  # type: ignore[arg-type]
        self.enter(sequence)
        self.scheduler.add(sequence)
        return sequence.sequence_id

    def enter(self, sequence: Sequence) -> None:
        """Makes the loop keep the sequence's answer."""
        self.sequences[sequence.sequence_id] = sequence
        self.answers[sequence.sequence_id] = list(sequence.token_ids[sequence.prompt_length :])

    def step(self) -> bool:
        """Plans as far as the depth allows, then runs and commits the oldest plan. False when idle."""
        while len(self.unrun) <= self.setup.depth:
            plan = self.scheduler.next_step()
            self._check()
            if plan is None:
                break
            assert sum(len(s.token_ids) + s.draft_limit for s in plan.sequences) <= self.setup.token_budget
            self.unrun.append(plan)
        self.notices.extend(self.scheduler.notices())
        for failure in self.scheduler.failures():
            self.errors[failure.sequence_id] = failure.error
        if not self.unrun:
            return False
        assert self.runner.most_tails <= self.setup.max_running
        outcomes = self.scheduler.commit(self.runner.execute(self.unrun.pop(0)))
        self.outcomes.append(outcomes)
        for outcome in outcomes:
            self._take(outcome)
        self._check()
        return True

    def _take(self, outcome: Outcome) -> None:
        sequence_id = outcome.sequence_id
        if outcome.result.error is not None:
            self.errors[sequence_id] = outcome.result.error
            return
        self.answers[sequence_id].extend(outcome.result.token_ids)
        is_embedded = outcome.result.embedding is not None
        if is_embedded or len(self.answers[sequence_id]) >= self.sequences[sequence_id].max_new_tokens:
            self.scheduler.finish(sequence_id)
            self.finished_at[sequence_id] = len(self.plans)

    def _check(self) -> None:
        if self.setup.check_every_step:
            self.kv.check_integrity()

    def run(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.scheduler.has_work(), "the schedule stands still with work left"
        self.assert_all_free()

    def assert_all_free(self) -> None:
        """No block is in use, on the device or the host."""
        self.kv.check_integrity()
        counts = self.kv.counts()
        assert counts["used"] == counts["host"] == 0, counts

    def notices_of(self, kind: str) -> list[tuple[int, str]]:
        return [(sequence_id, n.detail) for sequence_id, n in self.notices if n.kind == kind]
