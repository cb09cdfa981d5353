"""Special tokens in text: the leftmost longest, of the kinds asked for, in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.base import TokenKind
from edgellm_models.tokenizer.shared import HIDDEN_KINDS, SPECIAL_KINDS
from edgellm_models.tokenizer.vocabulary import SpecialFinder, SpecialToken

CONTROL, USER = TokenKind.CONTROL, TokenKind.USER_DEFINED


def finder(*texts: str, kind: TokenKind = CONTROL) -> SpecialFinder:
    return SpecialFinder(SpecialToken(i, text, kind) for i, text in enumerate(texts))


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=6, unique=True),
    st.text("ab<", max_size=30),
)
def test_the_leftmost_longest_are_found(texts: list[str], text: str) -> None:
    """As an alternation of the spellings, longest first, finds them."""
    found = [
        part if isinstance(part, str) else part.text for part in finder(*texts).split(text, HIDDEN_KINDS)
    ]
    pattern = "|".join(re.escape(one) for one in sorted(texts, key=len, reverse=True))
    expected = [part for part in re.split(f"({pattern})", text) if part] if texts else [text] if text else []
    assert found == expected


def test_tokens_of_other_kinds_neither_match_nor_hide_shorter_ones() -> None:
    both = SpecialFinder([SpecialToken(0, "<a", CONTROL), SpecialToken(1, "<a>", USER, rstrip=True)])
    short, long = SpecialToken(0, "<a", CONTROL), SpecialToken(1, "<a>", USER, rstrip=True)
    assert both.split("x<a> y", HIDDEN_KINDS) == ["x", short, "> y"]
    assert both.split("x<a> y", SPECIAL_KINDS) == ["x", long, "y"]
    assert both.split("x<a> y", frozenset({TokenKind.BYTE})) == ["x<a> y"]


def test_thousands_of_tokens_with_one_beginning_take_no_longer_than_a_few() -> None:
    """Time does not grow with the number of tokens: about one step for each character that matches so far."""

    def seconds(many: SpecialFinder, text: str) -> float:
        many.split("", HIDDEN_KINDS)
        start = time.thread_time()
        many.split(text, HIDDEN_KINDS)
        return time.thread_time() - start

    text = "<|x" * 20_000
    few, many = finder("<|1|>"), finder(*(f"<|{n}{'-' * (n % 100)}|>" for n in range(10_000)))
    assert seconds(many, text) < 10 * seconds(few, text) + 0.1


def test_spellings_too_long_to_look_for_are_refused() -> None:
    with pytest.raises(BadInputError, match="special token 1 has 513 characters; at most 512"):
        finder("a", "b" * 513)
    with pytest.raises(BadInputError, match=r"1024000 characters together; at most 1000000"):
        finder(*(f"{n:05d}".ljust(512, "-") for n in range(2000)))
