"""Counts what the engine did and writes EngineStats once per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgellm.contracts import EngineStats

WINDOW_S = 1.0
"""Rates are over the last second."""


@dataclass(frozen=True)
class _Work:
    start: float
    end: float
    prefill_tokens: int
    decode_tokens: int


class StatsRecorder:
    """Rates over a moving window. Written by the engine thread only; its results are immutable."""

    def __init__(
        self, *, weight_bytes: int = 0, kv_bytes: int = 0, device: str = "cpu", kernel_backend: str = "torch"
    ) -> None:
        self._base = EngineStats(
            weight_bytes=weight_bytes, kv_bytes=kv_bytes, device=device, kernel_backend=kernel_backend
        )
        self._work: deque[_Work] = deque()

    def record(self, start: float, end: float, prefill_tokens: int, decode_tokens: int) -> None:
        """One step, in monotonic seconds, and the tokens that it ran or committed."""
        self._work.append(_Work(start, end, prefill_tokens, decode_tokens))

    def snapshot(
        self,
        now: float,
        waiting: int,
        running: int,
        kv_blocks: Mapping[str, int],
        *,
        prefix_hit_rate: float = 0.0,
        kv_waste: float = 0.0,
    ) -> EngineStats:
        """The stats at ``now``. A step counts when it ended within the last second."""
        while self._work and self._work[0].end <= now - WINDOW_S:
            self._work.popleft()
        return replace(
            self._base,
            time=now,
            waiting=waiting,
            running=running,
            kv_blocks=dict(kv_blocks),
            kv_waste=kv_waste,
            prefix_hit_rate=prefix_hit_rate,
            prefill_tokens_per_s=self._rate(now, [(w.start, w.prefill_tokens) for w in self._work]),
            decode_tokens_per_s=self._rate(now, [(w.start, w.decode_tokens) for w in self._work]),
        )

    @staticmethod
    def _rate(now: float, work: list[tuple[float, int]]) -> float:
        """Tokens over the time since the start of the first step of the window that brought some."""
        counted = [(start, tokens) for start, tokens in work if tokens]
        if not counted:
            return 0.0
        span = now - counted[0][0]
        return sum(tokens for _, tokens in counted) / span if span > 0 else 0.0


def as_of(stats: EngineStats, now: float) -> EngineStats:
    """Stats read at ``now``: an engine that has not stepped for a second has no rate."""
    if now - stats.time <= WINDOW_S or stats.running:
        return stats
    return replace(stats, prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0)
