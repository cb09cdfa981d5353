"""A long prompt beside four running answers: what it costs their rhythm, and what they cost its start."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from acceptance.engines import Timeline, load, percentile, tokens, ttft_of
from acceptance.harness import Figure

MODEL = "smollm2-135m"
PROMPT_TOKENS = 4000
BEFORE = 24
ROUNDS = 3


def run() -> Iterator[Figure]:
    runtime = load(MODEL, ctx=8192)
    ttft_of(runtime, tokens(runtime, 64))  # warm
    slower, longer, details = [], [], []
    for round_ in range(ROUNDS):
        begin = 10_000 * (round_ + 1)
        line = Timeline()
        for i in range(4):
            line.submit(runtime, str(i), tokens(runtime, 32, begin + 50 * i), 1000)
        while any(len(times) < BEFORE for times in line.came.values()):
            line.step(runtime)
        start = line.came["0"][8]
        line.submit(runtime, "long", tokens(runtime, PROMPT_TOKENS, begin + 300), 1)
        asked = line.submitted["long"]
        while "long" not in line.last:
            line.step(runtime)
        end = line.came["long"][0]
        ratios = []
        for i in range(4):
            before = statistics.median(line.gaps(str(i), start, asked))
            ratios.append(percentile(line.gaps(str(i), asked, end), 0.95) / before)
            runtime.core.cancel(str(i))
        line.run(runtime)
        # Another text of the same length: the prefix cache would answer for the same one.
        alone, _ = ttft_of(runtime, tokens(runtime, PROMPT_TOKENS, begin + 4900))
        slower.append(max(ratios))
        longer.append(line.ttft("long") / alone)
        details.append({"gap_ratios": ratios, "ttft_s": line.ttft("long"), "alone_s": alone})
    runtime.close()
    yield Figure(
        name=f"{MODEL}: p95 gap of four answers beside a prompt of {PROMPT_TOKENS} tokens",
        value=statistics.median(slower),
        unit="times their median gap before, the worst of the four",
        promise="at most 4",
        met=statistics.median(slower) <= 4,
        detail={"rounds": details},
    )
    yield Figure(
        name=f"{MODEL}: first token of that prompt beside the four",
        value=statistics.median(longer),
        unit="times its time alone",
        promise="at most 2",
        met=statistics.median(longer) <= 2,
        detail={"rounds": longer},
    )
