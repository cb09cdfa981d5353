"""The synchronous engine: requests in, steps, events out. Knows token ids and texts, computes nothing."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from edgellm.cache.eviction import WINDOW, EvictionPlan, make_plan
from edgellm.cache.kv_manager import KVManager
from edgellm.constraint.compiler import ConstraintCompiler
from edgellm.contracts import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    LaunchingRunner,
    Notice,
    Runner,
    SequenceResult,
    SequenceStart,
    StepPlan,
    StepResult,
    Task,
    TokenEvent,
)
from edgellm.engine import wording
from edgellm.engine.answer import Answer, AnswerStep, TextDecoder
from edgellm.engine.checks import check_eviction, check_request
from edgellm.engine.drafting import Drafting
from edgellm.engine.flights import Flights
from edgellm.engine.kv_exchange import KVExchange
from edgellm.engine.saved_kv import KVIdentity
from edgellm.engine.sequence import Sample
from edgellm.engine.stats import StatsRecorder
from edgellm.scheduler.mixed_pace import MixedPace
from edgellm.scheduler.scheduler import Scheduler
from edgellm.scheduler.sequence import Outcome, Sequence
from edgellm.scheduler.wording import evicted
from edgellm.speculative.speculator import Speculator
from edgellm_models.errors import EngineError
from edgellm_models.tokenizer.base import Tokenizer

PREFILL_CHUNK = 512
"""Prompt tokens per step and request, so that cancelling and progress do not wait for a long prompt."""
KV_WINDOW = KV_BUDGET = 2048
"""Tokens that the eviction policies keep when nothing is said."""
MAX_RUNNING = 16
"""Samples that run at once; more wait."""


class Engine:
    """Runs up to ``max_running`` samples together; the scheduler decides who waits.

    A contracts.GenerationEngine. Not thread-safe: one thread calls it (async_engine.py). ``validate`` alone
    may be called from anywhere.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        kv: KVManager,
        *,
        context_length: int,
        vocab_size: int,
        make_decoder: Callable[[GenerationRequest], TextDecoder],
        max_running: int = MAX_RUNNING,
        prefill_chunk: int = PREFILL_CHUNK,
        mixed_chunk: int | None = None,
        token_budget: int | None = None,
        rope_switch_length: int | None = None,
        kv_window: int = KV_WINDOW,
        kv_budget: int = KV_BUDGET,
        kv_identity: Callable[[], KVIdentity] | None = None,
        model_name: str = "",
        recorder: StatsRecorder | None = None,
        stats_interval_s: float = 0.0,
        speculator: Speculator | None = None,
        depth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``token_budget``: rows of a step; by default a chunk beside a token of every other sample.
        ``mixed_chunk``: prompt rows of a step beside answers that go on; None measures what they cost.

        ``kv_window`` and ``kv_budget``: tokens kept by requests with such a policy and no number themselves.
        ``kv_identity`` and ``model_name``: what files of saved KV state, see ``exchange``. ``speculator``
        drafts up to ``kv.lookahead`` tokens per sequence and step; None leaves that to the runner.
        ``depth`` 1 keeps a step in flight while the next is planned, which a runner must be able to go by; 0
        does one after another. Not with a ``speculator``: what it drafts goes by the text so far.
        ``stats_interval_s``: how old the stats may be by the end of a step that changed nobody's state.
        """
        if depth and speculator is not None:
            raise EngineError("drafts need the text so far: no step can be in flight beside them")
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.max_running = max_running
        self._runner = runner
        self.exchange = KVExchange(
            kv, runner, context_length, vocab_size, rope_switch_length, kv_identity, model_name
        )
        """Saves and loads KV of the cache."""
        self._tokenizer = tokenizer
        self._kv = kv
        self._make_decoder = make_decoder
        self._constraints = ConstraintCompiler(tokenizer, vocab_size)
        self._kv_window, self._kv_budget = kv_window, kv_budget
        self._recorder = recorder or StatsRecorder()
        self._stats_interval_s = stats_interval_s
        self.on_execute: Callable[[], object] = lambda: None
        """Called in every step when all is planned and the runner's work begins."""
        self._clock = clock
        self._drafting = Drafting(speculator, kv.lookahead)
        self._pace = MixedPace(prefill_chunk) if mixed_chunk is None else None
        self._scheduler = Scheduler(
            kv,
            max_running=max_running,
            token_budget=token_budget or prefill_chunk + max_running,
            prefill_chunk=prefill_chunk,
            mixed_chunk=mixed_chunk if self._pace is None else self._pace.rows,
            clock=clock,
            lookahead=kv.lookahead,
            rope_switch_length=rope_switch_length,
            depth=depth,
        )
        self._flights = Flights(cast("LaunchingRunner", runner), depth, clock) if depth else None
        self._samples: dict[int, Sample] = {}
        """What has not ended, by sequence id, in order of arrival."""
        self._open: dict[str, list[Sample]] = {}
        """The same by request id."""
        self._empty: list[Sample] = []
        """Those that ask for no token, have no room for one or must be empty."""
        self._cancelled: set[str] = set()
        self._parting: list[TokenEvent] = []
        """What is to be said of samples that end in this step, before their last events."""
        self._next_sequence_id = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._evicted_tokens: Counter[str] = Counter()
        """By policy, of samples that have ended."""
        self.stats: EngineStats = self._snapshot(clock())

    # --- GenerationEngine ---

    def validate(self, request: GenerationRequest) -> None:
        """BadInputError when the request cannot be served: says what is wrong, with the values."""
        check_request(request, self.context_length, self.vocab_size)
        self._eviction_plan(request)
        if request.constraint is not None:
            self._constraints.compile(request.constraint)  # kept for ``submit``

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. BadInputError when it cannot be served."""
        self.validate(request)
        if request.request_id in self._open:
            raise EngineError(f"request {request.request_id!r} is open already")
        if request.task is Task.EMBED:
            request = replace(request, speculate=False)
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(32)
        now = self._clock()
        parent: int | None = None
        samples = []
        for index in range(request.num_samples):
            sample = self._make_sample(request, index, seed, now, parent)
            samples.append(sample)
            self._samples[sample.sequence_id] = sample
            if sample.answer.is_full or sample.answer.is_finished:
                self._empty.append(sample)
            else:
                self._scheduler.add(sample.sequence)
            parent = samples[0].sequence_id
        self._open[request.request_id] = samples

    def cancel(self, request_id: str) -> None:
        """Ends a request, wherever it is, with the next step. Unknown ids are ignored: it may have ended."""
        if request_id in self._open:
            self._cancelled.add(request_id)

    def has_work(self) -> bool:
        return bool(self._samples or self._flights)

    def refresh_stats(self) -> None:
        """Takes new stats now; steps do it by themselves."""
        self.stats = self._snapshot(self._clock())

    def step(self) -> list[TokenEvent]:
        """Does one step and returns what it brought. After an exception the engine can no longer be used."""
        start = self._clock()
        events = self._end_unwanted(start)
        events.extend(self._end_empty(start))
        drafts = self._drafting.propose(self._samples)
        plan = self._scheduler.next_step()
        events.extend(self._told_by_scheduler(start))
        if plan is not None:
            events.extend(self._run(self._drafting.planned(plan, drafts, self._samples), start))
        elif self._flights:
            events.extend(self._land(self._flights))
        elif self._samples and not events:
            raise EngineError(
                f"nothing can run although {len(self._samples)} samples are open and no step is on its way"
            )
        events.extend(self._queue_events())
        events[:0] = self._parting
        self._parting.clear()
        self._refresh_stats()
        return events

    # --- the parts of a step ---

    def _make_sample(
        self, request: GenerationRequest, index: int, seed: int, now: float, parent: int | None
    ) -> Sample:
        room = self.context_length - len(request.prompt_token_ids)
        asked = request.sampling.max_new_tokens
        limit = room if asked is None else min(asked, room)
        embeds = request.task is Task.EMBED
        if embeds:
            limit = 1  # none is drawn; it has no room and no need of one
        constraint = None if request.constraint is None else self._constraints.compile(request.constraint)
        answer = Answer(
            self._make_decoder(request),
            request.sampling,
            self._tokenizer.eos_ids,
            limit,
            self._tokenizer.vocab_size,
            constraint,
        )
        start = SequenceStart(
            self._next_sequence_id,
            request.prompt_token_ids,
            request.sampling,
            seed,
            index,
            request.logprobs,
            request.prompt_logprobs if index == 0 else None,
            request.score_from,
            request.pooling if embeds else None,
        )
        self._next_sequence_id += 1
        sequence = Sequence(
            start,
            arrival=request.arrival_time or now,
            max_new_tokens=limit,
            priority=request.priority,
            salt=request.cache_salt,
            conversation_id=request.conversation_id,
            eviction=self._eviction_plan(request),
            draft_limit=self._drafting.by_runner(request),
            needs_host=constraint is not None or self._drafting.speculator is not None,
            fork_parent=parent,
        )
        self._drafting.begin(sequence.sequence_id, request)
        fills_context = asked is None or asked > room
        return Sample(request, index, answer, sequence, fills_context, answer.token_masks())

    def _eviction_plan(self, request: GenerationRequest) -> EvictionPlan | None:
        """What a request's policy makes of its KV; None keeps all. BadInputError where it cannot be done."""
        if request.kv_policy == "stop":
            return None
        keep = request.kv_keep
        if keep is None:
            keep = self._kv_window if request.kv_policy == WINDOW else self._kv_budget
        plan = make_plan(request.kv_policy, keep, self._kv.block_size, request.protected_tokens)
        check_eviction(plan, request, self.context_length, self._kv.pools)
        return plan

    def _end_unwanted(self, now: float) -> list[TokenEvent]:
        """Ends what was cancelled and what is past its deadline, running or waiting."""
        events = []
        for sample in list(self._samples.values()):
            request = sample.request
            if request.request_id in self._cancelled:
                notice = None
            elif request.deadline is not None and now >= request.deadline:
                notice = wording.deadline()
            else:
                continue
            text = sample.answer.finish()
            events.append(self._finish(sample, FinishReason.CANCELLED, now, text=text, notice=notice))
        self._cancelled.clear()
        return events

    def _end_empty(self, now: float) -> list[TokenEvent]:
        """Ends those that get no token."""
        events = []
        for sample in self._empty:
            if sample.sequence_id not in self._samples:  # cancelled
                continue
            if sample.answer.is_finished:
                events.append(self._finish(sample, FinishReason.STOP, now))
            else:
                notice = self._full_notice(sample)
                events.append(self._finish(sample, FinishReason.LENGTH, now, notice=notice))
        self._empty.clear()
        return events

    def _told_by_scheduler(self, now: float) -> list[TokenEvent]:
        """What planning did to sequences: notices, and those that were given up."""
        events = []
        for sequence_id, notice in self._scheduler.notices():
            if sequence_id in self._samples:
                events.append(self._samples[sequence_id].event(notice=notice))
        for failure in self._scheduler.failures():
            sample = self._samples[failure.sequence_id]
            text = sample.answer.finish()
            events.append(self._finish(sample, FinishReason.ERROR, now, text=text, error=failure.error))
        return events

    def _run(self, plan: StepPlan, start: float) -> list[TokenEvent]:
        events = self._mark_started(plan, start)
        if self._flights is None:
            self.on_execute()
            began = self._clock()
            return events + self._take(plan, self._runner.execute(plan), start, began)
        self._flights.launch(plan, start)
        return events + self._land(self._flights) if self._flights.too_many else events

    def _land(self, flights: Flights) -> list[TokenEvent]:
        self.on_execute()
        landed = flights.land()
        return self._take(landed.plan, landed.result, landed.start, landed.began)

    def _take(self, plan: StepPlan, result: StepResult, start: float, began: float) -> list[TokenEvent]:
        """What a step brought, which was planned at ``start`` and ran since ``began``."""
        now = self._clock()
        events: list[TokenEvent] = []
        decoded = 0
        # An answer may end inside of what a draft brought: nothing behind its end becomes part of its text or
        # of the cache.
        result, pushed = self._end_within(result)
        outcomes = self._scheduler.commit(result)
        events.extend(self._drafting.settle(plan, result, now - began, self._samples))
        for outcome in outcomes:
            sample = self._samples[outcome.sequence_id]
            event = self._commit(sample, outcome, now, pushed.get(outcome.sequence_id))
            decoded += len(event.token_ids)
            events.append(event)
        prefilled = sum(len(planned.token_ids) for planned in plan.sequences if planned.is_prefill)
        if self._pace is not None:
            decoding = sum(not planned.is_prefill for planned in plan.sequences)
            self._pace.observe(decoding, prefilled, now - began)
            self._scheduler.mixed_chunk = self._pace.rows
        self._recorder.record(start, now, prefilled, decoded)
        return events

    def _mark_started(self, plan: StepPlan, now: float) -> list[TokenEvent]:
        """Notes which samples run for the first time, and says where one reuses less than it might."""
        events = []
        for planned in plan.sequences:
            sample = self._samples[planned.sequence_id]
            if sample.started_at is not None:
                continue
            sample.started_at = now
            self._prompt_tokens += sample.prompt_length
            self._cached_tokens += sample.sequence.cached_tokens
            found = self._kv.divergence(planned.sequence_id)
            if found is not None:
                notice = wording.prefix_lost(found, sample.request, self._tokenizer)
                events.append(sample.event(notice=notice))
        return events

    def _end_within(self, result: StepResult) -> tuple[StepResult, dict[int, AnswerStep]]:
        """The result without tokens behind an answer's end, and what its runs of several tokens mean."""
        pushed: dict[int, AnswerStep] = {}
        results = list(result.results)
        for index, one in enumerate(results):
            if len(one.token_ids) > 1 and one.error is None:
                step = self._samples[one.sequence_id].answer.push(one.token_ids)
                pushed[one.sequence_id] = step
                kept = len(step.token_ids)
                results[index] = replace(one, token_ids=step.token_ids, logprobs=one.logprobs[:kept])
        return (replace(result, results=tuple(results)) if pushed else result), pushed

    def _commit(
        self, sample: Sample, outcome: Outcome, now: float, step: AnswerStep | None = None
    ) -> TokenEvent:
        """``step``: what the tokens mean, where the answer has taken them already."""
        result = outcome.result
        if result.error is not None:
            text = sample.answer.finish()
            return self._finish(sample, FinishReason.ERROR, now, text=text, error=result.error)
        if step is None and sample.is_midway and _is_plain_token(result):
            step = sample.answer.push(result.token_ids)
            if step.finish_reason is None:
                sample.last_token_at = now
                return TokenEvent(sample.request.request_id, sample.index, step.token_ids, step.text)
        fields: dict[str, Any] = {
            "prefill_done": sample.prompt_progress(outcome),
            "prompt_logprobs": result.prompt_logprobs,
        }
        if result.embedding is not None:
            sample.first_token_at = now  # its prefill ends here
            return self._finish(sample, FinishReason.STOP, now, embedding=result.embedding, **fields)
        if not outcome.planned.needs_logits:
            return sample.event(**fields)
        if step is None:
            step = sample.answer.push(result.token_ids)
        reason, error = step.finish_reason, step.error
        if reason is None:
            try:
                sample.token_masks = sample.answer.token_masks()
            except EngineError as failed:  # of this answer's grammar: the others go on
                reason, error = FinishReason.ERROR, str(failed)
        if sample.first_token_at is None:
            sample.first_token_at = now
        sample.last_token_at = now
        sample.add_draft(result, len(step.token_ids))
        fields |= {
            "token_ids": step.token_ids,
            "text": step.text,
            "logprobs": result.logprobs[: len(step.token_ids)],
        }
        if reason is None:
            return sample.event(**fields)
        notice = self._full_notice(sample) if reason is FinishReason.LENGTH else None
        return self._finish(sample, reason, now, notice=notice, error=error, **fields)

    def _full_notice(self, sample: Sample) -> Notice | None:
        if not sample.fills_context:
            return None
        return wording.context_full(self.context_length, sample.prompt_length, sample.answer.num_tokens)

    def _finish(self, sample: Sample, reason: FinishReason, now: float, **fields: Any) -> TokenEvent:
        """Ends a sample: gives its blocks back and makes its last event."""
        dropped = sample.sequence.dropped
        if sample.sequence.eviction is not None and dropped.tokens > dropped.told:
            length = len(sample.sequence.token_ids)
            self._parting.append(sample.event(notice=evicted(sample.sequence.eviction, dropped, length)))
        if sample.sequence.eviction is not None:
            self._evicted_tokens[sample.sequence.eviction.policy] += dropped.tokens
        self._scheduler.finish(sample.sequence_id)
        self._drafting.end(sample.sequence_id)
        del self._samples[sample.sequence_id]
        siblings = self._open[sample.request.request_id]
        siblings.remove(sample)
        if not siblings:
            del self._open[sample.request.request_id]
        return sample.last_event(reason, now, **fields)

    def _queue_events(self) -> list[TokenEvent]:
        """One event for every request that has not begun and whose place changed; 1 is next."""
        if not self._scheduler.num_waiting:
            return []
        events = []
        for position, sample in enumerate(self._not_begun(self._scheduler.waiting_ids()), start=1):
            if sample.queue_position != position:
                events.append(sample.event(queue_position=position))
            sample.queue_position = position
        return events

    def _not_begun(self, sequence_ids: Iterable[int]) -> Iterable[Sample]:
        """The first samples of the requests that have not run yet; a preempted one has notices instead."""
        for sequence_id in sequence_ids:
            sample = self._samples[sequence_id]
            if sample.index == 0 and sample.started_at is None:
                yield sample

    def _refresh_stats(self) -> None:
        """Who reads stats does so a few times a second, and they take as long as the rest of such a step."""
        now, stats = self._clock(), self.stats
        changed = stats.running != self._scheduler.num_running or stats.waiting != self._scheduler.num_waiting
        if changed or now - stats.time >= self._stats_interval_s:
            self.stats = self._snapshot(now)

    def _snapshot(self, now: float) -> EngineStats:
        speculator = self._drafting.speculator
        return self._recorder.snapshot(
            now,
            self._scheduler.num_waiting,
            self._scheduler.num_running,
            self._kv.counts(),
            prefix_hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
            kv_waste=self._kv.waste(),
            draft=None if speculator is None else speculator.counts,
            draft_state="off" if speculator is None else speculator.state,
            drafters=() if speculator is None else speculator.drafters(),
            evicted_tokens=self._evicted_tokens,
        )

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice, and that nothing is in use when nothing is open."""
        self._kv.check_integrity()
        assert set(self._kv.sequences) <= set(self._samples), "a sequence that ended holds blocks"
        assert self.has_work() or not self._scheduler.has_work()


def _is_plain_token(result: SequenceResult) -> bool:
    """A single token, and nothing beside it: what most steps bring."""
    return len(result.token_ids) == 1 and not (
        result.draft_proposed or result.logprobs or result.prompt_logprobs
    )
