"""From the times of tokens to the figures of the field: percentiles, rates, the knee, targets. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_models.errors import UsageError


@dataclass(frozen=True)
class Timeline:
    """When one request's tokens came. Seconds of one monotonic clock."""

    arrival: float
    token_times: tuple[float, ...]
    """Of every answer token, in order; tokens of one step share a time."""
    prompt_tokens: int
    prefill_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Queue and prefill: the first token belongs to the prefill."""
        return self.token_times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Between each token and the one before it; 0 for tokens that one step brought together."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def decode_tokens_per_s(self) -> float:
        """(n - 1) / decode_s."""
        seconds = self.token_times[-1] - self.token_times[0]
        return (len(self.token_times) - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, between neighbours in proportion (as numpy has it).

    0 of no values.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.99))


@dataclass(frozen=True)
class Steady:
    """The stretch of a run in which every answer was going on: no prompt is read beside them."""

    tokens: int
    seconds: float
    gaps: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def steady_part(timelines: Sequence[Timeline]) -> Steady:
    """From the last first token to the first last token, with the tokens of all requests in between."""
    start = max(line.token_times[0] for line in timelines)
    end = min(line.token_times[-1] for line in timelines)
    tokens, gaps = 0, []
    for line in timelines:
        for before, at in zip(line.token_times, line.token_times[1:], strict=False):
            if start < at <= end:
                tokens += 1
                if before >= start:
                    gaps.append(at - before)
    return Steady(tokens, max(0.0, end - start), tuple(gaps))


@dataclass(frozen=True)
class BatchRow:
    """What so many requests at once bring."""

    batch: int
    total_tokens_per_s: float
    """Of all answers while all go on."""
    tokens_per_s_each: float
    inter_token_s: Percentiles
    """While all answers go on."""
    ttft_s: Percentiles
    longest_gap_s: float
    """Between two tokens of an answer at any time, so beside the prompts of others too."""
    cost_per_million_tokens: float | None = None


def batch_row(batch: int, runs: Sequence[Sequence[Timeline]]) -> BatchRow:
    """Rates are medians over runs, percentiles are over the gaps and requests of all runs."""
    steady = [steady_part(run) for run in runs]
    total = percentile([part.tokens_per_s for part in steady], 0.5)
    every = [line for run in runs for line in run]
    return BatchRow(
        batch,
        total,
        total / batch,
        percentiles([gap for part in steady for gap in part.gaps]),
        percentiles([line.ttft_s for line in every]),
        max((gap for line in every for gap in line.gaps), default=0.0),
    )


def knee(rows: Sequence[BatchRow]) -> int | None:
    """The batch of the most throughput per second of inter-token p95 (Kleinrock's power): beyond it waiting
    grows faster than what is gained. None without a measured gap."""
    usable = [row for row in rows if row.inter_token_s.p95 > 0]
    best = max(usable, key=lambda row: row.total_tokens_per_s / row.inter_token_s.p95, default=None)
    return None if best is None else best.batch


@dataclass(frozen=True)
class Target:
    """What a chat must feel like: seconds to the first token, tokens per second after it."""

    ttft_s: float | None
    tokens_per_s: float | None

    def is_met(self, row: BatchRow) -> bool:
        """By 95 of 100 requests and gaps."""
        if self.ttft_s is not None and row.ttft_s.p95 > self.ttft_s:
            return False
        return self.tokens_per_s is None or row.inter_token_s.p95 * self.tokens_per_s <= 1.0


def smooth_up_to(rows: Sequence[BatchRow], target: Target) -> int:
    """The largest batch up to which every measured one meets the target; 0 when the smallest does not."""
    largest = 0
    for row in sorted(rows, key=lambda row: row.batch):
        if not target.is_met(row):
            break
        largest = row.batch
    return largest


def parse_target(text: str) -> Target:
    """``ttft=1,tps=20``, either of them or both. UsageError says what was wrong."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in ("ttft", "tps") or name in values or not 0 < value < math.inf:
            raise UsageError(f"--slo takes ttft=SECONDS, tps=TOKENS_PER_S or both, not {text!r}")
        values[name] = value
    return Target(values.get("ttft"), values.get("tps"))


def parse_counts(text: str, option: str, largest: int) -> tuple[int, ...]:
    """``1,2,4`` as ascending numbers from 1 to ``largest``. UsageError names the option."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > largest:
        raise UsageError(f"{option} takes numbers from 1 to {largest:,} with commas between, not {text!r}")
    return tuple(counts)
