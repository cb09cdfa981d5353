"""The only place that awaits the backend: turns chat events into few, coalesced screen messages."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from textual.message_pump import MessagePump

from edgellm.contracts import (
    ChatBackend,
    Delta,
    DraftCounts,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    Queued,
    RequestTimings,
    Usage,
)
from edgellm_models.errors import EdgeLLMError
from edgellm_tui.conversation import Question
from edgellm_tui.live import Intervals, RateWindow
from edgellm_tui.messages import ReplyDelta, ReplyFailed, ReplyFinished, ReplyNotice, ReplyStarted
from edgellm_tui.settings import ChatSettings

CANCEL_GRACE_S = 3.0
"""How long a backend may take to end a cancelled answer before the stream is closed on it."""

CANCEL_AGAIN_S = 0.25
"""A request that was only just on its way may not have been there when it was cancelled."""

LONGEST_TURN_S = 0.02
"""A backend whose events are all ready must not keep the loop from keys for longer than this."""


@dataclass
class ReplyProgress:
    """Where an answer stands. Written here per event, read by the status line's timer."""

    phase: str = "sending"
    """sending, queued, reading, writing, stopping or idle."""
    queue_position: int = 0
    prefill_done: int = 0
    prefill_total: int = 0
    prefill_cached: int = 0
    tokens: int = 0
    started_at: float = 0.0
    first_token_at: float | None = None
    """Monotonic seconds, of the first visible text."""
    last_token_at: float = 0.0
    first_thought_at: float | None = None
    """Of the first text of the model's thinking, which is not the answer yet."""
    window: RateWindow = field(default_factory=RateWindow)
    intervals: Intervals = field(default_factory=Intervals)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    @property
    def tokens_per_s(self) -> float | None:
        """Over the answer so far; the first token belongs to the prefill."""
        if self.first_token_at is None or self.tokens < 2:
            return None
        elapsed = self.last_token_at - self.first_token_at
        return (self.tokens - 1) / elapsed if elapsed > 0 else None


class ReplyStream:
    """One answer on its way from the backend to a screen."""

    def __init__(
        self, backend: ChatBackend, target: MessagePump, settings: ChatSettings, question: Question
    ) -> None:
        self.progress = ReplyProgress()
        self._backend = backend
        self._question = question
        self._target = target
        self._settings = settings
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._arrived = asyncio.Event()
        self._painted = asyncio.Event()
        self._reader: asyncio.Task[Finished | None] | None = None
        self._stopping = False

    def painted(self) -> None:
        """The screen has shown the last ReplyDelta; until then the next one only grows."""
        self._painted.set()

    async def run(self) -> None:
        """Streams one answer; ends with exactly one ReplyFinished or ReplyFailed."""
        self.progress.started_at = time.monotonic()
        self._target.post_message(ReplyStarted())
        if self._stopping:  # by an Esc that came right behind the Enter
            self._target.post_message(ReplyFinished(self._never_asked()))
            return
        self._reader = asyncio.create_task(self._read())
        pump = asyncio.create_task(self._pump())
        outcome: ReplyFinished | ReplyFailed
        try:
            finished = await self._reader
            if finished is None:
                outcome = ReplyFailed("the answer ended without an end event; this is a fault of the backend")
            elif finished.reason is FinishReason.ERROR:
                outcome = ReplyFailed(finished.error or "the engine failed without saying why")
            else:
                outcome = ReplyFinished(finished)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            outcome = ReplyFailed("the backend did not stop in time and was cut off")
        except EdgeLLMError as error:
            outcome = ReplyFailed(str(error))
        except Exception as error:  # A fault behind the border must reach the person, not kill the screen.
            outcome = ReplyFailed(f"{type(error).__name__}: {error}")
        finally:
            pump.cancel()
            self.progress.phase = "idle"
        self._post_text()
        self._target.post_message(outcome)

    async def stop(self) -> None:
        """Asks the backend to end the answer; what has come so far stays."""
        if self._stopping:
            return
        self._stopping = True
        self.progress.phase = "stopping"
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
                while self._reader is not None and not self._reader.done():
                    await self._backend.cancel(self._question.chat_id)
                    await asyncio.wait({self._reader}, timeout=CANCEL_AGAIN_S)
        except TimeoutError:
            if self._reader is not None:
                self._reader.cancel()
        except Exception as error:
            self._target.log.error(f"cancel failed: {error}")
            if self._reader is not None:
                self._reader.cancel()

    def _never_asked(self) -> Finished:
        seed = self._question.sampling.seed or 0
        return Finished(
            FinishReason.CANCELLED, Usage(0, 0, 0), RequestTimings(0.0, 0.0, 0.0), DraftCounts(), seed
        )

    async def _read(self) -> Finished | None:
        progress = self.progress
        turn_started = time.monotonic()
        variables: dict[str, Any] = {}
        if self._settings.template_variables:
            variables["template_variables"] = self._settings.template_variables
        stream = self._backend.stream_chat(
            self._question.chat_id,
            self._question.messages,
            self._question.sampling,
            constraint=self._settings.constraint,
            **variables,
        )
        async for event in stream:
            now = time.monotonic()
            match event:
                case Delta():
                    self._take(event, now)
                case Prefill():
                    progress.prefill_done, progress.prefill_total = event.done, event.total
                    progress.prefill_cached = event.cached
                    self._enter("reading")
                case Queued():
                    progress.queue_position = event.position
                    self._enter("queued")
                case NoticeEvent():
                    self._question.writer.add_notice(event.notice)
                    self._target.post_message(ReplyNotice(event.notice))
                case Finished():
                    return event
            if now - turn_started > LONGEST_TURN_S:
                await asyncio.sleep(0)
                turn_started = time.monotonic()
        return None

    def _enter(self, phase: str) -> None:
        if not self._stopping:
            self.progress.phase = phase

    def _take(self, delta: Delta, now: float) -> None:
        progress = self.progress
        count = len(delta.token_ids) or 1
        progress.tokens += count
        progress.intervals.add(now, count)
        progress.window.add(now, count)
        progress.last_token_at = now
        if progress.first_token_at is None and (delta.text or not delta.reasoning):
            progress.first_token_at = now
        if progress.first_thought_at is None and delta.reasoning:
            progress.first_thought_at = now
        self._enter("writing")
        if delta.text:
            self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        # Only noted down there: a thread of the store's own brings it to the disk, at most a second later.
        self._question.writer.add(delta.text, delta.reasoning)
        self._arrived.set()

    def _post_text(self) -> bool:
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        self._text.clear()
        self._reasoning.clear()
        if not text and not reasoning:
            return False
        self._painted.clear()
        self._target.post_message(ReplyDelta(text, reasoning))
        return True

    async def _pump(self) -> None:
        settings = self._settings
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            # Everything that this thread computes until the next text is the price of painting this one.
            before = time.thread_time()
            if self._post_text():
                await self._painted.wait()
            await asyncio.sleep(settings.flush_interval_s)
            cost = time.thread_time() - before
            spacing = min(cost / settings.paint_share, settings.max_flush_interval_s)
            if spacing > settings.flush_interval_s:
                await asyncio.sleep(spacing - settings.flush_interval_s)
