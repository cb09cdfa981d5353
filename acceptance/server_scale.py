"""What one server carries: speed, first token and memory by streams, and /health beside 64 clients."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.harness import Figure
from acceptance.server_peer import MODEL, THREADS, ask_streams, processor_seconds, started
from tests.support.real_models import real_model
from tests.support.served import events_of

STREAMS = tuple(int(n) for n in os.environ.get("EDGELLM_TEST_SCALE_STREAMS", "1,2,4,8,16,32").split(","))
TOKENS = int(os.environ.get("EDGELLM_TEST_SERVER_TOKENS", "64"))
CONTEXT = 8192
CLIENTS = int(os.environ.get("EDGELLM_TEST_SCALE_CLIENTS", "64"))
CROWD_TOKENS = 24
POLLS_BELOW_S = 0.2
POLLER = """
import http.client, sys, time
host, _, port = sys.argv[1].removeprefix("http://").rpartition(":")
line = http.client.HTTPConnection(host, int(port), timeout=60)
while True:
    begin = time.monotonic()
    line.request("GET", "/health")
    answer = line.getresponse()
    answer.read()
    print(answer.status, time.monotonic() - begin, flush=True)
    time.sleep(0.02)
"""
"""A process of its own, so that what is measured is the server and not the clients beside it."""


def run() -> Iterator[Figure]:
    options = ["--port", "0", "--json", "--threads", str(THREADS), "--ctx", str(CONTEXT)]
    command = [sys.executable, "-m", "edgellm", "serve", str(real_model(MODEL)), *options]
    process, address = started(command, lambda line: json.loads(line)["address"])
    try:
        idle = _resident(process.pid)
        asyncio.run(ask_streams(address, "warm", 4, 2))
        for streams in STREAMS:
            before = processor_seconds(process.pid)
            speed, first = asyncio.run(ask_streams(address, f"of {streams}", TOKENS, streams))
            spent = 1000 * (processor_seconds(process.pid) - before) / (streams * TOKENS)
            yield Figure(
                f"{MODEL}, {THREADS} threads: {streams} streams of {TOKENS} tokens at once",
                speed,
                f"tok/s together; {first:.2f} s to the first token (median), {spent:.2f} s of processor per "
                f"1,000 tokens, {_resident(process.pid) / 1e6:.0f} MB (idle {idle / 1e6:.0f} MB)",
                "none",
                True,
                detail={"first_token_s": first, "processor_s": spent, "bytes": _resident(process.pid)},
            )
        yield from asyncio.run(_crowd(address))
    finally:
        process.terminate()
        process.wait(30)


async def _crowd(address: str) -> list[Figure]:
    """64 clients at once, half of them streams, most of which wait, while another process polls /health."""
    import httpx2

    limits = httpx2.Limits(max_connections=CLIENTS + 1)
    async with httpx2.AsyncClient(base_url=address, timeout=900, limits=limits) as client:
        questions = [f"Tell me about the number {n}." for n in range(8)]
        alone = [await _answer(client, question, stream=False) for question in questions]
        command = [sys.executable, "-c", POLLER, address]
        poller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            found = await asyncio.gather(
                *(_answer(client, questions[n % 8], stream=n % 2 == 0) for n in range(CLIENTS))
            )
            assert poller.poll() is None, "the polls ended before the answers"
        finally:
            poller.terminate()
            lines = poller.communicate(timeout=30)[0].splitlines()
    polls = [line.split(" ") for line in lines if line.count(" ") == 1]
    seconds = sorted(float(spent) for _, spent in polls)
    answered = bool(polls) and len(polls) == len(lines) and all(status == "200" for status, _ in polls)
    p50, p99 = (seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.99))
    wrong = sum(text != alone[n % 8] for n, text in enumerate(found))
    return [
        Figure(
            f"{MODEL}, {THREADS} threads: {CLIENTS} clients at once, half of them streams, greedy",
            wrong,
            "texts other than that of the same question alone",
            "0",
            not wrong,
        ),
        Figure(
            f"{MODEL}, {THREADS} threads: /health meanwhile, from another process, p99",
            1000 * p99,
            f"ms of {len(seconds)} polls (p50 {1000 * p50:.1f} ms, max {1000 * seconds[-1]:.1f} ms)",
            f"every poll answered, p99 under {1000 * POLLS_BELOW_S:.0f} ms",
            answered and p99 < POLLS_BELOW_S,
            detail={"p50_s": p50, "p99_s": p99, "max_s": seconds[-1], "polls": len(seconds)},
        ),
    ]


async def _answer(client: Any, question: str, *, stream: bool) -> str:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": CROWD_TOKENS,
        "temperature": 0,
        "stream": stream,
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    chunks = [event for event in events_of(response.text) if event != "[DONE]"]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
