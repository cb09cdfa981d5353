"""The engine in a thread of its own: submit and cancel from outside, events as async streams."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from edgellm.contracts import EngineStats, FinishReason, GenerationEngine, GenerationRequest, TokenEvent
from edgellm.engine.event_queue import EventQueue, wake
from edgellm.engine.stats import as_of
from edgellm_models.errors import EdgeLLMError, EngineError

if TYPE_CHECKING:
    from edgellm.engine.kv_exchange import KVExchange
    from edgellm.engine.saved_kv import SavedKV

_T = TypeVar("_T")

IDLE_AFTER_S = 3.0
"""Seconds without a request after which work begins that waits for such a moment."""


class SteppedEngine(GenerationEngine, Protocol):
    """What the thread needs of the synchronous engine."""

    stats: EngineStats

    def validate(self, request: GenerationRequest) -> None: ...


class TokenStream(AsyncIterator[TokenEvent]):
    """The events of one request, to be read in the loop that submitted it.

    Leaving it early (``aclose``, or dropping it) cancels the request.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, queue: EventQueue) -> None:
        self._engine = engine
        self._request_id = request_id
        self._events = queue
        self._done = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        event = None if self._done else await self._events.get()
        if event is None:
            self._done = True
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Cancels the request unless it has ended."""
        self._close()

    def _close(self) -> None:
        if not self._done:
            self._done = True
            self._engine.cancel(self._request_id)

    def __del__(self) -> None:
        self._close()


class AsyncEngine:
    """Owns the thread in which the engine steps: event loops never compute, the engine thread never
    awaits.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        name: str = "edgellm-engine",
        *,
        idle_work: Generator[None, None, None] | None = None,
        idle_after_s: float = IDLE_AFTER_S,
    ) -> None:
        """``idle_work`` runs in the engine's thread, part by part, once something was answered and whenever
        nothing has been asked for since ``idle_after_s``; a request waits for a part at most. What it raises
        is a fault of the engine."""
        self._engine = engine
        self._idle_work = idle_work
        self._idle_after_s = idle_after_s
        self._last_step: float | None = None
        # Reentrant: the garbage collector may drop a stream, and so cancel it, while this very thread holds
        # the lock.
        self._changed = threading.Condition(threading.RLock())
        self._commands: deque[Callable[[], None]] = deque()
        self._queues: dict[str, EventQueue] = {}
        self._samples: dict[str, set[int]] = {}
        """Samples that have not ended, by request."""
        self._calls: list[concurrent.futures.Future[Any]] = []
        """Those that somebody may still wait for."""
        self._asleep: list[EventQueue] = []
        """Readers to be woken. Woken right away they would want the interpreter lock while the next step is
        planned, which took 0.5 ms of every step; a working runner has let go of it."""
        self._wakes_late = hasattr(engine, "on_execute")
        if self._wakes_late:
            cast("Any", engine).on_execute = self._wake
        self._closing = False
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str | None:
        """Why the engine can serve no more, or None."""
        return self._fault

    def stats(self) -> EngineStats:
        """The newest stats; costs the engine nothing."""
        return as_of(self._engine.stats, time.monotonic())

    def validate(self, request: GenerationRequest) -> None:
        """BadInputError when the request cannot be served. A constraint may take seconds to compile the first
        time: an event loop lets a worker thread call this before it submits."""
        self._engine.validate(request)

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queues a request and returns its events. Call it in the event loop that will read them.

        Raises BadInputError when the request cannot be served and EngineError when the engine has failed or
        is closed.
        """
        self._engine.validate(request)
        queue = EventQueue(asyncio.get_running_loop(), request.num_samples)
        if not request.arrival_time:
            request = replace(request, arrival_time=time.monotonic())
        with self._changed:
            if self._fault is not None:
                raise EngineError(f"the engine has failed and serves no more: {self._fault}")
            if self._closing:
                raise EngineError("the engine is closed")
            if request.request_id in self._queues:
                raise EngineError(f"request {request.request_id!r} is open already")
            self._queues[request.request_id] = queue
            self._samples[request.request_id] = set(range(request.num_samples))
            self._commands.append(lambda: self._engine.submit(request))
            self._changed.notify()
        return TokenStream(self, request.request_id, queue)

    def cancel(self, request_id: str) -> None:
        """Ends a request within a step, from any thread; ids that are not open are ignored."""
        with self._changed:
            if request_id in self._queues:
                self._commands.append(lambda: self._engine.cancel(request_id))
                self._changed.notify()

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs something between two steps in the engine's thread and waits for it; what it raises is raised
        here and harms no request. Not from an event loop: a step may take a second."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            if self._fault is not None or self._closing:
                raise EngineError(f"the engine serves no more: {self._fault or 'it is closed'}")
            self._calls.append(future)
            self._commands.append(run)
            self._changed.notify()
        return future.result()

    def save_kv(
        self,
        path: Path,
        token_ids: Sequence[int] | None = None,
        *,
        conversation_id: str | None = None,
        answers: Sequence[tuple[str, Sequence[int]]] = (),
        salt: str = "",
    ) -> int:
        """Writes the KV of a text, or of a conversation's last request, to a file; how many tokens it holds.

        From any thread but an event loop's. BadInputError when nothing of it is in the cache, OutputError.
        """
        exchange = self._exchange()
        saved = self.call(lambda: exchange.snapshot(token_ids, conversation_id=conversation_id, salt=salt))
        exchange.write(path, saved, answers)
        return len(saved.token_ids)

    def load_kv(self, path: Path) -> SavedKV:
        """Puts the KV of a file into the prefix cache; what the file held. From any thread but an event
        loop's. BadInputError, one line, when the file is damaged or belongs to another model or setting."""
        exchange = self._exchange()
        saved = exchange.read(path)
        self.call(lambda: exchange.adopt(saved))
        return saved

    def _exchange(self) -> KVExchange:
        exchange = getattr(self._engine, "exchange", None)
        if exchange is None:
            raise EngineError("this engine keeps no KV that could be saved")
        return cast("KVExchange", exchange)

    def close(self) -> None:
        """Cancels what is open and waits for the thread. Must not be called by the engine's own thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    async def aclose(self) -> None:
        """``close`` without holding up the event loop for the rest of a step."""
        await asyncio.to_thread(self.close)

    # --- the engine thread ---

    def _run(self) -> None:
        try:
            while self._next_step():
                pass
        except BaseException as error:  # a fault of any kind must reach every reader
            self._fail(str(error) if isinstance(error, EdgeLLMError) else f"{type(error).__name__}: {error}")

    def _next_step(self) -> bool:
        """Carries out what was asked for and steps once; False when it is over."""
        with self._changed:
            while not (self._commands or self._closing or self._engine.has_work()):
                idle_s = self._until_idle()
                if idle_s is not None and idle_s <= 0.0:
                    break
                self._changed.wait(idle_s)
            commands = list(self._commands)
            self._commands.clear()
            self._calls = [call for call in self._calls if not call.done()]
            closing = self._closing
            if closing:
                for request_id in self._queues:
                    commands.append(partial(self._engine.cancel, request_id))
        for command in commands:
            command()
        if self._engine.has_work():
            events = self._engine.step()
            self._wake()  # where that step executed nothing
            self._deliver(events)
            self._last_step = time.monotonic()
        elif self._idle_work is not None and not (commands or closing):
            self._idle_work = _continued(self._idle_work)
        if not (self._wakes_late and self._engine.has_work()):
            self._wake()
        return not (closing and not self._engine.has_work())

    def _until_idle(self) -> float | None:
        """Seconds until the idle work goes on; None where there is none, or nothing was answered yet."""
        if self._idle_work is None or self._last_step is None:
            return None
        return self._last_step + self._idle_after_s - time.monotonic()

    def _wake(self) -> None:
        asleep, self._asleep = self._asleep, []
        wake(asleep)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Hands the events of a step to their readers, which are woken all at once."""
        gone: set[str] = set()
        for event in events:
            with self._changed:
                queue = self._queues.get(event.request_id)
                if queue is None:
                    continue
                if event.finish_reason is not None:
                    samples = self._samples[event.request_id]
                    samples.discard(event.sample)
                    if not samples:
                        del self._queues[event.request_id], self._samples[event.request_id]
            if queue.add(event):
                self._asleep.append(queue)
            if queue.reader_gone:
                gone.add(event.request_id)
        for request_id in gone:
            self.cancel(request_id)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._fault = reason
            queues, samples = dict(self._queues), dict(self._samples)
            self._queues.clear()
            self._samples.clear()
            self._commands.clear()
            calls, self._calls = self._calls, []
        self._wake()
        for call in calls:
            if not call.done():
                call.set_exception(EngineError(f"the engine has failed and serves no more: {reason}"))
        for request_id, queue in queues.items():
            for sample in sorted(samples[request_id]):
                queue.put(TokenEvent(request_id, sample, finish_reason=FinishReason.ERROR, error=reason))


def _continued(work: Generator[None, None, None]) -> Generator[None, None, None] | None:
    """Does the next part; None when it was the last."""
    try:
        next(work)
    except StopIteration:
        return None
    return work
