"""The controller under a simulated clock: what drafting costs at worst, when it starts, and when it stops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from edgellm.contracts import PlannedSequence
from edgellm.speculative.controller import DISARM_ROUNDS, MAX_BATCH, Controller
from edgellm.speculative.drafter import Draft
from edgellm.speculative.speculator import Room, Speculator
from edgellm.speculative.step_costs import StepCosts


@dataclass
class World:
    """Sequences that decode together: the true tokens are 0, 1, 2, ... and steps take what ``cost`` says.

    ``right(sequence, position)`` says whether a drafted token is the true one.
    """

    cost: Callable[[int], float]
    right: Callable[[int, int], bool]
    num_sequences: int = 1
    match: int = 4
    draft_seconds: float = 0.0
    name: str = "world"
    now: float = 0.0
    rows: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    """Drafted rows of each step."""

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_sequences
        self.controller = Controller()
        self.speculator = Speculator(self, self.controller, clock=self.clock)
        for sequence_id in range(self.num_sequences):
            self.speculator.begin(sequence_id, [0])

    def clock(self) -> float:
        return self.now

    def begin(self, sequence_id: int, prompt: Sequence[int], **_: object) -> None: ...

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None: ...

    def end(self, sequence_id: int) -> None: ...

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        self.now += self.draft_seconds
        start = self.lengths[sequence_id]
        true = range(start, start + most)
        return Draft(tuple(i if self.right(sequence_id, i) else -9 for i in true), self.match)

    def step(self) -> None:
        rooms = [Room(i, 16, lambda draft: draft) for i in range(self.num_sequences)]
        drafts = self.speculator.propose(rooms, self.num_sequences, mixed=False)
        planned, brought = [], {}
        for i in range(self.num_sequences):
            draft = drafts.get(i, ())
            start = self.lengths[i]
            kept = next((n for n, token in enumerate(draft) if token != start + n), len(draft))
            brought[i] = tuple(range(start, start + kept + 1))
            planned.append(PlannedSequence(i, (0,), start, (), False, True, len(draft), tuple(draft)))
            self.lengths[i] += kept + 1
        rows = sum(len(p.rows) for p in planned)
        seconds = self.cost(rows)
        self.now += seconds
        self.rows += rows
        self.drafted.append(rows - self.num_sequences)
        self.speculator.settle(planned, brought, seconds)

    def run(self, tokens: int) -> float:
        """Seconds until every sequence has so many tokens, over those of plain decoding."""
        while min(self.lengths) < tokens:
            self.step()
        plain = self.cost(self.num_sequences) * sum(self.lengths) / self.num_sequences
        return self.now / plain


def linear(share: float) -> Callable[[int], float]:
    return lambda rows: 0.02 * (1 + share * (rows - 1))


NEVER = lambda sequence, position: False  # noqa: E731
ALWAYS = lambda sequence, position: True  # noqa: E731


@pytest.mark.parametrize("share", [0.02, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("match", [2, 4, 32])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_drafts_that_are_never_right_cost_at_most_two_percent(
    share: float, match: int, num_sequences: int
) -> None:
    world = World(linear(share), NEVER, num_sequences, match)
    assert world.run(100) <= 1.02
    assert world.run(800) <= 1.02


def test_what_each_drafter_did_is_counted() -> None:
    world = World(linear(0.02), lambda sequence, position: position % 3 != 0, num_sequences=2)
    world.run(200)
    [drafter] = world.speculator.drafters()
    assert (drafter.name, drafter.draft) == ("world", world.speculator.counts) and drafter.draft.steps > 20
    # At most two in a row are right, so no draft is kept beyond its second token.
    assert len(drafter.accepted_at) == 2 and sum(drafter.accepted_at) == drafter.draft.accepted
    assert drafter.accepted_at[0] >= drafter.accepted_at[1] > 0
    assert drafter.armed == sum(world.controller.control(i).armed for i in range(2)) > 0
    world.speculator.end(0)
    world.speculator.end(1)
    assert world.speculator.drafters()[0].armed == 0


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_an_opponent_who_knows_the_rules_costs_no_more(length: int) -> None:
    """Right for a while, to win trust and credit, then wrong for as long; and right only where nothing
    runs."""
    world = World(linear(0.3), lambda s, i: (i // (40 * length)) % 2 == 0, match=9)
    assert world.run(3000) <= 1.02
    first = World(linear(0.3), lambda s, i: i % (length + 1) != length, match=9)
    assert first.run(3000) <= 1.02
    teasing: World

    def right(sequence: int, position: int) -> bool:
        return not teasing.controller.control(0).armed

    teasing = World(linear(0.3), right, match=9)
    assert teasing.run(3000) <= 1.02


@pytest.mark.parametrize("seed", range(6))
def test_noisy_step_times_and_a_slow_drafter_cost_no_more(seed: int) -> None:
    rng = random.Random(seed)
    noisy = World(lambda rows: 0.02 * (1 + 0.2 * (rows - 1)), NEVER, match=16)
    real = noisy.cost
    noisy.cost = lambda rows: real(rows) * rng.lognormvariate(0, 0.2)
    while noisy.lengths[0] < 1500:
        noisy.step()
    assert sum(noisy.drafted) <= 30
    slow = World(linear(0.2), NEVER, draft_seconds=0.004)  # a fifth of a step for nothing
    assert slow.run(2000) <= 1.02


def test_hostile_drafts_are_disarmed_within_the_stated_rounds() -> None:
    """And from then on a step forwards exactly the rows of plain decoding until its rest is over."""
    world = World(linear(0.05), NEVER, match=32)
    rounds = 0
    for _ in range(400):
        before = world.controller.control(0).armed
        world.step()
        rounds += world.drafted[-1] > 0
        if before and not world.controller.control(0).armed:
            break
    assert 1 <= rounds <= DISARM_ROUNDS or not world.controller.control(0).armed
    assert rounds <= DISARM_ROUNDS
    drafted = len(world.drafted)
    world.run(3000)
    assert sum(world.drafted[drafted:]) <= 0.01 * 3000


def test_disarming_is_told_once_with_its_reason() -> None:
    state = {"right": True}
    world = World(linear(0.2), lambda s, i: state["right"], match=16)
    world.run(100)
    assert world.controller.control(0).armed and "armed" in world.speculator.state
    state["right"] = False
    told = []
    for _ in range(600):
        world.step()
        told += world.speculator.disarmed()
    [(sequence_id, why)] = told
    assert sequence_id == 0 and "drafted tokens were right" in why
    assert "not drafting" in world.speculator.state


@pytest.mark.parametrize(("share", "least"), [(0.02, 5.0), (0.1, 3.0), (0.3, 1.8)])
def test_drafts_that_are_always_right_come_near_what_they_could_bring(share: float, least: float) -> None:
    world = World(linear(share), ALWAYS, match=16)
    assert 1 / world.run(400) >= least


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("share", [0.03, 0.15, 0.4])
def test_it_is_never_slower_and_finds_most_of_the_best_gain(chance: float, share: float) -> None:
    """Against the best constant draft length for a known acceptance."""
    from edgellm.planning.speculation import expected_tokens

    rng = random.Random(5)
    lots = [rng.random() < chance for _ in range(6000)]
    world = World(linear(share), lambda s, i: lots[i], match=4)
    gain = 1 / world.run(4000)
    best = max(expected_tokens(chance, k) / (1 + share * k) for k in range(17))
    assert gain >= 0.98
    assert gain >= 0.85 * best if best > 1.1 else True


def test_a_predicted_gain_below_five_percent_does_not_arm() -> None:
    """A tenth of one more token for a fifth of a step: nothing is drafted once that is known."""
    rng = random.Random(1)
    lots = [rng.random() < 0.1 for _ in range(9000)]
    world = World(linear(0.2), lambda s, i: lots[i])
    world.run(1000)
    assert sum(world.drafted) <= 20


def test_a_recovered_drafter_is_used_again_without_a_probe() -> None:
    """What is proposed and not run is compared with what comes: the acceptance is known before a row is
    spent."""
    state = {"right": False}
    world = World(linear(0.2), lambda s, i: state["right"])
    world.run(500)
    state["right"] = True
    before = len(world.drafted)
    world.run(700)
    first = next(i for i, rows in enumerate(world.drafted[before:]) if rows)
    assert first <= 120
    assert sum(world.drafted[before:]) > 50


def test_large_batches_do_not_draft() -> None:
    world = World(linear(0.01), ALWAYS, num_sequences=MAX_BATCH + 1, match=32)
    world.run(50)
    assert sum(world.drafted) == 0
    assert "at once" in world.speculator.state
    small = World(linear(0.01), ALWAYS, num_sequences=4, match=32)
    small.run(50)
    assert sum(small.drafted) > 0


def test_sequences_of_one_batch_are_judged_apart() -> None:
    world = World(linear(0.05), lambda s, i: s == 0, num_sequences=4, match=9)
    for _ in range(200):
        world.step()
    assert world.controller.control(0).armed
    assert world.lengths[0] > 2 * world.lengths[1]
    assert not any(world.controller.control(i).armed for i in (1, 2, 3))


def test_step_costs_grow_with_rows_and_forget_outliers() -> None:
    costs = StepCosts()
    assert not costs.is_known
    costs.record(1, 0.02)
    assert costs.seconds(1) == 0.02 and 0.02 < costs.seconds(3) < 0.03  # the prior of a row
    for seconds in (0.03, 0.03, 9.0, 0.03, 0.03):
        costs.record(5, seconds)
    assert costs.seconds(5) == 0.03
    assert costs.seconds(3) == pytest.approx(0.025)
    assert costs.seconds(9) == pytest.approx(0.04)
    costs.record(7, 0.001)  # no step of more rows is believed to be quicker
    found = [costs.seconds(rows) for rows in range(1, 12)]
    assert all(a <= b for a, b in itertools.pairwise(found))
    assert costs.ratio(1, 5) == 1.0
