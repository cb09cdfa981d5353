"""The acceptance rules against exact distributions, with draft lengths that adapt to what was drafted."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from edgellm.planning.speculation import accepted_rejection
from edgellm.speculative.acceptance import (
    COUPLED,
    REJECTION,
    gumbel_pick,
    num_kept,
    rejection_pick,
    residual,
    verified_run,
)

TARGET, DRAFT = (0.5, 0.3, 0.2), (0.2, 0.6, 0.2)
DRAWS = 50_000


def gumbel(rng: random.Random, count: int) -> list[float]:
    return [-math.log(-math.log(rng.random() or 0.5)) for _ in range(count)]


def total_variation(counts: Counter[int], target: Sequence[float], draws: int) -> float:
    return sum(abs(counts[i] / draws - p) for i, p in enumerate(target)) / 2


def drafted_and_drawn(replace: Callable[[int, random.Random], int]) -> tuple[Counter[int], float]:
    """What comes out for tokens drafted from DRAFT, and the share that is kept."""
    rng = random.Random(1)
    out: Counter[int] = Counter()
    kept = 0
    for _ in range(DRAWS):
        drafted = gumbel_pick(DRAFT, gumbel(rng, 3))
        token = replace(drafted, rng)
        kept += token == drafted
        out[token] += 1
    return out, kept / DRAWS


def test_rejection_keeps_seven_of_ten_and_returns_the_target() -> None:
    def rule(drafted: int, rng: random.Random) -> int:
        return rejection_pick(TARGET, DRAFT, drafted, rng.random(), gumbel(rng, 3))

    out, kept = drafted_and_drawn(rule)
    assert accepted_rejection(TARGET, DRAFT) == pytest.approx(0.7)
    assert kept == pytest.approx(
        0.7, abs=0.01
    )  # the residual is all on token 0, which is never drafted again
    assert total_variation(out, TARGET, DRAWS) < 0.01


def test_resampling_from_the_target_misses_by_the_known_distance() -> None:
    """A rejected token that is replaced by a draw of the target, not of the residual: 0.15 off in total
    variation, which the test above would see."""

    def wrong(drafted: int, rng: random.Random) -> int:
        if rng.random() * DRAFT[drafted] < TARGET[drafted]:
            return drafted
        return gumbel_pick(TARGET, gumbel(rng, 3))

    out, _ = drafted_and_drawn(wrong)
    assert total_variation(out, TARGET, DRAWS) == pytest.approx(0.15, abs=0.01)


def test_the_residual_is_what_the_draft_lacks() -> None:
    assert residual(TARGET, DRAFT) == [1.0, 0.0, 0.0]
    assert residual((0.4, 0.6), (0.4, 0.6)) == [0.4, 0.6]  # nothing lacks: it is never asked then
    assert residual((0.7, 0.3, 0.0), (0.0, 0.0, 1.0)) == pytest.approx([0.7, 0.3, 0.0])


NEXT = {
    None: (0.5, 0.3, 0.2),
    0: (0.1, 0.7, 0.2),
    1: (0.05, 0.05, 0.9),
    2: (0.6, 0.3, 0.1),
}
GUESS = {None: (0.2, 0.6, 0.2), 0: (0.3, 0.3, 0.4), 1: (0.0, 0.1, 0.9), 2: (1 / 3, 1 / 3, 1 / 3)}
LENGTH = 3


def generate(rule: str, rng: random.Random, state: dict[str, float]) -> tuple[tuple[int, ...], bool]:
    """LENGTH tokens of the Markov chain NEXT with drafts from GUESS, and whether they are those that plain
    decoding draws with the same noise.

    A draft ends where the drafter is unsure, and its length follows the acceptance so far: neither may show.
    """
    noise = [gumbel(rng, 3) for _ in range(LENGTH + 4)]
    tokens: list[int] = []
    while len(tokens) < LENGTH:
        draft: list[int] = []
        before = tokens[-1] if tokens else None
        while len(draft) < 1 + round(3 * state["acceptance"]):
            q = GUESS[before]
            if draft and max(q) < state["acceptance"]:
                break
            own = noise[len(tokens) + len(draft)] if rule == COUPLED else gumbel(rng, 3)
            before = gumbel_pick(q, own)
            draft.append(before)

        def draw(index: int, base: tuple[int, ...] = tuple(tokens), draft: list[int] = draft) -> int:
            previous = (draft[index - 1] if index else base[-1]) if index or base else None
            p = NEXT[previous]
            if rule == COUPLED or index == len(draft):
                return gumbel_pick(p, noise[len(base) + index] if rule == COUPLED else gumbel(rng, 3))
            return rejection_pick(p, GUESS[previous], draft[index], rng.random(), gumbel(rng, 3))

        run = verified_run(draft, draw)
        kept = num_kept(draft, run)
        state["acceptance"] += 0.2 * (kept / len(draft) - state["acceptance"])
        tokens += run
    plain: list[int] = []
    for position in range(LENGTH):
        plain.append(gumbel_pick(NEXT[plain[-1] if plain else None], noise[position]))
    return tuple(tokens[:LENGTH]), tokens[:LENGTH] == plain


@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
def test_the_joint_distribution_is_the_targets_with_adaptive_stopping(rule: str) -> None:
    """Chi-square over 50,000 answers of 3 tokens: 26 degrees of freedom, 99.9% of right ones below 54.1."""
    rng, state = random.Random(7), {"acceptance": 0.5}
    seen: Counter[tuple[int, ...]] = Counter()
    same = True
    for _ in range(DRAWS):
        tokens, as_plain = generate(rule, rng, state)
        seen[tokens] += 1
        same &= as_plain
    chi = 0.0
    for answer in itertools.product(range(3), repeat=LENGTH):
        expected = float(DRAWS)
        for before, token in zip((None, *answer), answer, strict=False):
            expected *= NEXT[before][token]
        chi += (seen[answer] - expected) ** 2 / expected
    assert chi < 54.1
    assert same == (rule == COUPLED)


def test_a_run_ends_with_the_first_other_token_or_the_bonus() -> None:
    asked: list[int] = []

    def drawing(tokens: Sequence[int | None]) -> Callable[[int], int | None]:
        asked.clear()

        def draw(index: int) -> int | None:
            asked.append(index)
            return tokens[index]

        return draw

    assert verified_run([5, 6, 7], drawing([5, 9, 7, 8])) == [5, 9]
    assert asked == [0, 1]  # nothing behind a mismatch is looked at
    assert verified_run([5, 6], drawing([5, 6, 1])) == [5, 6, 1]
    assert verified_run([], drawing([4])) == [4]
    assert verified_run([5, 6], drawing([5, None])) == [5]  # a broken row ends the run before it
    assert verified_run([5], drawing([None])) == []
    assert [num_kept([5, 6], run) for run in ([5, 6, 1], [5, 9], [9], [])] == [2, 1, 0, 0]
