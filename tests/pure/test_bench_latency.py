"""Figures of a run from the times of its tokens, on a clock of our own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from edgellm.bench.latency import (
    BatchRow,
    Percentiles,
    Target,
    Timeline,
    batch_row,
    knee,
    parse_counts,
    parse_target,
    percentile,
    percentiles,
    smooth_up_to,
    steady_part,
)
from edgellm.bench.natural_text import natural_chat, natural_ids, natural_text
from edgellm.bench.workload import run_together
from edgellm.contracts import GenerationRequest, TokenEvent
from edgellm_models.errors import EngineError, UsageError


def test_percentiles_are_those_of_numpy() -> None:
    import numpy

    rng = random.Random(3)
    for count in (1, 2, 3, 10, 101, 1000):
        values = [rng.expovariate(2.0) for _ in range(count)]
        found = percentiles(values)
        expected = numpy.percentile(values, [50, 95, 99])
        assert [found.p50, found.p95, found.p99] == pytest.approx(expected.tolist(), rel=1e-12)
    assert percentile([], 0.5) == 0.0


def test_first_token_and_decode_rate_of_a_timeline() -> None:
    """The first token is the prefill's: 4 tokens in 1.5 s after it are 3 / 1.5 per second."""
    line = Timeline(10.0, (12.0, 12.5, 13.0, 13.5), 100)
    assert line.ttft_s == 2.0 and line.gaps == [0.5, 0.5, 0.5] and line.decode_tokens_per_s == 2.0
    assert Timeline(0.0, (1.0,), 5).decode_tokens_per_s == 0.0
    burst = Timeline(0.0, (1.0, 2.0, 2.0, 2.0, 3.0), 5)  # a verified draft
    assert burst.gaps == [1.0, 0.0, 0.0, 1.0]


def test_the_steady_part_leaves_out_what_waited_for_prompts() -> None:
    early = Timeline(0.0, (1.0, 4.0, 7.0, 7.1, 7.2, 7.3, 7.4), 10)  # slow beside the other's prompt
    late = Timeline(0.0, (7.0, 7.1, 7.2, 7.3, 7.4, 9.0), 10)
    steady = steady_part([early, late])
    assert steady.tokens == 8 and steady.seconds == pytest.approx(0.4)
    assert steady.tokens_per_s == pytest.approx(20.0)
    assert steady.gaps == pytest.approx([0.1] * 8)
    row = batch_row(2, [[early, late]])
    assert row.longest_gap_s == pytest.approx(3.0) and row.ttft_s.p50 == 4.0
    assert row.tokens_per_s_each == pytest.approx(10.0)


def row(batch: int, total: float, p95: float, ttft: float = 0.1) -> BatchRow:
    return BatchRow(
        batch, total, total / batch, Percentiles(p95, p95, p95), Percentiles(ttft, ttft, ttft), p95
    )


def test_the_knee_is_where_more_throughput_costs_more_waiting() -> None:
    rows = [row(1, 10, 0.1), row(2, 19, 0.105), row(4, 36, 0.11), row(8, 50, 0.16), row(16, 55, 0.29)]
    assert knee(rows) == 4
    assert knee([row(1, 0, 0.0)]) is None and knee([]) is None


def test_a_chat_is_smooth_up_to_the_first_batch_that_misses() -> None:
    rows = [row(1, 40, 0.025), row(2, 70, 0.03), row(4, 90, 0.045, ttft=0.9), row(8, 200, 0.04, ttft=1.2)]
    assert smooth_up_to(rows, Target(1.0, 20.0)) == 4
    assert smooth_up_to(rows, Target(None, 20.0)) == 8
    assert smooth_up_to(rows, Target(1.0, 30.0)) == 2
    assert smooth_up_to(rows, Target(0.05, None)) == 0
    # A larger batch that happens to meet the target does not count behind one that misses it.
    assert smooth_up_to([row(1, 40, 0.02), row(2, 40, 0.06), row(4, 100, 0.04)], Target(None, 20.0)) == 1


def test_targets_and_counts_are_read_or_refused() -> None:
    assert parse_target("ttft=1,tps=20") == Target(1.0, 20.0)
    assert parse_target(" tps=5 ") == Target(None, 5.0)
    for bad in ("", "ttft", "ttft=0", "tps=nan", "tps=inf", "ttft=1,ttft=2", "speed=3", "ttft=-1"):
        with pytest.raises(UsageError, match="--slo takes ttft=SECONDS"):
            parse_target(bad)
    assert parse_counts("4,1,2,2", "--batch", 16) == (1, 2, 4)
    for bad in ("", "0", "1,x", "17", "-1", "1.5"):
        with pytest.raises(UsageError, match="--batch takes numbers from 1 to 16"):
            parse_counts(bad, "--batch", 16)


@dataclass
class ClockedEngine:
    """Every step takes a second: prompts are read one per step, then each open answer gets a token."""

    tokens: int = 10**9
    context_length: int = 1000
    now: float = 0.0
    waiting: list[GenerationRequest] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, request: GenerationRequest) -> None:
        self.waiting.append(request)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[TokenEvent]:
        self.now += 1.0
        for request_id in self.cancelled:
            self.running.pop(request_id, None)
        if self.waiting:
            self.running[self.waiting.pop(0).request_id] = 0
        events = []
        for request_id, count in list(self.running.items()):
            events.append(TokenEvent(request_id, token_ids=(7,)))
            self.running[request_id] += 1
            if count + 1 == self.tokens:
                del self.running[request_id]
        return events


def run(engine: ClockedEngine, requests: int, new_tokens: int, **more: Any) -> list[Timeline]:
    prompts: Sequence[Sequence[int]] = [[1, 2, 3]] * requests
    return run_together(engine, prompts, new_tokens, clock=lambda: engine.now, **more)


def test_answers_that_began_first_go_on_until_the_last_has_its_tokens() -> None:
    lines = run(ClockedEngine(), 3, 4, extra_tokens=10)
    assert [line.ttft_s for line in lines] == [1.0, 2.0, 3.0]
    assert [line.token_times[-1] for line in lines] == [6.0, 6.0, 6.0]
    steady = steady_part(lines)
    assert (steady.tokens, steady.seconds, steady.tokens_per_s) == (9, 3.0, 3.0)


def test_an_answer_that_ends_short_is_an_error() -> None:
    with pytest.raises(EngineError, match="ended after 2 of 4 tokens"):
        run(ClockedEngine(tokens=2), 1, 4)


def test_natural_text_is_the_same_each_time_and_prompts_differ() -> None:
    def encode(text: str) -> list[int]:
        return [1, *text.encode()]

    for kind in ("prose", "code", "chat"):
        assert len(natural_text(kind)) > 20_000
        first, again = natural_ids(encode, kind, 300, 5), natural_ids(encode, kind, 300, 5)
        assert first == again and len(first) == 300
        others = {natural_ids(encode, kind, 300, number)[:40] for number in range(20)}
        assert len(others) == 20
    assert len(natural_ids(encode, "chat", 200_000, 1)) == 200_000  # longer than the text itself
    roles = [role for role, _ in natural_chat(10)]
    assert set(roles[::2]) == {"user"} and set(roles[1::2]) == {"assistant"}
