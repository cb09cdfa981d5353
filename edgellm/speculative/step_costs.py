"""What steps of so many token rows take, from the engine's own step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

NUM_TIMES = 9
"""Steps of one size whose median counts: one slow step means nothing, a slower machine soon does."""
ROW_SHARE = 0.15
"""Until it was measured, a further row is taken to cost this share of a step of one row."""


class StepCosts:
    """Seconds of decode steps by token rows."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._expected: dict[int, float] = {}

    def expect(self, ratios: Mapping[int, float]) -> None:
        """What steps of so many rows take over one of one row, until they were measured."""
        self._expected = {rows: max(1.0, ratio) for rows, ratio in ratios.items() if rows > 1}
        self._fill()

    def _fill(self) -> None:
        if not self._times:
            return
        first = min(self._times)
        points = sorted({1: 1.0, **self._expected}.items())
        below = [point for point in points if point[0] <= first]
        above = [point for point in points if point[0] > first]
        (low, start), (high, end) = below[-1], (above or below[-1:])[0]
        base = start + (end - start) * (first - low) / max(1, high - low)
        for rows, ratio in self._expected.items():
            if rows > first and rows not in self._times:
                self._medians[rows] = ratio / base * self._medians[first]

    def record(self, rows: int, seconds: float) -> None:
        """A step that ran nothing but ``rows`` decode and drafted tokens."""
        times = self._times.setdefault(rows, deque(maxlen=NUM_TIMES))
        times.append(seconds)
        self._medians[rows] = _median(times)
        if self._expected and rows == min(self._times):
            self._fill()

    @property
    def is_known(self) -> bool:
        return bool(self._medians)

    def seconds(self, rows: int) -> float:
        """What a step of so many rows takes; at least what the nearest smaller one took. Something was
        recorded.

        Between two sizes that were measured it is what the smaller ones let expect, where that is less than
        what lies on a line to the larger one: kernels work in groups of rows, and who believes the dearer
        never finds out.
        """
        return self._estimate(rows, hopeful=True)

    def _estimate(self, rows: int, *, hopeful: bool) -> float:
        known = self._medians.get(rows)
        below = [r for r in self._medians if r <= rows]
        least = max((self._medians[r] for r in below), default=0.0)
        if known is not None:
            return max(known, least)
        above = [r for r in self._medians if r > rows]
        if below and above:
            low, high = max(below), min(above)
            start, end = self._medians[low], self._medians[high]
            between = start + (end - start) * (rows - low) / (high - low)
            first = min(self._medians)
            if hopeful and low > first:
                slope = (start - self._medians[first]) / (low - first)
                between = min(between, start + max(0.0, slope) * (rows - low))
            return max(least, between)
        first = min(self._medians)
        if not below:
            return self._medians[first]
        last = max(below)
        slope = ROW_SHARE * self._medians[first] / (1 + ROW_SHARE * (first - 1))
        if last > first:
            slope = max(0.0, self._medians[last] - self._medians[first]) / (last - first)
        return least + slope * (rows - last)

    def worst(self, rows: int) -> float:
        """The same without hope, and with every row beyond those that were measured as dear as a whole step
        of one row."""
        largest = max(self._medians)
        if rows <= largest:
            return self._estimate(rows, hopeful=False)
        first = min(self._medians)
        return self.seconds(largest) + (rows - largest) * self._medians[first] / first

    def ratio(self, rows: int, plain_rows: int) -> float:
        """A step of ``rows`` over one of ``plain_rows``; at least 1."""
        plain = self.seconds(plain_rows)
        return max(1.0, self.seconds(rows) / plain) if plain > 0 else 1.0


def _median(values: Iterable[float]) -> float:
    """As statistics.median, which imports for milliseconds."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
