"""How many streams one server carries: speed, first token and memory, from one to more than run at once."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure
from acceptance.server_peer import MODEL, THREADS, ask_streams, processor_seconds, started
from tests.support.real_models import real_model

STREAMS = tuple(int(n) for n in os.environ.get("EDGELLM_TEST_SCALE_STREAMS", "1,2,4,8,16,32").split(","))
TOKENS = int(os.environ.get("EDGELLM_TEST_SERVER_TOKENS", "64"))
CONTEXT = 8192


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
    finally:
        process.terminate()
        process.wait(30)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
