"""Engines without a model: FakeEngine plays a script, FakeRunner answers step plans, ByteTokenizer spells
bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgellm.contracts import (
    DraftCounts,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PlannedSequence,
    RequestTimings,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from edgellm_models.errors import Notice
from edgellm_models.tokenizer.base import KnownIds, PromptPart, TokenKind

END_ID = 256


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 is the end id, 257 begins a text. Special ids have no text."""

    vocab_size = 258
    bos_id: int | None = 257
    eos_ids = frozenset({END_ID})
    pad_id: int | None = None
    unk_id: int | None = None
    add_bos = False
    add_eos = False
    strips_leading_space = False
    notices: tuple[Notice, ...] = ()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return ([257] if add_special and self.add_bos else []) + list(text.encode())

    def encode_parts(self, parts: Sequence[PromptPart], *, add_bos: bool = True) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, KnownIds):
                ids += part.token_ids
            else:
                ids += (part if isinstance(part, str) else part.text).encode()
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def token_kind(self, token_id: int) -> TokenKind:
        return TokenKind.BYTE if token_id < 256 else TokenKind.CONTROL

    def token_id(self, text: str) -> int | None:
        return text.encode()[0] if len(text) == 1 else None

    def decode(self, token_ids: Sequence[int], *, show_special: bool = False) -> str:
        data = b"".join(self.token_bytes(t) for t in token_ids if t < 256 or show_special)
        return data.decode("utf-8", errors="replace")


@dataclass
class FakeRunner:
    """Answers plans from a script of ids per answer position: ``script(prompt)`` is the whole answer.

    ``burst`` tokens come per step where the plan lets as many be drafted. Checks what every plan must hold:
    positions without gaps, a start before the first use, a block for every new position, and no use after the
    end. What the blocks hold is the business of PagedFakeRunner.
    """

    script: Callable[[tuple[int, ...]], Sequence[int]]
    burst: int = 1
    block_size: int = 4
    error_at: int | None = None
    """Answer position at which the sequence gets an error of its own."""
    raise_at_step: int | None = None
    """Step at which ``execute`` raises: an engine fault."""
    delay_s: float = 0.0
    logprobs: bool = False
    """Whether it reports some, made up, of as many alternatives as are asked for."""
    plans: list[StepPlan] = field(default_factory=list)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    poolings: dict[int, str | None] = field(default_factory=dict)
    tops: dict[int, int | None] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.raise_at_step is not None and plan.step >= self.raise_at_step:
            raise RuntimeError("the kernel is on fire")
        self.plans.append(plan)
        for ended in plan.ended:
            del self.prompts[ended], self.answers[ended]
            self.committed.pop(ended, None)
            self.poolings.pop(ended, None)
            self.tops.pop(ended, None)
        for start in plan.started:
            assert start.sequence_id not in self.prompts
            self.prompts[start.sequence_id] = start.prompt_token_ids
            self.answers[start.sequence_id] = []
            self.poolings[start.sequence_id] = start.pooling
            self.tops[start.sequence_id] = start.logprobs
        return StepResult(plan.step, tuple(self._result(s) for s in plan.sequences))

    def _result(self, planned: PlannedSequence) -> SequenceResult:
        sid = planned.sequence_id
        prompt, answer = self.prompts[sid], self.answers[sid]
        tokens = [*prompt, *answer]
        assert planned.start_position <= self.committed.get(sid, len(prompt)), "a gap"
        end = planned.start_position + len(planned.token_ids)
        assert list(planned.token_ids) == tokens[planned.start_position : end]
        for table in planned.block_tables:
            for position in range(planned.start_position, end):
                assert table[position // self.block_size] >= 0
        pooling = self.poolings.get(sid)
        assert planned.needs_logits == (end == len(tokens) and pooling is None)
        self.committed[sid] = end
        scores = tuple(tuple(0.0 for _ in blocks) for blocks in planned.score_blocks)
        if pooling is not None:  # what is pooled is the id itself, and how many there were
            at_end = end == len(prompt)
            assert planned.num_states == (len(planned.token_ids) if pooling == "mean" else at_end)
            values = (sum(prompt) / len(prompt) if pooling == "mean" else prompt[-1], len(prompt))
            return SequenceResult(sid, (), embedding=tuple(map(float, values)) if at_end else None)
        if not planned.needs_logits:
            return SequenceResult(sid, (), block_scores=scores)
        if self.error_at is not None and len(answer) >= self.error_at:
            return SequenceResult(sid, (), error="NaN in the logits")
        script = list(self.script(prompt))
        count = min(self.burst, 1 + planned.draft_limit)
        new = [script[i % len(script)] for i in range(len(answer), len(answer) + count)]
        if planned.token_masks:  # the script where it is allowed, else what is
            mask = planned.token_masks[0]
            allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
            new = [new[0] if new[0] in allowed else allowed[0]]
        answer.extend(new)
        self.committed[sid] = len(prompt) + len(answer) - 1
        told = tuple(TokenLogprob(t, -0.5, self._best(sid, t)) for t in new) if self.logprobs else ()
        drafted = {"draft_proposed": count - 1, "draft_accepted": count - 1}
        return SequenceResult(sid, tuple(new), **drafted, logprobs=told, block_scores=scores)  # type: ignore[arg-type]

    def _best(self, sequence_id: int, token_id: int) -> tuple[tuple[int, float], ...]:
        return tuple((token_id + i, -0.5 - i) for i in range(self.tops.get(sequence_id) or 0))


@dataclass(frozen=True)
class FakeAnswer:
    """What FakeEngine says to one request."""

    pieces: Sequence[tuple[int, str]]
    """(token id, text) per token."""
    burst: int = 1
    """Tokens per event."""
    prefill: Sequence[int] = ()
    """prefill_done values, one event each."""
    notices: Sequence[Notice] = ()
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None


class FakeEngine:
    """A GenerationEngine that plays FakeAnswers in order, the last one again and again, at a rate."""

    def __init__(
        self, *answers: FakeAnswer, tokens_per_s: float = 0.0, fault_after: int | None = None
    ) -> None:
        self._answers = deque(answers or [FakeAnswer([(104, "h"), (105, "i")])])
        self._tokens_per_s = tokens_per_s
        self._fault_after = fault_after
        self._queue: deque[tuple[GenerationRequest, deque[TokenEvent]]] = deque()
        self._cancelled: set[str] = set()
        self._steps = 0
        self.requests: list[GenerationRequest] = []
        self.stats = EngineStats()

    def validate(self, request: GenerationRequest) -> None:
        """Accepts everything."""

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        answer = self._answers.popleft() if len(self._answers) > 1 else self._answers[0]
        self._queue.append((request, deque(self._play(request, answer))))

    def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def has_work(self) -> bool:
        return bool(self._queue)

    def step(self) -> list[TokenEvent]:
        self._steps += 1
        if self._fault_after is not None and self._steps > self._fault_after:
            raise RuntimeError("the fake engine failed")
        if not self._queue:
            return []
        request, script = self._queue[0]
        if request.request_id in self._cancelled:
            self._queue.popleft()
            return [self._last(request, FinishReason.CANCELLED, 0)]
        event = script.popleft()
        if self._tokens_per_s and event.token_ids:
            time.sleep(len(event.token_ids) / self._tokens_per_s)
        if not script:
            self._queue.popleft()
        self.stats = EngineStats(time=time.monotonic(), running=len(self._queue))
        return [event]

    def _play(self, request: GenerationRequest, answer: FakeAnswer) -> list[TokenEvent]:
        events = [TokenEvent(request.request_id, prefill_done=done) for done in answer.prefill]
        events += [TokenEvent(request.request_id, notice=notice) for notice in answer.notices]
        for i in range(0, len(answer.pieces), answer.burst):
            part = answer.pieces[i : i + answer.burst]
            text = "".join(piece for _, piece in part)
            events.append(TokenEvent(request.request_id, token_ids=tuple(t for t, _ in part), text=text))
        reason = FinishReason.ERROR if answer.error else answer.finish_reason
        return [*events, self._last(request, reason, len(answer.pieces), answer.error)]

    def _last(
        self, request: GenerationRequest, reason: FinishReason, completion: int, error: str | None = None
    ) -> TokenEvent:
        return TokenEvent(
            request.request_id,
            finish_reason=reason,
            usage=Usage(len(request.prompt_token_ids), 0, completion),
            timings=RequestTimings(0.0, 0.01, 0.1, len(request.prompt_token_ids), completion),
            draft=DraftCounts(),
            seed=request.sampling.seed if request.sampling.seed is not None else 1,
            error=error,
        )
