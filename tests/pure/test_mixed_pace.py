"""How many prompt rows run beside answers: simulated costs, gaps and the time of the prompt."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from edgellm.scheduler.mixed_pace import FEWEST_ROWS, FIRST_ROWS, MOST_SHARES, MixedPace, shared_rows

ALONE_S = 0.02


def read_beside(pace: MixedPace, row_s: Callable[[int], float], tokens: int, noise: float) -> list[float]:
    """Step times, in steps of answers alone, while a prompt is read beside these."""
    rng = random.Random(1)

    def took(seconds: float) -> float:
        return seconds * (1 + noise * rng.random())

    for _ in range(12):
        pace.observe(4, 0, took(ALONE_S))
    steps, position = [], 0
    while position < tokens:
        rows = min(pace.rows, tokens - position)
        steps.append(took(ALONE_S + rows * row_s(position)))
        pace.observe(4, rows, steps[-1])
        position += rows
    return [seconds / ALONE_S for seconds in steps]


@pytest.mark.parametrize("row_s", [0.0002, 0.0005, 0.001])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_gaps_and_the_prompts_time_keep_their_bounds_whatever_a_row_costs(row_s: float, noise: float) -> None:
    """A row that costs more the longer the prompt gets, on slow and on fast devices."""

    def cost(position: int) -> float:
        return row_s * (1 + position / 1750)

    gaps = read_beside(MixedPace(512), cost, 4000, noise)
    assert sorted(gaps)[int(0.95 * len(gaps))] <= 4
    alone = sum(cost(position) for position in range(4000)) / ALONE_S
    assert sum(gaps) <= 2 * alone * (1 + noise)


def test_a_device_with_room_to_spare_takes_whole_chunks() -> None:
    pace = MixedPace(512)
    gaps = read_beside(pace, lambda position: 1e-7, 8000, 0.1)
    assert pace.rows == 512 and len(gaps) < 30


def test_a_costly_row_leaves_the_fewest_and_one_slow_step_changes_little() -> None:
    pace = MixedPace(512)
    read_beside(pace, lambda position: 0.1, 400, 0.0)
    assert pace.rows == FEWEST_ROWS
    pace = MixedPace(512)
    read_beside(pace, lambda position: 0.001, 400, 0.0)
    before = pace.rows
    pace.observe(4, before, 9.0)
    assert pace.rows == before == 40


def test_nothing_measured_leaves_the_first_and_small_chunks_bound_it() -> None:
    pace = MixedPace(512)
    pace.observe(0, 300, 1.0)  # prompts alone say nothing of answers
    pace.observe(3, 32, 1.0)
    assert pace.rows == FIRST_ROWS and MixedPace(8).rows == 8
    small = MixedPace(8)
    assert statistics.fmean(read_beside(small, lambda position: 1e-5, 80, 0.0)) < 1.1 and small.rows == 8


def test_a_clock_that_stands_still_is_no_fault() -> None:
    pace = MixedPace(512)
    for prompt_rows in (0, 8, 0, 8):
        pace.observe(4, prompt_rows, 0.0)
    assert pace.rows == FEWEST_ROWS


def test_prompts_that_outnumber_answers_get_more_rows() -> None:
    """One prompt gets the same beside however many answers; many prompts never more than the stated bound."""
    for answers in range(1, 20):
        assert shared_rows(30, 0, answers) == shared_rows(30, 1, answers) == 30
        rows = [shared_rows(30, prompts, answers) for prompts in range(1, 200)]
        assert rows == sorted(rows) and rows[-1] == 30 * MOST_SHARES
    assert shared_rows(32, 4, 4) == 56 and shared_rows(32, 3, 1) == 96 and shared_rows(32, 2, 8) == 36
