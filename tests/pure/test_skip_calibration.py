"""The search for sub-layers to skip, over probes whose truth is known, and the profiles that keep it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.speculative.calibration import (
    ARM_GAIN,
    Calibration,
    Costs,
    Score,
    SubLayer,
    calibrate,
    predict,
)
from edgellm.speculative.skip_profile import ProfileKey, SkipProfile, load_profile, save_profile
from edgellm_models.errors import BadInputError
from edgellm_models.network.sub_layers import SkippedSubLayers

LAYERS = 30
COSTS = Costs(0.0125, 0.0145, {2: 1.02, 4: 1.05, 8: 1.1, 16: 1.3})
DEAD = SkippedSubLayers.of(attention=(1, 2, 5, 8, 9, 13, 17, 18, 22, 25, 27, 28), feed_forward=range(3, 15))
"""24 of 60 sub-layers, 40%."""
KEY = ProfileKey("ab" * 16, "linear=torch", "f32", "cpu", 1, "0.1")


class FakeProbe:
    """Every sub-layer that is missed costs its share of the hits, one after another."""

    num_layers = LAYERS

    def __init__(self, harm: Callable[[SubLayer], float], costs: Costs = COSTS, places: int = 128) -> None:
        self._harm = harm
        self._costs = costs
        self._places = places
        rng = random.Random(4)
        self._lots = [rng.random() for _ in range(places)]
        self.scored = 0

    def costs(self) -> Generator[None, None, Costs]:
        yield
        return self._costs

    def pass_cost(self, skipped: SkippedSubLayers) -> Generator[None, None, float]:
        yield
        return self._costs.of_pass(skipped) + 0.01

    def score(self, skipped: SkippedSubLayers, *, rough: bool) -> Generator[None, None, Score]:
        yield
        self.scored += 1
        match, loss = 1.0, 0.0
        for kind, layers in (("attention", skipped.attention), ("feed_forward", skipped.feed_forward)):
            for layer in layers:
                harm = self._harm((kind, layer))
                match, loss = match * (1.0 - harm), loss + harm
        lots = self._lots[: 32 if rough else self._places]
        return Score(tuple(lot < match for lot in lots), (0.9,) * len(lots), loss)

    def changes(self) -> Mapping[SubLayer, float]:
        """As misleading as it gets: what harms most changes least."""
        units = itertools.product(("attention", "feed_forward"), range(LAYERS - 1))
        return {unit: 1.0 - self._harm(unit) for unit in units}


def finished(probe: FakeProbe, budget_s: float = 1e9, tick: float = 1.0) -> Calibration:
    ticks = itertools.count()
    parts = calibrate(probe, budget_s=budget_s, clock=lambda: tick * next(ticks))
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def dead(unit: SubLayer, alive: float, nearly: float) -> float:
    kind, layer = unit
    return nearly if layer in getattr(DEAD, kind) else alive


@pytest.mark.parametrize(("nearly", "least"), [(0.0, 1.0), (0.001, 0.9)])
def test_it_finds_exactly_the_dead_sub_layers(nearly: float, least: float) -> None:
    found = finished(FakeProbe(lambda unit: dead(unit, 0.15, nearly)))
    assert found.chosen.skipped == DEAD
    assert found.complete and found.pays
    assert found.chosen.match >= least
    assert found.chosen.prediction.gain > 1.2


def test_live_layers_are_left_alone() -> None:
    found = finished(FakeProbe(lambda unit: 0.15))
    assert not found.pays and found.chosen.prediction.gain < ARM_GAIN


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_set_is_never_predicted_slower_than_any_customary_one(seed: int) -> None:
    """Whatever the truth, and however early the time runs out; the three customary sets are all there."""
    rng = random.Random(seed)
    harms = {
        unit: rng.choice((0.0, 0.001, 0.02, 0.2))
        for unit in itertools.product(("attention", "feed_forward"), range(LAYERS))
    }
    for budget in (0.0, 5.0, 40.0, 1e9):
        found = finished(FakeProbe(harms.__getitem__), budget)
        assert [one.name for one in found.others] == ["every other layer", "first half", "least change"]
        assert all(found.chosen.prediction.gain >= one.prediction.gain for one in found.others)
        assert found.complete or budget < 1e9


def test_every_other_layer_is_chosen_where_it_is_best() -> None:
    """And layers of unequal worth, of which the search alone would stop too early."""
    found = finished(FakeProbe(lambda unit: 0.0 if unit[1] % 2 else 0.3))
    assert found.chosen.skipped.attention == frozenset(range(1, LAYERS - 1, 2))
    every_other = next(one for one in found.others if one.name == "every other layer")
    assert every_other.skipped == found.chosen.skipped


def test_the_time_is_kept() -> None:
    """A second per look at the clock: what runs beyond the end is the comparison alone, a few sets."""
    endless = FakeProbe(lambda unit: dead(unit, 0.15, 0.0))
    finished(endless)
    short = FakeProbe(lambda unit: dead(unit, 0.15, 0.0))
    found = finished(short, budget_s=30.0)
    assert not found.complete
    assert short.scored <= 40 < endless.scored < 400


def test_predictions_follow_the_arithmetic() -> None:
    """S = E / (k c + v): against the formula where every pass runs, and worked by hand with a stop."""
    from edgellm.planning.speculation import best_draft_tokens

    always = Score((True,) * 8 + (False,) * 2, (0.5,) * 10, 0.0)
    found = predict(always, 0.6, lambda rows: 1.05)
    assert (found.draft_tokens, found.gain) == (
        best_draft_tokens(0.8, 0.6, 1.05)[0],
        pytest.approx(best_draft_tokens(0.8, 0.6, 1.05)[1]),
    )
    # Half of the tokens are sure and right, the others unsure and wrong: behind these no pass runs.
    half = Score((True, False) * 5, (0.95, 0.2) * 5, 0.0)
    stopped = predict(half, 0.2, lambda rows: 1.0)
    assert stopped.stop_below > 0.2
    tokens = sum(0.5**i for i in range(stopped.draft_tokens + 1))
    passes = sum(0.5**i for i in range(stopped.draft_tokens))
    assert stopped.gain == pytest.approx(tokens / (0.2 * passes + 1.0))
    assert stopped.gain > predict(replace(half, confidences=(0.95,) * 10), 0.2, lambda rows: 1.0).gain


def test_costs_of_passes_and_steps() -> None:
    assert COSTS.of_pass(DEAD) == pytest.approx(1 - 12 * 0.0125 - 12 * 0.0145)
    assert [COSTS.of_step(rows) for rows in (1, 2, 3, 8)] == pytest.approx([1.0, 1.02, 1.035, 1.1])
    assert COSTS.of_step(24) == pytest.approx(1.5)
    assert Costs(0, 0, {}).of_step(5) == 1.0


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    calibration = finished(FakeProbe(lambda unit: dead(unit, 0.15, 0.0)))
    profile = SkipProfile(KEY, calibration, LAYERS, 12.5)
    path = save_profile(profile, tmp_path / "new")
    assert load_profile(KEY, tmp_path / "new", LAYERS) == profile
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    for other in (replace(KEY, model="cd" * 16), replace(KEY, threads=2), replace(KEY, version="0.2")):
        assert load_profile(other, tmp_path / "new", LAYERS) is None
    assert load_profile(KEY, tmp_path / "nowhere", LAYERS) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"format": 2},
        lambda d: d | {"num_layers": 31},
        lambda d: d | {"chosen": d["chosen"] | {"attention": [0]}},
        lambda d: d | {"chosen": d["chosen"] | {"attention": [1.5]}},
        lambda d: d | {"chosen": d["chosen"] | {"feed_forward": [29]}},
        lambda d: d | {"chosen": d["chosen"] | {"match": float("nan")}},
        lambda d: d | {"chosen": d["chosen"] | {"draft_tokens": 4000}},
        lambda d: d | {"costs": d["costs"] | {"verify": {"2": 0.1}}},
        lambda d: {key: value for key, value in d.items() if key != "others"},
        lambda d: [d],
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(
    change: Callable[[dict[str, object]], object], tmp_path: Path
) -> None:
    calibration = finished(FakeProbe(lambda unit: 0.1), budget_s=20.0)
    path = save_profile(SkipProfile(KEY, calibration, LAYERS, 1.0), tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(BadInputError, match=r"profile .* is damaged .*bench spec") as caught:
        load_profile(KEY, tmp_path, LAYERS)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(BadInputError, match="is damaged"):
        load_profile(KEY, tmp_path, LAYERS)
