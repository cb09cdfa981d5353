"""The controller over drafts that the runner makes itself, under a simulated clock: they cost passes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edgellm.contracts import PlannedSequence
from edgellm.planning.speculation import expected_tokens
from edgellm.speculative.controller import DISARM_ROUNDS, MAX_RUNNER_BATCH, Controller
from edgellm.speculative.drafter import MAX_DRAFT
from edgellm.speculative.speculator import Room, Speculator

PLAIN = 0.02


class RunnerWorld:
    """Sequences that decode together. A pass takes ``share`` of a plain step, a further row ``row`` of one;
    ``right(position)`` says whether a drafted token is the true one."""

    def __init__(
        self,
        share: float,
        row: float,
        right: Callable[[int], bool],
        match: float,
        num_sequences: int = 1,
        stop_after: int = MAX_DRAFT,
    ) -> None:
        self.share, self.row, self.right = share, row, right
        self.stop_after = stop_after
        self.lengths = [0] * num_sequences
        self.now = 0.0
        self.drafted: list[int] = []
        """Drafted tokens of each step."""
        self.controller = Controller()
        self.speculator = Speculator(None, self.controller, clock=lambda: self.now)
        verify = {rows: self.cost(rows) / PLAIN for rows in (2, 4, 8, 16)}
        self.speculator.expect_runner_drafts(MAX_DRAFT, match, share, verify)
        for sequence_id in range(num_sequences):
            self.speculator.begin(sequence_id, [0])

    def cost(self, rows: int) -> float:
        return PLAIN * (1 + self.row * (rows - 1))

    def step(self) -> None:
        count = len(self.lengths)
        rooms = [Room(i, 16, lambda draft: draft) for i in range(count)]
        assert self.speculator.propose(rooms, count, mixed=False) == {}
        planned, brought, drafted = [], {}, {}
        for i, start in enumerate(self.lengths):
            proposed = min(self.speculator.runner_counts.get(i, 0), self.stop_after)
            kept = next((n for n in range(proposed) if not self.right(start + n)), proposed)
            drafted[i] = (proposed, kept)
            brought[i] = tuple(range(start, start + kept + 1))
            planned.append(PlannedSequence(i, (0,), start, (), False, True, proposed))
            self.lengths[i] += kept + 1
        passes = max(proposed for proposed, _ in drafted.values())
        pass_seconds = passes * self.share * PLAIN
        rows = count + sum(proposed for proposed, _ in drafted.values())
        seconds = self.cost(rows) + pass_seconds
        self.now += seconds
        self.drafted.append(rows - count)
        self.speculator.settle(planned, brought, seconds, drafted, pass_seconds=pass_seconds, passes=passes)

    def run(self, tokens: int) -> float:
        """Seconds over those of plain decoding."""
        while min(self.lengths) < tokens:
            self.step()
        return self.now / (self.cost(len(self.lengths)) * sum(self.lengths) / len(self.lengths))


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("match", [0.5, 0.95, 1.0])
def test_hostile_drafts_cost_at_most_two_percent(share: float, match: float) -> None:
    """Whatever calibration promised: nothing is kept, and each rest is longer than the one before."""
    world = RunnerWorld(share, 0.05, lambda position: False, match)
    assert world.run(100) <= 1.02
    assert world.run(1200) <= 1.02
    assert share * sum(world.drafted) <= 0.02 * 1200


def test_a_drafter_that_wins_trust_and_then_fails_costs_no_more() -> None:
    world = RunnerWorld(0.5, 0.05, lambda position: (position // 150) % 2 == 0, 0.95)
    assert world.run(1800) <= 1.02


def test_it_is_disarmed_within_the_stated_rounds() -> None:
    state = {"right": True}
    world = RunnerWorld(0.5, 0.05, lambda position: state["right"], 0.95)
    world.run(200)
    assert world.controller.control(0).armed and "skip: armed" in world.speculator.state
    state["right"] = False
    rounds = 0
    while world.controller.control(0).armed:
        world.step()
        rounds += world.drafted[-1] > 0
    assert rounds <= DISARM_ROUNDS


@pytest.mark.parametrize(("share", "row"), [(0.65, 0.01), (0.3, 0.05), (0.5, 0.02)])
@pytest.mark.parametrize("chance", [0.9, 1.0])
def test_it_arms_by_itself_and_comes_near_what_is_possible(share: float, row: float, chance: float) -> None:
    """Against the best constant length: E / (k c + v)."""
    rng = random.Random(3)
    lots = [rng.random() < chance for _ in range(9000)]
    world = RunnerWorld(share, row, lots.__getitem__, chance)
    gain = 1 / world.run(1500)
    best = max(expected_tokens(chance, k) / (k * share + 1 + row * k) for k in range(1, MAX_DRAFT + 1))
    assert gain >= (0.85 * best if best > 1.1 else 0.98)
    assert sum(world.drafted) > 0 or best < 1.05


def test_what_cannot_pay_is_never_tried() -> None:
    """By the figures of the calibration alone."""
    world = RunnerWorld(0.8, 0.3, lambda position: True, 0.9)
    world.run(500)
    assert sum(world.drafted) == 0
    assert "not drafting" in world.speculator.state


def test_drafts_that_stop_early_are_booked_as_they_ran() -> None:
    world = RunnerWorld(0.4, 0.02, lambda position: True, 0.9, stop_after=3)
    assert 1 / world.run(2000) >= 0.85 * 4 / (3 * 0.4 + 1.06)
    assert max(world.drafted) == 3


def test_it_comes_back_after_a_rest() -> None:
    state = {"right": False}
    world = RunnerWorld(0.5, 0.05, lambda position: state["right"], 0.95)
    world.run(300)
    state["right"] = True
    before = len(world.drafted)
    world.run(2500)
    assert sum(world.drafted[before:]) > 500


def test_more_sequences_than_a_pass_is_worth_do_not_draft() -> None:
    world = RunnerWorld(0.4, 0.01, lambda position: True, 0.95, num_sequences=MAX_RUNNER_BATCH + 1)
    world.run(60)
    assert sum(world.drafted) == 0
    few = RunnerWorld(0.4, 0.01, lambda position: True, 0.95, num_sequences=2)
    few.run(60)
    assert sum(few.drafted) > 0
