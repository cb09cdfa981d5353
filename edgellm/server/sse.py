"""Server-sent events, and requests that end when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from edgellm.server.api_errors import to_json
from edgellm.server.gate import Receive, Scope, Send

PING_S = 15.0
"""A comment goes out when nothing else does for so long, so that nothing between takes the line for dead."""
WRITE_INTERVAL_S = 0.025
"""Events that follow each other faster share a write, which wakes the client: with one per token, writes were
two fifths of the work of the server's own thread. People see no difference at 40 a second."""
MAX_HELD_BYTES = 1 << 16

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled as soon as the client leaves. ClientGoneError then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _end(task, watcher)


class EventStream:
    """An ASGI response of one event per item of ``events``. The first is sent at once, and so is what comes
    ``WRITE_INTERVAL_S`` or more after the last write; no event waits longer than that.

    ``events`` is closed, whatever happens, and ``on_close`` is awaited after it.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], Awaitable[Any]]) -> None:
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError, OSError):
                await until_client_leaves(receive, self._write(send))
        finally:
            await self._on_close()

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        line = _Line(send)
        # Tasks for the whole stream: a timer around each wait would cost more than the event.
        beside = asyncio.create_task(line.ping()), asyncio.create_task(line.write_held())
        try:
            async for data in self._events:
                await line.put(data)
        finally:
            await _end(*beside)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await line.flush()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Line:
    """The body of a stream. Events come whole and in order, those of one interval in one write."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._sent_at: float | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Sends ``data`` or holds it to the end of the interval; waits while the client reads too slowly."""
        self._held.append(data)
        self._held_bytes += len(data)
        now = self._loop.time()
        is_first = self._sent_at is None
        if is_first or self._quiet_s() >= WRITE_INTERVAL_S or self._held_bytes > MAX_HELD_BYTES:
            await self.flush()
        elif self._timer is None:
            # All streams of a loop are due together: their writes share its waking.
            when = (now // WRITE_INTERVAL_S + 1) * WRITE_INTERVAL_S
            self._timer = self._loop.call_at(when, self._due.set)

    async def flush(self) -> None:
        """Sends what is held."""
        async with self._turn:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._held:
                data = b"".join(self._held)
                self._held.clear()
                self._held_bytes = 0
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
                self._sent_at = self._loop.time()

    async def write_held(self) -> None:
        """Flushes at the ends of intervals, until it is cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.flush()

    async def ping(self) -> None:
        """Sends a comment whenever nothing else was sent for a while, until it is cancelled."""
        while True:
            quiet_s = self._quiet_s()
            if quiet_s >= PING_S:
                await self.put(b": ping\n\n")
                await self.flush()
            else:
                await asyncio.sleep(PING_S - quiet_s)

    def _quiet_s(self) -> float:
        """Since the last write, or since the stream began."""
        return self._loop.time() - (self._begun_at if self._sent_at is None else self._sent_at)


def event(value: Any, name: str | None = None) -> bytes:
    """One event with a JSON value; line ends inside are escaped by JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
