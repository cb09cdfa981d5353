"""A server under many clients for long: texts right, polls answered, memory flat, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.harness import Figure
from tests.support.bigram import make_bigram
from tests.support.served import Running, events_of, http, loaded_model, serving

REQUESTS = int(os.environ.get("EDGELLM_TEST_SOAK_REQUESTS", "10000"))
EARLY = REQUESTS // 10
DEPARTURES = int(os.environ.get("EDGELLM_TEST_SOAK_DEPARTURES", "1000"))
CLIENTS = 64
STARTS = 16
SETTLE_S = 120


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        # A start is one word of letters, which is one token wherever it stands alone.
        starts = ["q" + "abcdefghijklmnop"[i] for i in range(STARTS)]
        chains = [[start, *(f"{start}{j} " for j in range(8))] for start in starts]
        model = make_bigram(
            Path(folder) / "m",
            ["none"],
            more_chains=chains,
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
            encodable=True,
        )
        with serving(lambda: loaded_model(model, kernels="torch"), queue=1000) as running:
            yield from _many(running, chains)
            yield _departures(running)


def _many(running: Running, chains: list[list[str]]) -> Iterator[Figure]:
    memory: dict[int, int] = {}
    slowest: list[float] = []
    wrong: list[str] = []
    done = 0

    async def main() -> None:
        nonlocal done
        import httpx2

        limits = httpx2.Limits(max_connections=CLIENTS + 2)
        async with httpx2.AsyncClient(base_url=running.address, timeout=60, limits=limits) as client:

            async def ask(worker: int) -> None:
                nonlocal done
                while done < REQUESTS:
                    done += 1
                    number = done
                    chain = chains[(worker + number) % STARTS]
                    stream = number % 2 == 0
                    body = {
                        "messages": [{"role": "user", "content": chain[0]}],
                        "temperature": 0,
                        "stream": stream,
                    }
                    response = await client.post("/v1/chat/completions", json=body)
                    text = _text(response, stream)
                    if text != "".join(chain[1:]):
                        wrong.append(f"{response.status_code} {text[:100]!r}")
                    if number in (EARLY, REQUESTS):
                        memory[number] = _resident()

            async def poll() -> None:
                while done < REQUESTS:
                    begin = time.monotonic()
                    response = await client.get("/health")
                    slowest.append(time.monotonic() - begin)
                    assert response.status_code == 200
                    await asyncio.sleep(0.05)

            await asyncio.gather(poll(), *(ask(worker) for worker in range(CLIENTS)))

    asyncio.run(main())
    yield Figure(
        f"{REQUESTS} answers to {CLIENTS} clients, half of them streams",
        len(wrong),
        "wrong ones",
        "0",
        not wrong,
        detail={"examples": wrong[:3]},
    )
    growth = memory[REQUESTS] / memory[EARLY] - 1
    yield Figure(
        f"resident memory after request {REQUESTS} beside that after {EARLY}",
        100 * growth,
        f"% more ({memory[REQUESTS] / 1e6:.0f} MB; server and clients in one process)",
        "at most 2",
        growth <= 0.02,
    )
    slowest.sort()
    yield Figure(
        "answers of /health meanwhile, slowest",
        1000 * slowest[-1],
        f"ms of {len(slowest)} polls (median {1000 * slowest[len(slowest) // 2]:.0f} ms)",
        "none",
        True,
    )


def _text(response: Any, stream: bool) -> str:
    if response.status_code != 200:
        return str(response.text)
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    chunks = [event for event in events_of(response.text) if event != "[DONE]"]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def _departures(running: Running) -> Figure:
    rng = random.Random(0)
    port = int(running.address.rpartition(":")[2])
    template = (
        b'{"messages":[{"role":"user","content":"%s"}],"ignore_eos":true,"stream":%s,"max_tokens":2000}'
    )

    async def leave(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = template % (b"x" * rng.randint(1, 800), b"true" if number % 2 else b"false")
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        writer.write(data if number % 10 else data[: rng.randint(1, len(data))])
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.5)
        writer.transport.abort()

    async def main() -> None:
        for _ in range(DEPARTURES // 50):
            await asyncio.gather(*(leave(number) for number in range(50)))

    core, engine = running.scripted.core, running.scripted.model.engine
    watch = _Cancels(core, engine)
    asyncio.run(main())
    end = time.monotonic() + SETTLE_S
    with http(running.address) as client:
        while True:  # what the clients sent is still on its way in when the last of them has left
            status = client.get("/v1/edge/status").json()
            counts = engine.stats().kv_blocks
            used = counts["used"] + counts["shared"] + status["open_requests"]
            if (not used and not engine.call(core.has_work)) or time.monotonic() > end:
                break
            time.sleep(0.1)
    engine.call(core.check_integrity)
    return Figure(
        f"{DEPARTURES} clients that left at random moments",
        used,
        f"blocks or requests left; {watch.late} of {watch.seen} cancelled requests held some after two steps",
        "0 and 0",
        not used and not watch.late,
    )


class _Cancels:
    """Counts the steps from a cancel to the end of its request."""

    def __init__(self, core: Any, engine: Any) -> None:
        self.seen = self.late = 0
        self._steps = 0
        self._pending: dict[str, int] = {}
        self._core, self._step, self._cancel = core, core.step, engine.cancel
        core.step, engine.cancel = self._stepped, self._cancelled

    def _cancelled(self, request_id: str) -> None:
        self._pending.setdefault(request_id, self._steps)
        self._cancel(request_id)

    def _stepped(self) -> Any:
        events = self._step()
        self._steps += 1
        for request_id, at in list(self._pending.items()):
            ended = request_id not in self._core._open
            if ended or self._steps - at >= 2:  # the step under way, and the one behind it
                del self._pending[request_id]
                self.seen += 1
                self.late += not ended
        return events


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
