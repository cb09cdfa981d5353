"""Server-sent events, and requests that end when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from edgellm.server.api_errors import to_json
from edgellm.server.gate import Receive, Scope, Send

PING_S = 15.0
"""A comment goes out when nothing else does for so long, so that nothing between takes the line for dead."""

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
    """An ASGI response: one event per item of ``events``, each sent at once.

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
        # One task for the whole stream: a timer around each wait would cost more than the event.
        pinging = asyncio.create_task(line.ping())
        try:
            async for data in self._events:
                await line.put(data)
        finally:
            await _end(pinging)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Line:
    """The body of a stream. What is sent comes whole, one after the other."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._sent_at = time.monotonic()

    async def put(self, data: bytes) -> None:
        async with self._turn:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = time.monotonic()

    async def ping(self) -> None:
        """Sends a comment whenever nothing else was sent for a while, until it is cancelled."""
        while True:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s >= PING_S:
                await self.put(b": ping\n\n")
            else:
                await asyncio.sleep(PING_S - quiet_s)


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
