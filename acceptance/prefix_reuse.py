"""A prompt whose first 1,000 tokens a finished request had, against the same length cold."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from acceptance.engines import load, tokens, ttft_of
from acceptance.harness import Figure

MODEL = "smollm2-135m"
ROUNDS = 5


def run() -> Iterator[Figure]:
    runtime = load(MODEL, ctx=8192)
    ttft_of(runtime, tokens(runtime, 64))  # warm
    ratios = []
    for round_ in range(ROUNDS):
        prompt = tokens(runtime, 1016, 5000 * (round_ + 1))
        cold, none = ttft_of(runtime, prompt)
        hot, reused = ttft_of(runtime, (*prompt[:1008], *tokens(runtime, 8, 123 + round_)))
        assert none == 0 and reused == 1008
        ratios.append(hot / cold)
    runtime.close()
    yield Figure(
        name=f"{MODEL}: first token behind a known prefix of 1,008 tokens",
        value=statistics.median(ratios),
        unit="of the cold time",
        promise="under 0.1",
        met=statistics.median(ratios) < 0.1,
        detail={"ratios": ratios},
    )
