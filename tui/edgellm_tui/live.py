"""The live figures as docs define them, from counters that are polled: pure arithmetic, no widget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOW_S = 1.0
"""The rate "now" is of the tokens that were committed in the last second."""
SAMPLES = 120
"""Of the sparkline: half a minute at four a second."""
CONTEXT_WARNING = 0.75
CONTEXT_ALARM = 0.90

KV_STATES: tuple[tuple[str, str], ...] = (
    ("used", "█"),
    ("shared", "▓"),
    ("cached", "▒"),
    ("free", "·"),
    ("evicted", "×"),
)
"""State of a KV block and the character that stands for it, so that it can be told without colours."""


class RateWindow:
    """Tokens of the last second, whatever bursts they came in. Holds one entry per event of that second."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()
        self._count = 0
        self._began: float | None = None

    def add(self, time: float, tokens: int) -> None:
        if self._began is None:
            self._began = time
        self._events.append((time, tokens))
        self._count += tokens
        self._forget(time)

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - WINDOW_S:
            self._count -= self._events.popleft()[1]

    def rate(self, now: float) -> float | None:
        """Tokens per second; None before a whole second has passed since the first token."""
        self._forget(now)
        if self._began is None or now - self._began < WINDOW_S:
            return None
        return self._count / WINDOW_S


BURST_S = 0.001
"""What arrives within so short a time was read in one go: several steps that waited for a busy screen."""


class Intervals:
    """Seconds between tokens: a burst of k tokens counts as k with the k-th part of its interval each."""

    def __init__(self, size: int = 1024) -> None:
        self._before: float | None = None
        self._begin: float | None = None
        """Of the newest burst, whose interval began with the one before."""
        self._events: deque[tuple[float, int]] = deque(maxlen=size)

    def add(self, time: float, tokens: int) -> None:
        if self._begin is not None and time - self._begin < BURST_S:
            if self._before is not None:
                interval, earlier = self._events.pop()
                self._events.append((interval * earlier / (earlier + tokens), earlier + tokens))
            return
        if self._begin is not None:
            self._events.append(((time - self._begin) / tokens, tokens))
        self._before, self._begin = self._begin, time

    def percentile(self, share: float) -> float | None:
        """The smallest interval that ``share`` of the tokens do not exceed; None without any."""
        total = sum(tokens for _, tokens in self._events)
        if not total:
            return None
        needed, seen = math.ceil(share * total), 0
        for interval, tokens in sorted(self._events):
            seen += tokens
            if seen >= needed:
                return interval
        return None


@dataclass
class History:
    """The rate over the last half minute, one sample per poll."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, rate: float) -> None:
        self.samples.append(rate)

    def line(self, cells: int) -> str:
        """The newest samples as bars from 0 to the greatest of them, newest on the right."""
        bars = "▁▂▃▄▅▆▇█"
        shown = list(self.samples)[-cells:]
        top = max(shown, default=0.0)
        if top <= 0:
            return ("▁" * len(shown)).rjust(cells)
        return "".join(bars[min(7, int(sample / top * 7.999))] for sample in shown).rjust(cells)


def context_level(used: int, length: int) -> str:
    """ok, warning from 75% or alarm from 90% of the context."""
    share = used / length if length > 0 else 0.0
    if share >= CONTEXT_ALARM:
        return "alarm"
    return "warning" if share >= CONTEXT_WARNING else "ok"


def share_cells(counts: Sequence[int], cells: int) -> list[int]:
    """``cells`` dealt out in proportion to ``counts`` by largest remainder; whoever has any gets one."""
    total = sum(counts)
    if total <= 0 or cells <= 0:
        return [0] * len(counts)
    exact = [count * cells / total for count in counts]
    given = [max(math.floor(part), 1 if count else 0) for part, count in zip(exact, counts, strict=True)]
    while sum(given) < cells:
        most = max(range(len(counts)), key=lambda i: exact[i] - given[i])
        given[most] += 1
    while sum(given) > cells:
        some = [i for i in range(len(counts)) if given[i]]
        least = min(some, key=lambda i: (given[i] <= 1, exact[i] - given[i]))
        given[least] -= 1
    return given


def kv_cells(blocks: Mapping[str, int], cells: int) -> list[tuple[str, str]]:
    """The map of KV blocks as runs of (state, characters), in the order of KV_STATES.

    Evicted ones are no blocks of the pool: they are those that open chats have lost. Fewer blocks than cells
    are shown one by one.
    """
    shared = max(0, blocks.get("shared", 0))  # a part of those in use
    apart = {**blocks, "used": blocks.get("used", 0) - shared}
    counts = [max(0, apart.get(state, 0)) for state, _ in KV_STATES]
    dealt = counts if sum(counts) <= cells else share_cells(counts, cells)
    return [(state, mark * n) for (state, mark), n in zip(KV_STATES, dealt, strict=True) if n]


def acceptance(accepted: int, proposed: int) -> float | None:
    """Share of the drafted tokens that were accepted; None when nothing was drafted."""
    return accepted / proposed if proposed > 0 else None


def tokens_per_step(accepted: int, steps: int) -> float | None:
    """Tokens that a verify step brings: the accepted ones and its own; None without a step."""
    return (accepted + steps) / steps if steps > 0 else None


def bytes_text(count: int) -> str:
    """1234567 as 1.2 MB (powers of ten, as on a disk)."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            value = count / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count} B"
