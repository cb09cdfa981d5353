"""Finds which sub-layers a drafting pass leaves out: measured costs and match in, the best set of all out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgellm.speculative.drafter import MAX_DRAFT
from edgellm_models.network.sub_layers import SkippedSubLayers

ARM_GAIN = 1.05
"""Predicted tokens per time, over plain decoding, below which nothing is skipped."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Of all sub-layers that may be skipped: the sizes of the first sets that are measured."""
STOPS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
"""Confidences below which a draft may end."""
NEXT = 4
"""Sub-layers that are tried one by one as the next to join or to leave a set."""
BEAM = 2
STRIDE = 7
HOPELESS = 0.95
"""Sets that are predicted slower than this are not refined: one sub-layer more or less will not do it."""

SubLayer = tuple[str, int]
"""("attention" or "feed_forward", layer)"""


@dataclass(frozen=True)
class Score:
    """How a drafting pass did in the place of every token of a text, the model's own KV before it."""

    hits: tuple[bool, ...]
    """Whether its likeliest token was the model's."""
    confidences: tuple[float, ...]
    """The probability that it gave that token."""
    loss: float
    """Mean divergence KL(model || pass) per token, which tells sets apart that miss nothing yet."""

    @property
    def match(self) -> float:
        return sum(self.hits) / len(self.hits)


@dataclass(frozen=True)
class Costs:
    """Measured, over a decode step of one row."""

    attention: float
    """Of the attention of one layer."""
    feed_forward: float
    verify: Mapping[int, float]
    """By rows, steps of several rows."""

    def of_pass(self, skipped: SkippedSubLayers) -> float:
        """A drafting pass, by what its sub-layers cost one by one."""
        saved = self.attention * len(skipped.attention) + self.feed_forward * len(skipped.feed_forward)
        return max(0.02, 1.0 - saved)

    def of_step(self, rows: float) -> float:
        """A step of so many rows, between and beyond those that were measured along straight lines."""
        points = sorted({1: 1.0, **self.verify}.items())
        if len(points) == 1:
            return 1.0
        index = next((i for i, (r, _) in enumerate(points[1:-1], 1) if rows <= r), len(points) - 1)
        (low, start), (high, end) = points[index - 1], points[index]
        return max(1.0, start + (end - start) * (rows - low) / (high - low))


class Probe(Protocol):
    """What runs passes and measures them."""

    num_layers: int

    def costs(self) -> Generator[None, None, Costs]:
        """In parts, as everything that takes several passes."""
        ...

    def pass_cost(self, skipped: SkippedSubLayers) -> Generator[None, None, float]:
        """A drafting pass over a plain step, timed."""
        ...

    def score(self, skipped: SkippedSubLayers, *, rough: bool) -> Generator[None, None, Score]:
        """``rough``: on a part of the text."""
        ...

    def changes(self) -> Mapping[SubLayer, float]:
        """By sub-layer |h_l - h_(l-1)| / |h_(l-1)|, the mean over a text."""
        ...


@dataclass(frozen=True)
class Prediction:
    """What drafts of a set would bring."""

    gain: float
    """Tokens per time over plain decoding: E / (passes * c + v)."""
    draft_tokens: int
    stop_below: float


@dataclass(frozen=True)
class Candidate:
    """A set and what was measured of it."""

    name: str
    skipped: SkippedSubLayers
    match: float
    pass_cost: float
    prediction: Prediction


@dataclass(frozen=True)
class Calibration:
    """The outcome. ``chosen`` is never predicted slower than any of ``others``."""

    chosen: Candidate
    others: tuple[Candidate, ...]
    """Every other layer, the first half, and the sub-layers of least relative change."""
    costs: Costs
    complete: bool
    """False where the time ran out before the search ended."""
    num_sets: int
    """Sets whose match was measured."""

    @property
    def pays(self) -> bool:
        return self.chosen.prediction.gain >= ARM_GAIN


def predict(score: Score, pass_cost: float, step_cost: Callable[[float], float]) -> Prediction:
    """The best draft length and stop for drafts that match like this.

    Every pass but the first runs only if the one before was sure enough, and its token is kept only if all
    before it are.
    """
    best = Prediction(0.0, 1, 0.0)
    count = len(score.hits)
    for stop in STOPS:
        sure = [hit for hit, c in zip(score.hits, score.confidences, strict=True) if c >= stop]
        if not sure:
            break
        going_on, right = len(sure) / count, sum(sure) / count
        tokens, passes, chance, runs = 1.0, 0.0, score.match, 1.0
        for length in range(1, MAX_DRAFT + 1):
            tokens, passes = tokens + chance, passes + runs
            gain = tokens / (pass_cost * passes + step_cost(1.0 + passes))
            if gain > best.gain:
                best = Prediction(gain, length, stop)
            chance, runs = chance * right, runs * going_on
    return best


def calibrate(
    probe: Probe, *, budget_s: float, clock: Callable[[], float]
) -> Generator[None, None, Calibration]:
    """Searches for about ``budget_s`` seconds, in parts: it yields after every measurement.

    Every sub-layer alone first, then sets of the most harmless ones: sizes over the whole range, then closer
    to the best, then one more or one less by trial, two sets at a time. What counts is the predicted gain
    from measured match and cost, never how similar hidden states are.
    """
    return (yield from _Search(probe, budget_s, clock).run())


class _Search:
    def __init__(self, probe: Probe, budget_s: float, clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._end = clock() + budget_s
        self._found: dict[SkippedSubLayers, Candidate] = {}
        self._scores: dict[SkippedSubLayers, Score] = {}
        self._costs = Costs(0.0, 0.0, {})

    @property
    def _late(self) -> bool:
        return self._clock() >= self._end

    def run(self) -> Generator[None, None, Calibration]:
        self._costs = yield from self._probe.costs()
        order = yield from self._by_harm()
        complete = not self._late
        if order:
            best_size = yield from self._sizes(order)
            if self._best().prediction.gain >= HOPELESS:
                yield from self._refine(order, best_size)
            complete = complete and not self._late
        customary = self._customary(len(self._best().skipped) if self._found else 0)
        for units in customary.values():
            yield from self._measure(units)
        # The sum of the parts ranks sets without the noise of timing; one whole pass says how far it is off.
        best = self._best().skipped
        scale = (yield from self._probe.pass_cost(best)) / self._costs.of_pass(best)
        chosen = max((self._scaled(one, scale) for one in self._found), key=_gain)
        others = [
            replace(self._scaled(_skipped(units), scale), name=name) for name, units in customary.items()
        ]
        return Calibration(chosen, tuple(others), self._costs, complete=complete, num_sets=len(self._found))

    def _scaled(self, skipped: SkippedSubLayers, scale: float) -> Candidate:
        cost = scale * self._costs.of_pass(skipped)
        prediction = predict(self._scores[skipped], cost, self._costs.of_step)
        return replace(self._found[skipped], pass_cost=cost, prediction=prediction)

    def _best(self) -> Candidate:
        return max(self._found.values(), key=_gain)

    def _by_harm(self) -> Generator[None, None, list[SubLayer]]:
        """The sub-layers, those first that harm least for what they cost. At most half of the time."""
        half = self._end - (self._end - self._clock()) / 2
        harm: dict[SubLayer, float] = {}
        units = _all_units(self._probe.num_layers)
        # In strides over the depth, so that what is left when the time runs out lies everywhere.
        for unit in (unit for first in range(STRIDE) for unit in units[first::STRIDE]):
            if self._clock() >= half and len(harm) >= 2:
                break
            score = yield from self._probe.score(_skipped([unit]), rough=True)
            share = self._costs.attention if unit[0] == "attention" else self._costs.feed_forward
            harm[unit] = (1.0 - score.match + score.loss) / max(share, 1e-6)
        return sorted(harm, key=lambda unit: harm[unit])

    def _sizes(self, order: Sequence[SubLayer]) -> Generator[None, None, int]:
        """Measures the first so many of ``order``; the best size."""
        gains: dict[int, float] = {}

        def measure(size: int) -> Generator[None, None, None]:
            if size not in gains and 1 <= size <= len(order) and not (self._late and gains):
                gains[size] = _gain((yield from self._measure(order[:size])))

        for share in SHARES:
            yield from measure(max(1, round(share * len(order))))
        while True:
            best = max(gains, key=lambda size: gains[size])
            known = len(gains)
            low = max((s for s in gains if s < best), default=0)
            high = min((s for s in gains if s > best), default=len(order) + 1)
            yield from measure((low + best) // 2 if best - low > 1 else best)
            yield from measure((best + high) // 2 if high - best > 1 else best)
            if len(gains) == known:
                return max(gains, key=lambda size: gains[size])

    def _refine(self, order: Sequence[SubLayer], size: int) -> Generator[None, None, None]:
        """One more or one less, while that helps."""
        beam = sorted(self._found.values(), key=_gain, reverse=True)[:BEAM]
        while not self._late:
            before = _gain(self._best())
            for one in beam:
                held = set(_units(one.skipped))
                joining = [unit for unit in order if unit not in held][:NEXT]
                leaving = [unit for unit in reversed(order) if unit in held][:NEXT]
                for unit in (*joining, *leaving):
                    if self._late:
                        return
                    yield from self._measure(held ^ {unit})
            beam = sorted(self._found.values(), key=_gain, reverse=True)[:BEAM]
            if _gain(self._best()) <= before:
                return

    def _customary(self, count: int) -> dict[str, list[SubLayer]]:
        """The sets that others choose; of least change as many as the search has chosen."""
        layers = self._probe.num_layers
        units = list(_all_units(layers))
        changes = self._probe.changes()
        least = sorted(units, key=lambda unit: changes[unit])
        return {
            "every other layer": [unit for unit in units if unit[1] % 2],
            "first half": [unit for unit in units if unit[1] <= layers // 2],
            "least change": least[: count or max(1, len(least) // 3)],
        }

    def _measure(self, units: Iterable[SubLayer]) -> Generator[None, None, Candidate]:
        skipped = _skipped(units)
        if skipped not in self._found:
            score = self._scores[skipped] = yield from self._probe.score(skipped, rough=False)
            cost = self._costs.of_pass(skipped)
            prediction = predict(score, cost, self._costs.of_step)
            self._found[skipped] = Candidate("searched", skipped, score.match, cost, prediction)
        return self._found[skipped]


def _gain(candidate: Candidate) -> float:
    return candidate.prediction.gain


def _all_units(num_layers: int) -> list[SubLayer]:
    """All that may be skipped."""
    return [(kind, layer) for layer in range(1, num_layers - 1) for kind in ("attention", "feed_forward")]


def _skipped(units: Iterable[SubLayer]) -> SkippedSubLayers:
    units = list(units)
    return SkippedSubLayers.of(
        (layer for kind, layer in units if kind == "attention"),
        (layer for kind, layer in units if kind == "feed_forward"),
    )


def _units(skipped: SkippedSubLayers) -> list[SubLayer]:
    return [
        *(("attention", layer) for layer in sorted(skipped.attention)),
        *(("feed_forward", layer) for layer in sorted(skipped.feed_forward)),
    ]


def shares_of_cost(plain: float, without_attention: float, without_feed_forward: float, layers: int) -> Costs:
    """Costs of single sub-layers from the times of a whole pass and of passes that lack all of one kind in
    ``layers`` layers; times are seconds."""
    each = max(1, layers) * plain
    return Costs(
        max(0.0, plain - without_attention) / each,
        max(0.0, plain - without_feed_forward) / each,
        {},
    )


def typical(seconds: Sequence[float]) -> float:
    """Of repeated timings the fastest: what else the machine does only adds."""
    return min(seconds)
