"""Masks against every string of small languages, walks against other judges, rollback against replay."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.constraint.compiler import ConstraintCompiler
from edgellm.constraint.matcher import Constraint
from edgellm.contracts import ConstraintKind, ConstraintSpec
from edgellm_models.errors import EngineError
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.base import Tokenizer, TokenKind
from tests.support.fake_engine import ByteTokenizer
from tests.support.schemas import allowed_ids, is_valid, schemas, text_bytes, walk
from tests.support.tiny_tokenizers import STYLES, make_tokenizer

LANGUAGE = (
    "true",
    "false",
    "null",
    "trübe",
    "日本",
    "日",
    "🫠",
    " the",
    "the",
    "a\tb",
    "<0x41>",
    "then",
    "t",
)
"""Strings that begin alike, end inside each other, and need bytes that no vocabulary has whole."""


@pytest.fixture(scope="module", params=STYLES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    for name, data in make_tokenizer(request.param).files.items():
        (folder / name).write_bytes(data)
    return load_tokenizer(folder, "safetensors", {})


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    """Of a model whose head has more rows than the tokenizer ids, and not whole bytes of them."""
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size + 13)


def lark(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.LARK, text)


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.REGEX, text)


def json_schema(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, text)


def test_masks_are_those_of_trying_every_token(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    """A token is allowed where its bytes go on towards some string of the language; where the grammar leaves
    no choice one spelling suffices."""
    spec = regex("|".join(re.escape(text) for text in LANGUAGE))
    strings = [text.encode() for text in LANGUAGE]
    rng = random.Random(5)
    for _ in range(40):
        constraint, done = compiler.compile(spec), b""
        while not constraint.is_finished:
            mask = allowed_ids(constraint.mask())
            expected = {
                i
                for i in range(tokenizer.vocab_size)
                if tokenizer.token_kind(i) not in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED)
                and tokenizer.token_bytes(i)
                and any(string.startswith(done + tokenizer.token_bytes(i)) for string in strings)
            }
            assert constraint.is_complete == (done in strings)
            ends = set(mask) & tokenizer.eos_ids
            assert ends == (tokenizer.eos_ids if done in strings else set())
            ordinary = set(mask) - ends
            assert ordinary <= expected and ordinary
            open_ways = [string for string in strings if string.startswith(done) and string != done]
            if len({string[len(done)] for string in open_ways}) > 1:
                assert ordinary == expected
            token_id = rng.choice(sorted(ordinary))
            constraint.advance([token_id])
            done += tokenizer.token_bytes(token_id)
        assert done in strings


@pytest.mark.parametrize(
    ("spec", "judge"),
    [
        (regex(r"[a-z]{1,3}( [0-9]{1,2}|é){0,3}"), r"[a-z]{1,3}( [0-9]{1,2}|é){0,3}"),
        (lark('start: "<" tag ">"\ntag: /[a-z]/ | "x" tag?'), r"<x*([a-z])?>"),
        (ConstraintSpec(ConstraintKind.GBNF, 'root ::= item ("," item)?\nitem ::= [0-9] | "日本"'),
         r"([0-9]|日本)(,([0-9]|日本))?"),
        (json_schema('{"enum": ["ä", "b c", null, 7]}'), r'"ä"|"b c"|null|7'),
        (regex(""), r""),
    ],
)  # fmt: skip
def test_walks_stay_in_the_language(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, spec: ConstraintSpec, judge: str
) -> None:
    rng = random.Random(3)
    ended = 0
    for _ in range(30):
        constraint = compiler.compile(spec)
        ids = walk(constraint, rng, 40)
        if constraint.is_finished:
            ended += 1
            assert re.fullmatch(judge, text_bytes(tokenizer, ids).decode())
    assert ended > 20


def test_walks_through_schemas_validate(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    import json

    rng = random.Random(11)
    ended = 0
    for schema in schemas(100, seed=2):
        constraint = compiler.compile(json_schema(json.dumps(schema)))
        ids = walk(constraint, rng, 150)
        if constraint.is_finished:
            ended += 1
            text = text_bytes(tokenizer, ids).decode()
            assert is_valid(schema, text), (schema, text)
    assert ended > 80


def test_no_id_without_text_is_ever_allowed(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    """Control and unknown tokens, and rows behind the vocabulary, not even where every text is allowed."""
    constraint = compiler.compile(regex(r"(?s:.*)"))
    assert len(allowed_ids(constraint.mask())) > 200
    rng = random.Random(1)
    for _ in range(20):
        mask = allowed_ids(constraint.mask())
        assert max(mask) < tokenizer.vocab_size
        for token_id in set(mask) - tokenizer.eos_ids:
            assert tokenizer.token_kind(token_id) not in (TokenKind.CONTROL, TokenKind.UNKNOWN)
        constraint.advance([rng.choice([i for i in mask if i not in tokenizer.eos_ids])])


def test_characters_outside_the_vocabulary_come_in_bytes(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    text = "𝔘ҙ🫠"
    constraint = compiler.compile(regex(text))
    ids = walk(constraint, random.Random(0), 30)
    assert constraint.is_finished and text_bytes(tokenizer, ids).decode() == text


# --- one constraint's states ---


@pytest.fixture(scope="module")
def byte_compiler() -> ConstraintCompiler:
    return ConstraintCompiler(_Bytes(), 258)  # type: ignore[arg-type]


class _Bytes(ByteTokenizer):
    """A byte is a token; parts are encoded as text is."""

    def encode_parts(self, parts: tuple[object, ...], *, add_bos: bool = True) -> list[int]:
        return [byte for part in parts for byte in getattr(part, "text", "").encode()]


def test_the_end_is_where_nothing_more_may_follow(byte_compiler: ConstraintCompiler) -> None:
    constraint = byte_compiler.compile(regex("ab?"))
    assert not constraint.is_complete and not constraint.is_finished
    constraint.advance(b"a")
    assert constraint.is_complete and not constraint.is_finished
    assert allowed_ids(constraint.mask()) == [ord("b"), 256]
    assert allowed_ids(constraint.mask(may_end=False)) == [ord("b")]
    ended = constraint.fork()
    ended.advance([256])
    assert ended.is_finished and not constraint.is_finished
    constraint.advance(b"b")
    assert constraint.is_finished and constraint.num_tokens == 2
    for state, token_id in ((ended, ord("b")), (constraint, ord("a"))):
        with pytest.raises(EngineError, match="breaks the constraint"):
            state.advance([token_id])
        assert state.is_finished


def test_what_is_not_allowed_changes_nothing(byte_compiler: ConstraintCompiler) -> None:
    constraint = byte_compiler.compile(regex("abc|abd"))
    before = constraint.mask()
    with pytest.raises(EngineError, match="place 2 of the answer"):
        constraint.advance(b"abx")
    assert constraint.num_tokens == 0 and constraint.mask() == before
    assert constraint.accepts(b"abx") == 2 and constraint.accepts(b"abd") == 3
    constraint.advance(b"abd")
    assert constraint.is_finished


def test_masks_behind_a_draft_are_those_of_going_there(byte_compiler: ConstraintCompiler) -> None:
    spec = json_schema('{"type": "array", "items": {"type": "integer"}, "maxItems": 2}')
    constraint = byte_compiler.compile(spec)
    constraint.advance(b"[1")
    expected = []
    for count in range(5):
        other = byte_compiler.compile(spec)
        other.advance(b"[1" + b",23]"[:count])
        expected.append(other.mask())
    before = constraint.mask()
    assert constraint.masks(b",23]") == expected
    assert constraint.masks(b",x3]") == expected[:2]
    assert constraint.masks(b",23]]") == expected
    assert (constraint.mask(), constraint.num_tokens) == (before, 2)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rollback_equals_replay(byte_compiler: ConstraintCompiler, data: st.DataObject) -> None:
    """After any way there, forward and back, a state is that of a fresh constraint given the same tokens."""
    spec = data.draw(st.sampled_from([
        regex("(ab|a|ba)*c?"),
        json_schema('{"type": "object", "properties": {"k": {"items": {"enum": ["x", "xy"]}}}}'),
        lark('start: "(" start ")" | word\nword: /[a-c]{1,3}/ ("," word)?'),
        json_schema("{}"),
    ]))  # fmt: skip
    constraint, tokens = byte_compiler.compile(spec), []
    for _ in range(data.draw(st.integers(1, 25))):
        if tokens and (constraint.is_finished or data.draw(st.booleans())):
            back = data.draw(st.integers(1, len(tokens)))
            constraint.rollback(back)
            del tokens[-back:]
        else:
            allowed = allowed_ids(constraint.mask())
            preferred = [i for i in allowed if chr(i) in 'abcxyk"{}[]():,' or i == 256] or allowed
            token_id = data.draw(st.sampled_from(preferred))
            constraint.advance([token_id])
            tokens.append(token_id)
        fresh = byte_compiler.compile(spec)
        fresh.advance(tokens)
        assert _state(constraint) == _state(fresh)
    assert constraint.num_tokens == len(tokens)


def _state(constraint: Constraint) -> tuple[bytes, bytes, bool, bool]:
    masks = constraint.mask(), constraint.mask(may_end=False)
    return *masks, constraint.is_complete, constraint.is_finished


def test_forks_go_their_own_ways(byte_compiler: ConstraintCompiler) -> None:
    parent = byte_compiler.compile(regex("(ab|cd)*e"))
    parent.advance(b"ab")
    child = parent.fork()
    child.advance(b"cd")
    parent.advance(b"e")
    assert parent.is_finished and not child.is_finished
    child.rollback(4)
    assert allowed_ids(child.mask()) == sorted(b"ace")


def test_a_model_without_end_ids_ends_where_nothing_may_follow() -> None:
    class Endless(_Bytes):
        eos_ids: frozenset[int] = frozenset()

    compiler = ConstraintCompiler(Endless(), 258)  # type: ignore[arg-type]
    constraint = compiler.compile(regex("ab?"))
    constraint.advance(b"a")
    assert allowed_ids(constraint.mask()) == [ord("b")]
    constraint.advance(b"b")
    assert constraint.is_finished and allowed_ids(constraint.mask()) == []


def test_every_end_id_ends(tmp_path: Path) -> None:
    class TwoEnds(_Bytes):
        eos_ids = frozenset({256, 257})

    compiler = ConstraintCompiler(TwoEnds(), 264)  # type: ignore[arg-type]
    for end_id in (256, 257):
        constraint = compiler.compile(regex("a+"))
        constraint.advance(b"aa")
        assert {256, 257} <= set(allowed_ids(constraint.mask()))
        constraint.advance([end_id])
        assert constraint.is_finished


def test_a_grammar_that_becomes_too_complex_is_an_error_not_a_free_pass(
    byte_compiler: ConstraintCompiler,
) -> None:
    """An expression of half a million states may be refused at once or on the way; never let through."""
    from edgellm_models.errors import BadInputError

    with pytest.raises((BadInputError, EngineError), match=r"cannot (be used|go on)"):
        constraint = byte_compiler.compile(regex("((a{100}){100}){50}"))
        for _ in range(100):
            assert allowed_ids(constraint.mask()) == [ord("a")]
            constraint.advance(b"a")
