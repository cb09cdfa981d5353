"""Lookups against a search of the whole text, what they may cost, and who sees whose past."""

from __future__ import annotations

import random

import pytest

from edgellm.speculative import ngram
from edgellm.speculative.drafter import Draft
from edgellm.speculative.estimates import AGREED, DISPUTED, NUM_BUCKETS, RUNNER, bucket_of
from edgellm.speculative.ngram import MAX_DRIFT, MAX_MATCH, MAX_SALTS, NUM_PLACES, NgramDrafter, TextIndex


def longest_by_search(text: list[int]) -> int:
    """Length of the longest end of the text that came before, followed by something."""
    best = 0
    for place in range(1, len(text)):
        length = 0
        while length < min(place, MAX_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_match_is_that_of_a_search(seed: int) -> None:
    """On texts in which no n-gram comes more often than places are kept."""
    rng = random.Random(seed)
    phrase = [rng.randrange(1000) for _ in range(30)]
    text: list[int] = []
    index = TextIndex()
    for _ in range(NUM_PLACES - 1):
        start = rng.randrange(20)
        text += [rng.randrange(1000, 2000) for _ in range(rng.randrange(5))]
        text += phrase[start : start + rng.randrange(2, 30)]
    for end in range(1, len(text) + 1):
        index.extend(text[end - 1 : end])
        place, length = index.find(text[:end])
        expected = longest_by_search(text[:end])
        assert length == (expected if expected >= ngram.MIN_MATCH else 0)
        if length:
            assert text[place - length : place] == text[end - length : end]


def drafter_on(prompt: list[int], answer: list[int], **fields: object) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.begin(1, prompt, **fields)  # type: ignore[arg-type]
    drafter.observe(1, answer)
    return drafter


def proposal(drafter: NgramDrafter, most: int = 4, sequence_id: int = 1) -> tuple[int, ...]:
    draft = drafter.propose(sequence_id, most)
    return () if draft is None else draft.token_ids


def test_what_followed_before_is_proposed() -> None:
    drafter = drafter_on([1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4])
    assert proposal(drafter) == (5, 6, 7, 8)
    drafter.observe(1, [5])
    draft = drafter.propose(1, 2)
    assert draft is not None and (draft.token_ids, draft.match) == ((6, 7), 4)
    drafter.observe(1, [100])
    assert drafter.propose(1, 4) == Draft((7, 8, 9, 2), 0)  # as if 100 stood for 6
    assert proposal(drafter_on([1, 2, 3, 4], [9, 3, 2])) == ()


@pytest.mark.parametrize(
    ("text", "agreed"),
    [
        ([1, 2, 3, 50], None),  # nowhere else
        ([1, 2, 3, 50, 9, 1, 2, 3, 50], True),
        ([1, 2, 3, 51, 9, 1, 2, 3, 50], False),
        ([1, 2, 3, 51, 9, 1, 2, 3, 50, 9, 1, 2, 3, 50], None),  # both
        ([8, 2, 3, 51, 9, 1, 2, 3, 50], False),  # of two tokens, where three came nowhere else
        ([8, 2, 3, 51, 9, 1, 2, 3, 50, 7, 1, 2, 3, 50], True),  # three count more than two
    ],
)
def test_a_draft_says_whether_other_places_agree(text: list[int], agreed: bool | None) -> None:
    draft = drafter_on(text, [60, 1, 2, 3]).propose(1, 1)
    assert draft == Draft((50,), 3, agreed)


def test_short_matches_are_judged_apart_where_other_places_agree_or_do_not() -> None:
    for match in range(2, 9):
        assert bucket_of(match, True) == AGREED and bucket_of(match, False) == DISPUTED
        assert bucket_of(match) not in (AGREED, DISPUTED, RUNNER)
    assert bucket_of(9, False) == bucket_of(9, True) == bucket_of(9)
    assert len({bucket_of(match) for match in range(20)} | {AGREED, DISPUTED, RUNNER}) == NUM_BUCKETS


def test_the_longer_match_wins_and_of_equal_ones_the_later() -> None:
    assert proposal(drafter_on([7, 1, 2, 50, 8, 9, 1, 2, 60], [9, 1, 2]), 1) == (60,)
    assert proposal(drafter_on([9, 1, 2, 50, 8, 7, 1, 2, 60], [9, 1, 2]), 1) == (50,)
    assert proposal(drafter_on([5, 1, 2, 50, 6, 1, 2, 60], [7, 1, 2]), 1) == (60,)


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert proposal(drafter_on([1, 2, 3], [1, 2, 3, 1, 2]), 8) == (3, 1, 2, 3, 1, 2, 3, 1)


def test_a_prediction_is_drafted_from_its_first_token_on() -> None:
    """And found again behind a place where the answer said something else."""
    drafter = NgramDrafter()
    drafter.begin(1, [1], prediction=[10, 11, 12, 13, 14, 15, 16])
    assert proposal(drafter) == (10, 11, 12, 13)
    drafter.observe(1, [10])
    assert proposal(drafter) == (11, 12, 13, 14)
    drafter.observe(1, [99])
    assert proposal(drafter) == ()
    drafter.observe(1, [12, 13])
    assert proposal(drafter) == (14, 15, 16)
    drafter.observe(1, [14, 15, 16])
    assert proposal(drafter) == ()


def test_past_answers_are_seen_under_the_same_salt_only() -> None:
    """Whoever shares no salt cannot tell from speed what others were told."""
    drafter = NgramDrafter()
    drafter.begin(1, [1], salt="a")
    drafter.observe(1, [20, 21, 22, 23])
    drafter.end(1)
    for sequence_id, salt in ((2, "a"), (3, "b")):
        drafter.begin(sequence_id, [5], salt=salt)
        drafter.observe(sequence_id, [20, 21])
    assert proposal(drafter, sequence_id=2) == (22, 23)  # and nothing beyond the answer's end
    assert proposal(drafter, sequence_id=3) == ()
    forgetful = NgramDrafter(remember=False)
    forgetful.begin(1, [1])
    forgetful.observe(1, [20, 21, 22])
    forgetful.end(1)
    forgetful.begin(2, [20, 21])
    forgetful.observe(2, [20, 21])
    assert 22 not in proposal(forgetful, sequence_id=2)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TextIndex(keep=50)
    for i in range(1000):
        index.extend([i, i + 1])
        assert len(index.tokens) <= 100 and len(index._places) <= 200
    assert index.tokens[-1] == 1000 and index.find([999, 1000, 999, 1000]) == (0, 0)
    monkeypatch.setattr(ngram, "MAX_PAST", 40)
    drafter = NgramDrafter()
    for i in range(100):
        drafter.begin(i, [1], salt=str(i % (2 * MAX_SALTS)))
        drafter.observe(i, list(range(1000)))
        drafter.end(i)
    assert len(drafter._past) <= MAX_SALTS and not drafter._states
    assert all(len(past.tokens) <= 2_000 for past in drafter._past.values())


def test_a_lookup_costs_the_same_in_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one repeated token are the worst case of a search that goes back: comparisons are counted."""
    compared: list[int] = []
    real = TextIndex.common

    def counting(self: TextIndex, context: list[int], place: int) -> int:
        found = real(self, context, place)
        compared.append(found + 1)
        return found

    monkeypatch.setattr(TextIndex, "common", counting)
    index = TextIndex([7] * 20_000)
    index.find(index.tokens)
    assert sum(compared) <= 2 * NUM_PLACES * (MAX_MATCH + 1)


def test_an_edited_copy_goes_on_behind_the_word_that_was_changed() -> None:
    """One token for one: at the same place; one for three: behind the last token's twin nearby. A match of
    several tokens elsewhere is worth more than either, and after a while nothing is expected any more."""
    source = [*range(10, 22), *range(30, 42), *range(50, 62)]
    drafter = NgramDrafter(remember=False)
    drafter.begin(0, [*source, 1, 2])
    drafter.observe(0, source[:4])
    assert drafter.propose(0, 3) == Draft((14, 15, 16), 4)
    drafter.observe(0, [99])  # 14 became 99
    assert drafter.propose(0, 3) == Draft((15, 16, 17), 0)
    drafter.observe(0, [15])
    assert drafter.propose(0, 3) == Draft((16, 17, 18), 1)
    drafter.observe(0, [16])
    assert drafter.propose(0, 3) == Draft((17, 18, 19), 2)
    drafter.observe(0, [98])  # 17, 18 and 19 became 98
    drafter.observe(0, [20])
    assert drafter.propose(0, 3) == Draft((21, 30, 31), 1)
    drafter.observe(0, [50, 51])  # it went on elsewhere
    assert drafter.propose(0, 2) == Draft((52, 53), 2)
    drafter.observe(0, [200 + i for i in range(MAX_DRIFT + 1)])
    assert drafter.propose(0, 3) is None


def test_of_equal_matches_the_one_that_is_being_copied_wins() -> None:
    """Two places begin alike; the copy stays where it was, though the other one is later."""
    drafter = NgramDrafter(remember=False)
    drafter.begin(0, [5, 6, 7, 8, 70, 71, 72, 8, 9, 80, 81, 82, 8, 9, 90, 91, 1])
    drafter.observe(0, [71, 72, 8])
    drafter.propose(0, 1)
    drafter.observe(0, [9])
    assert drafter.propose(0, 2) == Draft((80, 81), 4, agreed=False)
