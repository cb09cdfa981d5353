"""Sixteen requests that decode together beside one alone, on the torch kernels in f32."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from acceptance.engines import Timeline, load, tokens
from acceptance.harness import Figure, alternate
from edgellm.cli.runtime import Runtime

MODEL = "smollm2-135m"
STEPS = 24
PAIRS = 5


def tokens_per_s(runtime: Runtime, running: int, salt: int) -> float:
    """Tokens per second of all, while all of them decode."""
    line = Timeline()
    for i in range(running):
        line.submit(runtime, str(i), tokens(runtime, 16, 100 * (salt + i)), STEPS + running + 8)
    while not all(line.came.values()):
        line.step(runtime)
    ends = []
    for _ in range(STEPS):
        line.step(runtime)
        ends.append(max(times[-1] for times in line.came.values()))
    for name in line.came:
        runtime.core.cancel(name)
    line.run(runtime)
    # The median of the steps: a neighbour that takes the processor for one of them changes nothing.
    return running / statistics.median(b - a for a, b in itertools.pairwise(ends))


def run() -> Iterator[Figure]:
    runtime = load(MODEL, ctx=2048)
    tokens_per_s(runtime, 2, 0)  # warm
    salt = iter(range(1000))
    one, many, ratios = alternate(
        lambda: tokens_per_s(runtime, 1, next(salt)), lambda: tokens_per_s(runtime, 16, next(salt)), PAIRS
    )
    runtime.close()
    ratio = statistics.median(ratios)
    yield Figure(
        name=f"{MODEL}: 16 running requests against one, tokens per second",
        value=ratio,
        unit="times",
        promise="at least 5 on the torch kernels in f32",
        met=ratio >= 5,
        peer=f"one request alone: {one:.1f} tok/s; sixteen together: {many:.1f}",
        detail={"ratios": list(ratios)},
    )
