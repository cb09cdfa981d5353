"""A chat restored from its file, reading it included, against the same turn from memory."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from acceptance.engines import Timeline, load, tokens, ttft_of
from acceptance.harness import Figure

MODEL = "smollm2-135m"
ROUNDS = 5
TURN = 48
"""Tokens of the next message."""


def run() -> Iterator[Figure]:
    runtime = load(MODEL, ctx=8192)
    fresh = load(MODEL, ctx=8192)
    for one in (runtime, fresh):
        ttft_of(one, tokens(one, 64))  # warm
    ratios, same, sizes = [], 0, []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(ROUNDS):
            history = tokens(runtime, 1024, 3000 * (round_ + 1))
            ttft_of(runtime, history)
            file = Path(folder) / f"{round_}.kv"
            exchange = runtime.core.exchange
            sizes.append(exchange.write(file, exchange.snapshot(history)))
            prompt = (*history, *tokens(runtime, TURN, 7 + 100 * round_))
            memory, reused = ttft_of(runtime, prompt)
            begin = time.monotonic()
            fresh.core.exchange.adopt(fresh.core.exchange.read(file))
            read_s = time.monotonic() - begin
            restored, again = ttft_of(fresh, prompt)
            assert reused == again == 1024
            ratios.append((read_s + restored) / memory)
            answers = []
            for one in (runtime, fresh):
                line = Timeline()
                line.submit(one, "text", prompt, 16)
                ids: list[int] = []
                while one.core.has_work():
                    for event in one.core.step():
                        ids += event.token_ids
                answers.append(ids)
            same += answers[0] == answers[1]
    runtime.close()
    fresh.close()
    yield Figure(
        name=f"{MODEL}: a chat of 1,024 tokens from its file, to the first token of the next answer",
        value=statistics.median(ratios),
        unit=f"times the same from memory; {same} of {ROUNDS} answers equal; file {sizes[0] / 1e6:.0f} MB",
        promise="at most 1.5, with the same text",
        met=statistics.median(ratios) <= 1.5 and same == ROUNDS,
        detail={"ratios": ratios},
    )
