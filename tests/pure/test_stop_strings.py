"""Stop strings over token borders: what is shown never depends on how the text was cut, and nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.contracts import FinishReason, SamplingParams
from edgellm.engine.answer import Answer
from edgellm.engine.stop_strings import StopStrings
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_engine import END_ID, ByteTokenizer

ENDS = frozenset({END_ID})


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Character by character: the answer ends at the first character at which any stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def play(pieces: list[str], stop: list[str]) -> tuple[list[str], str | None]:
    strings = StopStrings(stop)
    shown = [strings.push(piece) for piece in pieces]
    return [*shown, strings.finish()], strings.matched


@given(
    st.lists(st.text("ab<>", max_size=4), max_size=12),
    st.lists(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_shown_text_does_not_depend_on_the_pieces(pieces: list[str], stop: list[str]) -> None:
    shown, matched = play(pieces, stop)
    assert ("".join(shown), matched) == reference("".join(pieces), stop)


@given(st.text("abX", max_size=20), st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    """G04, A16: after every character, all of the text but the longest possible beginning of a stop string
    is out.
    """
    strings = StopStrings(stop)
    shown = ""
    for i, character in enumerate(text):
        shown += strings.push(character)
        if strings.matched:
            break
        held = text[len(shown) : i + 1]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


def test_the_string_that_is_complete_first_wins() -> None:
    assert play(["a", "bc"], ["abc", "b"]) == (["", "a", ""], "b")
    assert play(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


def answer(sampling: SamplingParams, limit: int = 100) -> Answer:
    return Answer(StreamDecoder(ByteTokenizer()), sampling, ENDS, limit, 258)


def run(
    ids: list[int], sampling: SamplingParams, burst: int, limit: int
) -> tuple[list[int], str, object, int]:
    one = answer(sampling, limit)
    kept: list[int] = []
    text = ""
    for i in range(0, len(ids), burst):
        step = one.push(ids[i : i + burst])
        kept += step.token_ids
        text += step.text
        if step.finish_reason is not None:
            return kept, text, step.finish_reason, one.num_tokens
    return kept, text + one.finish(), None, one.num_tokens


@pytest.mark.parametrize("end", ["eos", "length"])
def test_a_held_beginning_comes_before_the_end(end: str) -> None:
    """G04: the output ends with XY by an end id and by the limit while XYZW is a stop string."""
    one = answer(SamplingParams(stop=("XYZW",)), limit=4 if end == "length" else 100)
    ids = [*b"okXY"] + ([END_ID] if end == "eos" else [])
    steps = [one.push([token_id]) for token_id in ids]
    assert "".join(step.text for step in steps) == "okXY"
    assert steps[-1].finish_reason is (FinishReason.STOP if end == "eos" else FinishReason.LENGTH)
    assert [step.text for step in steps[:3]] == ["o", "k", ""]


def test_a_held_beginning_that_turns_out_harmless_comes_at_once() -> None:
    """G04: only real prefixes are held."""
    one = answer(SamplingParams(stop=("XYZW",)))
    assert [one.push([b]).text for b in b"XYZ!X"] == ["", "", "", "XYZ!", ""]
    assert one.finish() == "X"


def test_each_completed_character_leaves_in_its_step() -> None:
    """A16: nothing is held but incomplete characters, with stop strings that cannot begin there as well."""
    for stop in ((), ("ZZ",)):
        one = answer(SamplingParams(stop=stop))
        assert [one.push([b]).text for b in "aé😊b".encode()] == ["a", "", "é", "", "", "", "😊", "b"]


def test_tokens_after_the_end_are_discarded() -> None:
    one = answer(SamplingParams(stop=("lo",)))
    step = one.push([*b"hello world"])
    assert (step.token_ids, step.text, step.finish_reason) == (tuple(b"hello"), "hel", FinishReason.STOP)
    assert one.num_tokens == 5


def test_ignore_eos() -> None:
    """D11: with ignore_eos no end id of the model ends the answer, ``stop`` and ``stop_token_ids`` still
    do.
    """
    ids = [104, END_ID, *b"ello ab"]
    assert run(ids, SamplingParams(ignore_eos=True), 3, 8)[2:] == (FinishReason.LENGTH, 8)
    assert run(ids, SamplingParams(), 3, 8) == ([104, END_ID], "h", FinishReason.STOP, 2)
    kept, text, reason, _ = run(ids, SamplingParams(ignore_eos=True, stop=("lo",)), 3, 50)
    assert (kept, text, reason) == (ids[:6], "hel", FinishReason.STOP)
    stopped = run(ids, SamplingParams(ignore_eos=True, stop_token_ids=(111,)), 3, 50)
    assert stopped == (ids[:6], "hell", FinishReason.STOP, 6)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert run([104, 300, 105], SamplingParams(), 1, 3) == ([104, 300, 105], "hi", FinishReason.LENGTH, 3)


@given(
    st.lists(st.sampled_from([*"ab😊".encode(), END_ID]), max_size=25),
    st.lists(st.text("ab😊\ufffd", min_size=1, max_size=3), max_size=2),
    st.integers(1, 30),
    st.booleans(),
    st.integers(2, 7),
)
def test_bursts_end_where_single_tokens_end(
    ids: list[int], stop: list[str], limit: int, ignore_eos: bool, burst: int
) -> None:
    sampling = SamplingParams(stop=tuple(stop), ignore_eos=ignore_eos)
    assert run(ids, sampling, burst, limit) == run(ids, sampling, 1, limit)
