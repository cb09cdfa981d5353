"""Random traffic with aborts for SOAK_MINUTES (60): memory and tables do not grow, the pool comes back."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from acceptance.engines import load, tokens
from acceptance.harness import Figure
from edgellm.contracts import GenerationRequest, SamplingParams

MODEL = "smollm2-135m"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run() -> Iterator[Figure]:
    minutes = float(os.environ.get("SOAK_MINUTES", "60"))
    rng = random.Random(5)
    runtime = load(MODEL, ctx=2048)
    text = tokens(runtime, 20_000)
    core, kv = runtime.core, runtime.core._kv
    for group in runtime.runner._kv.storages:  # type: ignore[union-attr]
        for part in group.pages():
            part.zero_()  # every page is paid for before the first measurement
    open_ids: set[str] = set()
    sent = aborted = 0
    tables: list[int] = []
    memory: list[int] = []
    start = last = time.monotonic()
    while time.monotonic() - start < 60 * minutes:
        while len(open_ids) < 12:
            begin, length = rng.randrange(0, 10_000, 500), rng.choice((5, 40, 200, 600))
            sampling = SamplingParams(temperature=rng.choice((0.0, 0.8)), max_new_tokens=rng.randint(1, 60))
            sent += 1
            name = str(sent)
            core.submit(
                GenerationRequest(
                    name,
                    text[begin : begin + length],
                    sampling,
                    num_samples=rng.choice((1, 1, 2)),
                    priority=rng.choice((0, 5)),
                    conversation_id=str(begin),
                )
            )
            open_ids.add(name)
        if rng.random() < 0.1:
            aborted += 1
            core.cancel(rng.choice(sorted(open_ids)))
        ended: dict[str, int] = {}
        for event in core.step():
            assert event.error is None, event.error
            if event.finish_reason:
                ended[event.request_id] = 1
        open_ids = {name for name in open_ids if name in core._open}
        now = time.monotonic()
        if now - last > 60 * minutes / 20:
            last = now
            core.check_integrity()
            memory.append(resident_bytes())
            tables.append(len(kv.index._nodes) + len(kv._searches) + len(kv._divergences))
    for name in open_ids:
        core.cancel(name)
    while core.has_work():
        core.step()
    core.check_integrity()
    counts = kv.counts()
    total = sum(pool.num_blocks for pool in kv.pools)
    runtime.close()
    middle = memory[len(memory) // 4 : len(memory) // 2]
    growth = max(memory[-3:]) / max(middle) - 1
    blocks = sum(pool.num_blocks for pool in kv.pools)
    yield Figure(
        name=f"{MODEL}: growth of resident memory over {minutes:g} minutes",
        value=100 * growth,
        unit=f"% from the second quarter to the end; {sent} requests, {aborted} aborts",
        promise="none: at most 2 %, every block free at the end, no table larger than the pool",
        met=growth <= 0.02 and counts["free"] + counts["cached"] == total and max(tables) <= blocks + 100,
        detail={"memory_mb": [m // 2**20 for m in memory], "tables": tables},
    )
