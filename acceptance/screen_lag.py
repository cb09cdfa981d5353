"""How late a fast stream makes the event loop of the chat screen, and what a token costs there."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator

from acceptance.harness import Figure, record
from edgellm_tui.app import EdgeChat
from tests.support.fake_backend import FakeBackend, Script

SAMPLE_S = 0.005
MARKDOWN = """## Part {n}

Some words about **part {n}**, with `code` and a [link](https://example.org), on and on for a line or two.

- the first point of {n}
- the second, *longer* one
  1. with a step below it

| name | value |
|---|---|
| part | {n} |

```python
def part_{n}(x: int) -> int:
    return x + {n}
```

"""


def pieces(count: int) -> list[str]:
    """``count`` tokens of four characters of mixed Markdown."""
    text = "".join(MARKDOWN.format(n=n) for n in range(count * 4 // 300 + 2))
    return [text[at : at + 4] for at in range(0, count * 4, 4)]


Measured = tuple[list[float], list[float], list[tuple[int, float]]]


async def stream(tokens: int, rate: float, size: tuple[int, int]) -> Measured:
    """Per sample of the loop the seconds by which it was late and those that this thread itself computed
    meanwhile (a busy machine adds to the former only), and (tokens so far, CPU seconds of this thread)."""
    backend = FakeBackend(Script(pieces=pieces(tokens), tokens_per_s=rate, burst=3))
    app = EdgeChat(backend)
    late: list[float] = []
    own: list[float] = []
    cost: list[tuple[int, float]] = []

    async def sample() -> None:
        while True:
            before, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(SAMPLE_S)
            late.append(time.perf_counter() - before - SAMPLE_S)
            own.append(time.thread_time() - busy)
            stream_now = app._chat._stream if app._chat is not None else None
            if stream_now is not None:
                cost.append((stream_now.progress.tokens, time.thread_time()))

    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 10, 100)
        screen = app._chat
        assert screen is not None
        screen._prompt.replace_text("Go")
        await pilot.press("enter")
        sampler = asyncio.create_task(sample())
        while screen.generating or not cost:
            await asyncio.sleep(0.1)
        sampler.cancel()
    return late, own, cost


def cost_between(cost: list[tuple[int, float]], first: int, last: int) -> float:
    """CPU seconds per token while the answer grew from ``first`` to ``last`` tokens."""
    inside = [(tokens, used) for tokens, used in cost if first <= tokens <= last]
    (begin, used_before), (end, used_after) = inside[0], inside[-1]
    return (used_after - used_before) / max(1, end - begin)


def figures(tokens: int = 20_000, rate: float = 300.0) -> Iterator[Figure]:
    late, own, cost = asyncio.run(stream(tokens, rate, (120, 40)))
    p99 = statistics.quantiles(late, n=100)[98]
    own_p99 = statistics.quantiles(own, n=100)[98]
    early = cost_between(cost, tokens // 20, tokens // 20 + tokens // 10)
    end = cost_between(cost, tokens - tokens // 10, tokens)
    load = {
        "tokens": tokens,
        "rate": rate,
        "median_ms": statistics.median(late) * 1000,
        "max_ms": max(late) * 1000,
        "load": os.getloadavg()[0],
    }
    name = "screen: event loop late, p99"
    yield Figure(name, round(p99 * 1000, 1), "ms", "under 50 ms", p99 < 0.05, detail=load)
    # What other processes do to a busy machine is not in this one.
    yield Figure(
        "screen: processor time of the screen between two turns of its loop, p99",
        round(own_p99 * 1000, 1), "ms", "under 50 ms", own_p99 < 0.05, detail={"max_ms": max(own) * 1000},
    )  # fmt: skip
    yield Figure(
        "screen: cost per token, end of the answer to its beginning",
        round(end / early, 2), "ratio", "under 2", end / early < 2,
        detail={"early_us": early * 1e6, "end_us": end * 1e6},
    )  # fmt: skip


def run() -> Iterator[Figure]:
    yield from figures()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=300.0)
    options = parser.parse_args()
    sys.exit(0 if record("screen_lag", figures(options.tokens, options.rate), keep=False) else 1)
