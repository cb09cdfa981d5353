"""Which tokens of a text count in which window."""

from __future__ import annotations

import pytest

from edgellm.evaluate.windows import plan_windows
from edgellm_models.errors import BadInputError


def test_the_second_half_of_each_window_is_scored() -> None:
    """llama-perplexity: of 512 tokens those behind position 256, so 255 of them; what is over is left out."""
    plan = plan_windows(range(1300), 512, None)
    assert (plan.num_windows, plan.first_row, plan.rows_per_window, plan.num_scored) == (2, 256, 255, 510)
    assert plan.unscored_tail == 276
    assert plan.window(1) == tuple(range(512, 1024))


def test_odd_windows_begin_in_the_middle_rounded_down() -> None:
    plan = plan_windows(range(14), 7, None)
    assert (plan.num_windows, plan.first_row, plan.rows_per_window, plan.unscored_tail) == (2, 3, 3, 0)


def test_bos_takes_the_place_of_each_first_token() -> None:
    plan = plan_windows(range(100, 116), 8, 1)
    assert plan.window(0) == (1, *range(101, 108)) and plan.window(1) == (1, *range(109, 116))


def test_whole_windows_are_scored_where_that_is_asked_for() -> None:
    """All tokens but the first, which nothing comes before."""
    plan = plan_windows(range(16), 8, 1, scores_all=True)
    assert (plan.num_windows, plan.first_row, plan.rows_per_window, plan.num_scored) == (2, 0, 7, 14)


def test_a_limit_on_the_windows() -> None:
    assert plan_windows(range(100), 10, None, 3).num_windows == 3
    assert plan_windows(range(100), 10, None, 30).num_windows == 10


@pytest.mark.parametrize(
    ("tokens", "ctx", "words"), [(11, 12, "the text has 11 tokens and a window takes 12"), (50, 3, "--ctx 3")]
)
def test_what_cannot_be_scored_is_refused_with_the_numbers(tokens: int, ctx: int, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        plan_windows(range(tokens), ctx, None)
