"""One API request while it is answered: its engine requests, and the one stream of chat events they make."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from edgellm.chat.events import ChatEventMaker
from edgellm.chat.reply import Reply
from edgellm.contracts import (
    ChatEvent,
    Delta,
    Finished,
    FinishReason,
    GenerationRequest,
    Notice,
    NoticeEvent,
    Prefill,
    Queued,
    TokenEvent,
    TokenLogprob,
)
from edgellm.engine.async_engine import AsyncEngine, TokenStream
from edgellm.log import log_answer, log_notice
from edgellm.server.metrics import ServerMetrics
from edgellm_models.errors import EdgeLLMError

MERGED_EVENTS = 256
"""Of several prompts, that wait for one reader; the engine's queues merge what is more."""


@dataclass
class Choice:
    """One answer of a request."""

    request: GenerationRequest
    sample: int
    maker: ChatEventMaker
    reply: Reply
    finished: Finished | None = None
    timed_out: bool = False
    notices: list[Notice] = field(default_factory=list)


Finish = Callable[[Choice], None]


class Answering:
    """Streams the answers to one API request: choice i of request r has the index r * n + i.

    Both modes of every endpoint read ``events``; leaving it early cancels what is open.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model_name: str,
        requests: Sequence[GenerationRequest],
        make_reply: Callable[[], Reply],
        metrics: ServerMetrics,
        on_finish: Finish = lambda choice: None,
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._requests = tuple(requests)
        self._metrics = metrics
        self._on_finish = on_finish
        self.choices = [
            Choice(request, sample, ChatEventMaker(len(request.prompt_token_ids), sample), make_reply())
            for request in requests
            for sample in range(request.num_samples)
        ]
        self.prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        self._cancel_sent: set[str] = set()
        self._start = time.monotonic()
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}

    def cancel(self) -> None:
        """Ends the answers within a step; their events then end too."""
        for request in self._requests:
            self._engine.cancel(request.request_id)

    async def events(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        """(index of the choice, event), to the Finished of every choice. Raises what ``submit`` raises."""
        streams: list[TokenStream] = []
        left = "cancelled"
        try:
            for request in self._requests:
                try:
                    streams.append(self._engine.submit(request))
                except EdgeLLMError:
                    left = "engine"
                    raise
            async for number, event in _merged(streams):
                for found in self._take(number, event):
                    yield found
        finally:
            for stream in streams:
                await stream.aclose()
            if any(choice.finished is None for choice in self.choices):
                self._metrics.ended(left, time.monotonic() - self._start)

    def _take(self, number: int, event: TokenEvent) -> list[tuple[int, ChatEvent]]:
        """What an event of the engine tells the reader."""
        self.prompt_logprobs[number].extend(event.prompt_logprobs)
        request = self._requests[number]
        index = number * request.num_samples + event.sample
        choice = self.choices[index]
        if choice.finished is not None:
            return []
        told: list[ChatEvent] = []
        if event.queue_position is not None and event.prefill_done is None and not event.token_ids:
            told.append(Queued(event.queue_position))
        self._time(index, len(event.token_ids))
        for made in choice.maker.push(event):
            if isinstance(made, Finished):
                told += self._finish(choice, made)
            elif isinstance(made, Delta):
                told += choice.reply.push(made)
            elif isinstance(made, NoticeEvent):
                self._note(choice, made.notice)
                told.append(made)
            elif not isinstance(made, Prefill) or event.sample == 0:
                told.append(made)
        if choice.reply.stopped and choice.finished is None:
            self._cancel_stopped(number)
        return [(index, one) for one in told]

    def _finish(self, choice: Choice, finished: Finished) -> list[ChatEvent]:
        told: list[ChatEvent] = []
        reason = finished.reason
        cut = reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        told += choice.reply.finish(cut=cut and not choice.reply.stopped)
        if choice.reply.stopped and reason is not FinishReason.ERROR:
            reason = FinishReason.STOP
        if choice.reply.num_calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        for notice in _reply_notices(choice.reply):
            self._note(choice, notice)
            told.append(NoticeEvent(notice))
        choice.finished = replace(finished, reason=reason)
        told.append(choice.finished)
        self._metrics.used(finished.usage, with_prompt=choice.sample == 0)
        log_answer(self._model_name, reason, finished.usage, finished.timings)
        self._on_finish(choice)
        if all(other.finished is not None for other in self.choices):
            self._metrics.ended(self._ended_by(), time.monotonic() - self._start)
        return told

    def _ended_by(self) -> str:
        """Why the request is over, by the worst of its answers."""
        reasons = {choice.finished.reason for choice in self.choices if choice.finished is not None}
        if FinishReason.ERROR in reasons:
            errors = [choice.finished.error or "" for choice in self.choices if choice.finished is not None]
            return "no_memory" if any(is_out_of_memory(error) for error in errors) else "engine"
        if any(choice.timed_out for choice in self.choices):
            return "timeout"
        for reason in (FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.TOOL_CALLS):
            if reason in reasons:
                return str(reason.value)
        return "stop"

    def _cancel_stopped(self, number: int) -> None:
        """Ends a request of which no answer is still wanted; its last events bring usage and timings."""
        request = self._requests[number]
        own = [choice for choice in self.choices if choice.request is request]
        done = all(choice.reply.stopped or choice.finished is not None for choice in own)
        if done and request.request_id not in self._cancel_sent:
            self._cancel_sent.add(request.request_id)
            self._engine.cancel(request.request_id)

    def _note(self, choice: Choice, notice: Notice) -> None:
        log_notice(notice)
        choice.notices.append(notice)
        self._metrics.notices[notice.kind] += 1
        if notice.kind == "deadline":
            choice.timed_out = True

    def _time(self, index: int, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if index not in self._first_at:
            self._first_at[index] = now
            if index == 0:
                self._metrics.ttft.observe(now - self._start)
        else:
            self._metrics.interval.observe((now - self._last_at[index]) / tokens, tokens)
        self._last_at[index] = now


def is_out_of_memory(error: str) -> bool:
    """Whether the scheduler gave an answer up for want of KV memory (scheduler/wording.py)."""
    return error.startswith("the KV cache is too small")


def _reply_notices(reply: Reply) -> list[Notice]:
    notices = []
    if reply.malformed_calls:
        notices.append(
            Notice(
                "malformed_tool_call",
                f"{reply.malformed_calls} calls of tools cannot be read; their text is in the content",
            )
        )
    if reply.dropped_calls:
        notices.append(
            Notice(
                "tool_calls_dropped",
                f"{reply.dropped_calls} further tool calls were left out: parallel_tool_calls is false",
            )
        )
    return notices


async def _merged(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """The events of all streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TokenEvent | None]] = asyncio.Queue(MERGED_EVENTS)

    async def pump(number: int, stream: TokenStream) -> None:
        async for event in stream:
            await queue.put((number, event))
        await queue.put((number, None))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, found = await queue.get()
            if found is None:
                left -= 1
            else:
                yield number, found
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
