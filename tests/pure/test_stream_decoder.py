"""The incremental decoder: append-only, prompt, never half a character, equal to the decode of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.base import Tokenizer, TokenKind
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.vocabularies import bpe_fields, spm_fields


@cache
def tokenizers() -> dict[str, Tokenizer]:
    made = {"bpe": bpe_fields(), "spm": spm_fields(), "spm_bare": spm_fields(add_space_prefix=False)}
    return {name: load_tokenizer(Path("x"), "gguf", fields) for name, fields in made.items()}


def byte_id(tokenizer: Tokenizer, value: int) -> int:
    return next(
        i
        for i in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(i) == bytes([value])
        and tokenizer.token_kind(i) in (TokenKind.BYTE, TokenKind.NORMAL)
    )


def stream(tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], **options: bool) -> list[str]:
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.push(push) for push in pushes), decoder.finish()]


def test_invalid_bytes_are_replaced_and_hold_nothing_back() -> None:
    """A02: one U+FFFD per maximal invalid part; what follows arrives at once."""
    tokenizer = tokenizers()["spm_bare"]
    hello, end = tokenizer.token_id("▁hello"), tokenizer.token_id("▁end")
    assert hello is not None and end is not None
    lead, tail, never = (byte_id(tokenizer, b) for b in (0xE2, 0x80, 0xFF))
    chain = [lead, hello, tail, never, end]
    assert stream(tokenizer, [[i] for i in chain]) == ["", "\ufffd hello", "\ufffd", "\ufffd", " end", ""]
    assert tokenizer.decode(chain) == b"\xe2 hello\x80\xff end".decode("utf-8", "replace")


def test_incomplete_tail_is_one_replacement_character_at_the_end() -> None:
    """A02: an answer cut inside an emoji ends with one U+FFFD and never waits for ever."""
    for tokenizer in tokenizers().values():
        ids = [byte_id(tokenizer, b) for b in "😀".encode()[:3]]
        assert stream(tokenizer, [[i] for i in ids]) == ["", "", "", "\ufffd"]


def test_dummy_space_is_removed_exactly_once() -> None:
    """A05: of a SentencePiece text one leading space is a dummy; a second one is real. Byte-level BPE has
    none."""
    spm = tokenizers()["spm"]
    ids = [spm.token_id("▁"), spm.token_id("▁leading"), spm.token_id("▁x")]
    assert spm.decode(ids) == " leading x"  # type: ignore[arg-type]
    assert stream(spm, [[i] for i in ids]) == ["", " leading", " x", ""]  # type: ignore[list-item]
    assert spm.decode(ids[1:]) == "leading x"  # type: ignore[arg-type]
    bare = tokenizers()["spm_bare"]
    assert bare.decode(ids[1:]) == " leading x"  # type: ignore[arg-type]
    bpe = tokenizers()["bpe"]
    text = " leading  x"
    assert bpe.decode(bpe.encode(text, add_special=False)) == text
    assert "".join(stream(bpe, [[i] for i in bpe.encode(text, add_special=False)])) == text


def test_continued_text_keeps_its_first_space() -> None:
    """A05: in a raw completion the answer goes on where the prompt ends, so that its first space is real."""
    spm = tokenizers()["spm"]
    ids = [spm.token_id("▁leading"), spm.token_id("▁x")]
    assert "".join(stream(spm, [[i] for i in ids], continues_text=True)) == " leading x"  # type: ignore[list-item]


def test_no_space_appears_around_special_tokens() -> None:
    """A06: user-defined tags are text; the space after a tag belongs to the word."""
    spm = tokenizers()["spm"]
    chain = [spm.token_id(t) for t in ("<tag>", "▁analysis", "</tag>", "▁final")]
    assert spm.decode(chain, show_special=True) == "<tag> analysis</tag> final"  # type: ignore[arg-type]
    control = [spm.token_id("<s>"), *chain, spm.token_id("</s>")]
    assert spm.decode(control, show_special=True) == "<s><tag> analysis</tag> final</s>"  # type: ignore[arg-type]
    assert spm.decode(control) == "<tag> analysis</tag> final"  # type: ignore[arg-type]
    assert "".join(stream(spm, [[i] for i in control])) == "<tag> analysis</tag> final"  # type: ignore[list-item]
    # The dummy space is looked for in what is shown: hidden BOS does not shield it, shown BOS does.
    word = [spm.token_id("<s>"), spm.token_id("▁x")]
    assert spm.decode(word) == "x"  # type: ignore[arg-type]
    assert spm.decode(word, show_special=True) == "<s> x"  # type: ignore[arg-type]


def test_each_character_leaves_in_the_push_that_completes_it() -> None:
    """A16: no burst at word borders; only an incomplete byte tail waits."""
    for tokenizer in tokenizers().values():
        text = "abcdefgh"
        ids = [byte_id(tokenizer, ord(c)) for c in text]
        assert stream(tokenizer, [[i] for i in ids]) == [*text, ""]
        euro = [byte_id(tokenizer, b) for b in "a€b".encode()]
        assert stream(tokenizer, [[i] for i in euro]) == ["a", "", "", "€", "b", ""]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_split_gives_the_decode_of_the_whole(data: st.DataObject) -> None:
    """A02 A05 A06 A16: any ids (bytes, specials, ids beyond the vocabulary), any grouping of the pushes."""
    tokenizer = tokenizers()[data.draw(st.sampled_from(sorted(tokenizers())))]
    size = tokenizer.vocab_size
    single = [i for i in range(size) if len(tokenizer.token_bytes(i)) == 1]
    special = [i for i in range(size) if tokenizer.token_kind(i) is not TokenKind.NORMAL]
    one = st.one_of(
        st.sampled_from(single),
        st.sampled_from(special),
        st.integers(0, size - 1),
        st.integers(size, size + 9),
    )
    pushes = data.draw(st.lists(st.lists(one, max_size=4), max_size=12))
    ids = [i for push in pushes for i in push]
    for show in (False, True):
        pieces = stream(tokenizer, pushes, show_special=show)
        assert "".join(pieces) == tokenizer.decode(ids, show_special=show)
        shown = b"".join(
            tokenizer.token_bytes(i)
            for i in ids
            if show or tokenizer.token_kind(i) not in (TokenKind.CONTROL, TokenKind.UNKNOWN)
        )
        if tokenizer.strips_leading_space:
            shown = shown.removeprefix(b" ")
        assert "".join(pieces) == shown.decode("utf-8", "replace")
        for piece in pieces[:-1]:
            piece.encode("utf-8")  # whole characters only


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["bpe", "spm", "spm_bare"]), st.booleans())
def test_any_text_comes_back(text: str, name: str, parse: bool) -> None:
    """Encoding and decoding lose nothing but what SentencePiece spells a space with."""
    text = text.replace("▁", "_")
    tokenizer = tokenizers()[name]
    ids = tokenizer.encode(text, add_special=False, parse_special=parse)
    assert tokenizer.decode(ids, show_special=True) == text
    assert "".join(stream(tokenizer, [[i] for i in ids], show_special=True)) == text


@pytest.mark.parametrize("name", ["bpe", "spm", "spm_bare"])
def test_pushes_of_nothing(name: str) -> None:
    decoder = StreamDecoder(tokenizers()[name])
    assert decoder.push([]) == decoder.finish() == ""
