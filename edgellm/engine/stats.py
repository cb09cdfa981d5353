"""Counts what the engine did and writes EngineStats once per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from edgellm.contracts import DraftCounts, DrafterStats, EngineStats

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
        # What the steps in it add up to: a fast engine has hundreds in a window, and asks after each.
        self._prefill_tokens = self._decode_tokens = 0

    def record(self, start: float, end: float, prefill_tokens: int, decode_tokens: int) -> None:
        """One step, in monotonic seconds, and the tokens that it ran or committed."""
        self._work.append(_Work(start, end, prefill_tokens, decode_tokens))
        self._prefill_tokens += prefill_tokens
        self._decode_tokens += decode_tokens

    def snapshot(
        self,
        now: float,
        waiting: int,
        running: int,
        kv_blocks: Mapping[str, int],
        *,
        prefix_hit_rate: float = 0.0,
        kv_waste: float = 0.0,
        draft: DraftCounts | None = None,
        draft_state: str = "off",
        drafters: tuple[DrafterStats, ...] = (),
        evicted_tokens: Mapping[str, int] | None = None,
    ) -> EngineStats:
        """The stats at ``now``. A step counts when it ended within the last second."""
        while self._work and self._work[0].end <= now - WINDOW_S:
            gone = self._work.popleft()
            self._prefill_tokens -= gone.prefill_tokens
            self._decode_tokens -= gone.decode_tokens
        prefill = (w.start for w in self._work if w.prefill_tokens)
        decode = (w.start for w in self._work if w.decode_tokens)
        return replace(
            self._base,
            time=now,
            waiting=waiting,
            running=running,
            kv_blocks=dict(kv_blocks),
            kv_waste=kv_waste,
            prefix_hit_rate=prefix_hit_rate,
            draft=draft or DraftCounts(),
            draft_state=draft_state,
            drafters=drafters,
            evicted_tokens=dict(evicted_tokens or {}),
            prefill_tokens_per_s=self._rate(now, self._prefill_tokens, prefill),
            decode_tokens_per_s=self._rate(now, self._decode_tokens, decode),
        )

    @staticmethod
    def _rate(now: float, tokens: int, starts: Iterator[float]) -> float:
        """Tokens over the time since the start of the first step of the window that brought some."""
        if tokens == 0:
            return 0.0
        span = now - next(starts)
        return tokens / span if span > 0 else 0.0


def as_of(stats: EngineStats, now: float) -> EngineStats:
    """Stats read at ``now``: an engine that has not stepped for a second has no rate."""
    if now - stats.time <= WINDOW_S or stats.running:
        return stats
    return replace(stats, prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0)
