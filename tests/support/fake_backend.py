"""A ChatBackend that plays a script: text at a rate, bursts, prefill progress, notices and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm.contracts import (
    ChatEvent,
    ChatMessage,
    ConstraintSpec,
    Delta,
    DraftCounts,
    EngineStats,
    Finished,
    FinishReason,
    ModelInfo,
    NoticeEvent,
    Prefill,
    Queued,
    RequestTimings,
    SamplingParams,
    Usage,
)
from edgellm_models.errors import EdgeLLMError, Notice

FAKE_MODEL = ModelInfo(
    name="smollm2-135m",
    path="/models/smollm2-135m.gguf",
    architecture="llama",
    file_format="gguf",
    quantization="Q4_1 (5.0 bits)",
    parameters=134_515_008,
    file_bytes=98_000_000,
    context_length=8192,
    trained_context=8192,
    has_chat_template=True,
    licence="apache-2.0",
)


@dataclass(frozen=True)
class Script:
    """What one answer does, in this order: queue, prefill, notices, pieces, error or end."""

    pieces: Sequence[str] = ("The capital of France is Paris.",)
    """One text per token."""
    tokens_per_s: float = 0.0
    """0 is as fast as the loop turns."""
    burst: int = 1
    """Tokens per event."""
    queued: Sequence[int] = ()
    prefill: Sequence[tuple[int, int, int]] = ((30, 30, 0),)
    """(done, total, cached)."""
    notices: Sequence[Notice] = ()
    reason: FinishReason = FinishReason.STOP
    error: str | None = None
    """Sent in Finished(ERROR)."""
    raises: BaseException | None = None
    """Raised instead of an end."""
    hold_after: int | None = None
    """After so many pieces, wait until cancelled."""
    timings: RequestTimings = field(default_factory=lambda: RequestTimings(0.0, 0.18, 0.5, 30, 22))


class FakeBackend:
    """Plays one Script per call, the last one again when they run out, and records what it was asked."""

    def __init__(self, *scripts: Script, model: ModelInfo = FAKE_MODEL, count: int = 30) -> None:
        self.scripts = list(scripts) or [Script()]
        self.model = model
        self.count = count
        self.calls: list[tuple[str, tuple[ChatMessage, ...], SamplingParams]] = []
        self.constraints: list[ConstraintSpec | None] = []
        self.cancelled: list[str] = []
        self.closed = False
        self.stats_reads = 0
        self.engine_stats = EngineStats(decode_tokens_per_s=42.0, running=1)
        self._cancel = asyncio.Event()

    def info(self) -> ModelInfo:
        return self.model

    def stats(self) -> EngineStats:
        self.stats_reads += 1
        return self.engine_stats

    async def stream_chat(
        self,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: ConstraintSpec | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatEvent]:
        self.constraints.append(constraint)
        self.template_variables = dict(template_variables or {})
        script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
        self.calls.append((conversation_id, tuple(messages), sampling))
        self._cancel = asyncio.Event()
        total = script.prefill[-1][1] if script.prefill else self.count
        cached = script.prefill[-1][2] if script.prefill else 0
        sent = 0

        def finished(reason: FinishReason, error: str | None = None) -> Finished:
            seed = sampling.seed if sampling.seed is not None else 1234
            return Finished(reason, Usage(total, cached, sent), script.timings, DraftCounts(), seed, error)

        for position in script.queued:
            yield Queued(position)
            await asyncio.sleep(0)
        for step in script.prefill:
            yield Prefill(*step)
            await asyncio.sleep(0)
        for notice in script.notices:
            yield NoticeEvent(notice)
        while sent < len(script.pieces):
            if script.hold_after is not None and sent >= script.hold_after:
                await self._cancel.wait()
            if self._cancel.is_set():
                yield finished(FinishReason.CANCELLED)
                return
            burst = script.pieces[sent : sent + script.burst]
            sent += len(burst)
            yield Delta(text="".join(burst), token_ids=tuple(range(len(burst))))
            await asyncio.sleep(script.burst / script.tokens_per_s if script.tokens_per_s else 0)
        if script.hold_after is not None:
            await self._cancel.wait()
            yield finished(FinishReason.CANCELLED)
            return
        if script.raises is not None:
            raise script.raises
        yield finished(FinishReason.ERROR if script.error else script.reason, script.error)

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        return self.count

    async def cancel(self, conversation_id: str) -> None:
        self.cancelled.append(conversation_id)
        self._cancel.set()

    async def close(self) -> None:
        self.closed = True


class FailingOpener:
    """Stands for a model that cannot be opened."""

    def __init__(self, error: EdgeLLMError | Exception) -> None:
        self.error = error

    def __call__(self) -> FakeBackend:
        raise self.error
