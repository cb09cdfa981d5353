"""The synchronous engine: queue, step loop, commit. Knows token ids and blocks, computes nothing itself."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from edgellm.cache.block_pool import BlockPool, BlockTable
from edgellm.contracts import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    PlannedSequence,
    Runner,
    SequenceResult,
    SequenceStart,
    StepPlan,
    TokenEvent,
)
from edgellm.engine.answer import Answer, TextDecoder
from edgellm.engine.checks import check_request
from edgellm.engine.sequence import Sample
from edgellm.engine.stats import StatsRecorder
from edgellm_models.errors import EngineError, Notice
from edgellm_models.tokenizer.base import Tokenizer

PREFILL_CHUNK = 512
"""Prompt tokens per step, so that cancelling and progress do not wait for a long prompt."""


class Engine:
    """Runs one sample at a time; the others wait in order of arrival.

    A contracts.GenerationEngine. Not thread-safe: one thread calls it (async_engine.py). ``validate`` alone
    may be called from anywhere.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        pools: Sequence[BlockPool],
        *,
        context_length: int,
        vocab_size: int,
        make_decoder: Callable[[GenerationRequest], TextDecoder],
        prefill_chunk: int = PREFILL_CHUNK,
        rope_switch_length: int | None = None,
        recorder: StatsRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._runner = runner
        self._tokenizer = tokenizer
        self._pools = tuple(pools)
        self._make_decoder = make_decoder
        self._prefill_chunk = prefill_chunk
        self._rope_switch_length = rope_switch_length
        self._recorder = recorder or StatsRecorder()
        self._clock = clock
        self._waiting: deque[Sample] = deque()
        self._running: Sample | None = None
        self._cancelled: set[str] = set()
        self._ended: list[int] = []
        self._next_sequence_id = 0
        self._step = 0
        self.stats: EngineStats = self._snapshot()

    # --- GenerationEngine ---

    def validate(self, request: GenerationRequest) -> None:
        """BadInputError when the request cannot be served: says what is wrong, with the values."""
        check_request(request, self.context_length, self.vocab_size)

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request, one sample after another. BadInputError when it cannot be served."""
        self.validate(request)
        if request.request_id in self._open_ids():
            raise EngineError(f"request {request.request_id!r} is open already")
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(32)
        now = self._clock()
        for index in range(request.num_samples):
            self._waiting.append(self._make_sample(request, index, seed, now))

    def cancel(self, request_id: str) -> None:
        """Ends a request, wherever it is, with the next step. Unknown ids are ignored: it may have ended."""
        if request_id in self._open_ids():
            self._cancelled.add(request_id)

    def has_work(self) -> bool:
        return self._running is not None or bool(self._waiting)

    def step(self) -> list[TokenEvent]:
        """Does one step and returns what it brought. After an exception the engine can no longer be used."""
        start = self._clock()
        events = self._end_unwanted(start)
        if self._running is None:
            events.extend(self._admit(start))
        sample = self._running
        prefilled = decoded = 0
        if sample is not None:
            notice = self._restart_notice(sample)
            plan = self._plan(sample)
            result = self._runner.execute(plan)
            if [r.sequence_id for r in result.results] != [sample.sequence_id]:
                raise EngineError(f"step {plan.step} brought results of other sequences than the planned one")
            now = self._clock()
            planned = plan.sequences[0]
            if notice is not None:
                events.append(TokenEvent(sample.request.request_id, sample.index, notice=notice))
            event = self._commit(sample, planned, result.results[0], now)
            events.append(event)
            prefilled = len(planned.token_ids) if planned.is_prefill else 0
            decoded = len(event.token_ids)
            self._recorder.record(start, now, prefilled, decoded)
        events.extend(self._queue_events())
        self.stats = self._snapshot()
        return events

    # --- the parts of a step ---

    def _open_ids(self) -> set[str]:
        ids = {sample.request.request_id for sample in self._waiting}
        if self._running is not None:
            ids.add(self._running.request.request_id)
        return ids

    def _make_sample(self, request: GenerationRequest, index: int, seed: int, now: float) -> Sample:
        room = self.context_length - len(request.prompt_token_ids)
        asked = request.sampling.max_new_tokens
        limit = room if asked is None else min(asked, room)
        answer = Answer(
            self._make_decoder(request),
            request.sampling,
            self._tokenizer.eos_ids,
            limit,
            self._tokenizer.vocab_size,
        )
        sample = Sample(
            sequence_id=self._next_sequence_id,
            request=request,
            index=index,
            seed=seed,
            answer=answer,
            tables=[BlockTable(pool) for pool in self._pools],
            arrived=request.arrival_time or now,
            token_ids=list(request.prompt_token_ids),
            fills_context=asked is None or asked > room,
        )
        self._next_sequence_id += 1
        return sample

    def _end_unwanted(self, now: float) -> list[TokenEvent]:
        """Ends what was cancelled and what is past its deadline, running or waiting."""

        def unwanted(sample: Sample) -> bool:
            deadline = sample.request.deadline
            return sample.request.request_id in self._cancelled or (deadline is not None and now >= deadline)

        ending = [s for s in ([self._running] if self._running else []) + list(self._waiting) if unwanted(s)]
        events = []
        for sample in ending:
            notice = None
            if sample.request.request_id not in self._cancelled:
                notice = Notice("deadline", "the time allowed for this request is over; it was cancelled")
            events.append(
                self._finish(sample, FinishReason.CANCELLED, now, text=sample.answer.finish(), notice=notice)
            )
        if ending:
            self._waiting = deque(s for s in self._waiting if not s.ended)
        self._cancelled.clear()
        return events

    def _admit(self, now: float) -> list[TokenEvent]:
        """Starts the next sample; those that ask for no token end at once."""
        events = []
        while self._waiting and self._running is None:
            sample = self._waiting.popleft()
            sample.started_at = now
            if sample.answer.is_full:
                events.append(
                    self._finish(sample, FinishReason.LENGTH, now, notice=self._full_notice(sample))
                )
            else:
                self._running = sample
        return events

    def _restart_notice(self, sample: Sample) -> Notice | None:
        """Makes a sample that has just outgrown the rope's short scaling start again; says so.

        K that was stored under the short scaling is of no use beside K under the long one.
        """
        limit, length = self._rope_switch_length, len(sample.token_ids)
        if limit is None or sample.restarted or not 0 < sample.computed <= limit < length:
            return None
        if len(sample.request.prompt_token_ids) > limit:  # long from its first chunk on
            return None
        sample.restarted = True
        sample.computed = 0
        for table in sample.tables:
            table.release()
        return Notice(
            "rope_scaling_switched",
            f"the sequence has outgrown {limit} tokens, where the model's rope scaling changes; its {length} "
            "tokens are computed again",
        )

    def _plan(self, sample: Sample) -> StepPlan:
        started: tuple[SequenceStart, ...] = ()
        start, length = sample.computed, len(sample.token_ids)
        if start == 0 and not sample.restarted:
            started = (
                SequenceStart(
                    sample.sequence_id,
                    sample.request.prompt_token_ids,
                    sample.request.sampling,
                    sample.seed,
                    sample.index,
                    sample.request.logprobs,
                ),
            )
        end = min(start + self._prefill_chunk, length)
        for table in sample.tables:
            table.prepare(committed=start, length=end)
        planned = PlannedSequence(
            sequence_id=sample.sequence_id,
            token_ids=tuple(sample.token_ids[start:end]),
            start_position=start,
            block_tables=tuple(table.blocks for table in sample.tables),
            is_prefill=sample.answer.num_tokens == 0 or end < length or end - start > 1,
            needs_logits=end == length,
            total_length=length,
        )
        plan = StepPlan(self._step, (planned,), started, tuple(self._ended))
        self._step += 1
        self._ended.clear()
        return plan

    def _commit(
        self, sample: Sample, planned: PlannedSequence, result: SequenceResult, now: float
    ) -> TokenEvent:
        prompt_is_new = sample.answer.num_tokens == 0
        sample.computed += len(planned.token_ids)
        if prompt_is_new:
            sample.prefilled = sample.computed
        if result.error is not None:
            text = sample.answer.finish()
            return self._finish(sample, FinishReason.ERROR, now, text=text, error=result.error)
        prefill_done = sample.computed if prompt_is_new else None
        request_id = sample.request.request_id
        if not planned.needs_logits:
            return TokenEvent(request_id, sample.index, prefill_done=prefill_done)
        if not result.token_ids:
            raise EngineError(f"step {self._step - 1} brought no token for a sequence that needed one")
        step = sample.answer.push(result.token_ids)
        sample.token_ids.extend(step.token_ids)
        sample.computed = (
            len(sample.token_ids) - 1
        )  # of the tokens that one step brought only the last has no KV
        if sample.first_token_at is None:
            sample.first_token_at = now
        sample.last_token_at = now
        sample.add_draft(result, len(step.token_ids))
        logprobs = result.logprobs[: len(step.token_ids)]
        if step.finish_reason is None:
            return TokenEvent(
                request_id, sample.index, step.token_ids, step.text, logprobs, prefill_done=prefill_done
            )
        notice = self._full_notice(sample) if step.finish_reason is FinishReason.LENGTH else None
        return self._finish(
            sample,
            step.finish_reason,
            now,
            token_ids=step.token_ids,
            text=step.text,
            logprobs=logprobs,
            prefill_done=prefill_done,
            notice=notice,
        )

    def _full_notice(self, sample: Sample) -> Notice | None:
        if not sample.fills_context:
            return None
        return Notice(
            "context_full",
            f"the context of {self.context_length} tokens is full: {len(sample.request.prompt_token_ids)} "
            f"of the prompt and {sample.answer.num_tokens} of the answer; a larger --ctx makes room",
        )

    def _finish(self, sample: Sample, reason: FinishReason, now: float, **fields: object) -> TokenEvent:
        """Ends a sample: gives its blocks back and makes its last event."""
        sample.ended = True
        for table in sample.tables:
            table.release()
        if sample is self._running:
            self._running = None
            self._ended.append(sample.sequence_id)
        return sample.last_event(reason, now, **fields)

    def _queue_events(self) -> list[TokenEvent]:
        """One event for every waiting request whose place changed; 1 is next."""
        events = []
        for position, sample in enumerate(self._waiting, start=1):
            if sample.queue_position != position and sample.index == 0:
                events.append(TokenEvent(sample.request.request_id, sample.index, queue_position=position))
            sample.queue_position = position
        return events

    def _snapshot(self) -> EngineStats:
        total = sum(pool.num_blocks for pool in self._pools)
        free = sum(pool.num_free for pool in self._pools)
        blocks = {"used": total - free, "shared": 0, "cached": 0, "free": free, "evicted": 0}
        running = 0 if self._running is None else 1
        return self._recorder.snapshot(self._clock(), len(self._waiting), running, blocks)

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice, and that all are free when nothing runs."""
        for pool in self._pools:
            pool.check_integrity()
            assert self._running is not None or pool.num_free == pool.num_blocks
