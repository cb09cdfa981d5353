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


def test_events_that_follow_fast_share_writes_and_none_waits_longer_than_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(interval: float, pauses: list[float]) -> tuple[list[bytes], list[float]]:
        monkeypatch.setattr(sse, "WRITE_INTERVAL_S", interval)
        client, written, sent = Client(), [], {}
        loop = asyncio.get_running_loop()
        send = client.send

        async def timed(message: Any) -> None:
            await send(message)
            for number in (int(line[6:]) for line in message.get("body", b"").split(b"\n\n") if line):
                written.append(loop.time() - sent[number])

        monkeypatch.setattr(client, "send", timed)

        async def events() -> AsyncIterator[bytes]:
            for number, pause in enumerate(pauses):
                sent[number] = loop.time()
                yield b"data: %d\n\n" % number
                await asyncio.sleep(pause)

        await client.read(events())
        return client.bodies, written

    slow = asyncio.run(test(1e-6, [0.002] * 5))[0]
    assert slow == [b"data: %d\n\n" % number for number in range(5)] + [b""]
    hurried, _ = asyncio.run(test(3600.0, [0.0] * 50))
    assert hurried[0] == b"data: 0\n\n" and len(hurried) == 3  # the first at once, the rest with the end
    assert b"".join(hurried) == b"".join(b"data: %d\n\n" % number for number in range(50))
    stalled, waits = asyncio.run(test(0.5, [0.0, 0.0, 5.0]))  # the last two wait for the interval, no longer
    assert stalled == [b"data: 0\n\n", b"data: 1\n\ndata: 2\n\n", b""] and max(waits) < 3


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(sse, "MAX_HELD_BYTES", 100)

    async def test() -> None:
        client = Client()

        async def events() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b"x" * 30

        await client.read(events())
        assert sum(map(len, client.bodies)) == 40 * 30 and max(map(len, client.bodies)) <= 130

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
