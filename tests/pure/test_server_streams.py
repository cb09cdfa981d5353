"""Streams as ASGI responses: what goes out when nothing comes, and when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edgellm.server import sse
from edgellm.server.sse import EventStream


class Client:
    """What a stream sends, and when its client leaves."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        self.closed: list[str] = []

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(0)  # as a full socket would
            self.bodies.append(message["body"])

    async def read(self, events: AsyncIterator[bytes]) -> None:
        async def closed() -> None:
            self.closed.append("stream")

        async with asyncio.timeout(20):
            await EventStream(events, closed)({}, self.receive, self.send)


def test_comments_go_out_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing between server and client takes the line for dead; events stay whole and in order."""
    monkeypatch.setattr(sse, "PING_S", 0.01)
    ping, first, second = b": ping\n\n", b"data: 1\n\n", b"data: 2\n\n"

    async def test() -> None:
        client = Client()

        async def events() -> AsyncIterator[bytes]:
            yield first
            while client.bodies.count(ping) < 3:
                await asyncio.sleep(0.001)
            yield second

        await client.read(events())
        assert [body for body in client.bodies if body != ping] == [first, second, b""]
        assert client.bodies[-1] == b"" and client.closed == ["stream"]
        assert len(asyncio.all_tasks()) == 1, "a task of the stream is left"

    asyncio.run(test())


def test_a_client_that_leaves_ends_the_events() -> None:
    async def test() -> None:
        client = Client()
        ended: list[str] = []

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
                client.left.set()
                await asyncio.sleep(60)
                yield b"data: 2\n\n"
            finally:
                ended.append("events")

        await client.read(events())
        assert client.bodies == [b"data: 1\n\n"]
        assert ended == ["events"] and client.closed == ["stream"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())
