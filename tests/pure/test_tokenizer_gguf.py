"""Tokenizers from GGUF fields: special tokens, BOS, end ids, and every way in which the fields can be
wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.base import Tokenizer, TokenKind
from tests.support.vocabularies import bpe_fields, spm_fields

K = "tokenizer.ggml."


def load(fields: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Path("x.gguf"), "gguf", fields)


@pytest.fixture(params=["bpe", "spm"])
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "bpe":
        return bpe_fields("llama-bpe")
    extra = (("<|im_start|>", 3), ("<|im_end|>", 3), ("<think>", 4))
    return spm_fields(add_space_prefix=False, extra=extra)


def test_parse_special_off_gives_ordinary_ids_only(fields: dict[str, Any]) -> None:
    """A08: for control and for user-defined tokens, at the start, inside and twice in a row."""
    tokenizer = load(fields)
    special = {TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN}
    for token in ("<|im_start|>", "<think>"):
        token_id = tokenizer.token_id(token)
        for text in (f"{token}hi", f"hi{token}", f"a {token}{token} b", token):
            on = tokenizer.encode(text, add_special=False)
            off = tokenizer.encode(text, add_special=False, parse_special=False)
            assert on.count(token_id) == text.count(token)
            assert not any(tokenizer.token_kind(i) in special for i in off), (text, off)
            assert tokenizer.decode(off) == text
            assert tokenizer.decode(on, show_special=True) == text


def test_control_token_taken_whole_by_ignore_merges_is_still_text() -> None:
    """A08: with ignore_merges a word is looked up in the vocabulary, where control tokens are too."""
    fields = bpe_fields("llama-bpe")
    fields[K + "tokens"] = [*fields[K + "tokens"], "@@@@"]
    fields[K + "token_type"] = [*fields[K + "token_type"], 3]
    tokenizer = load(fields)
    token_id = tokenizer.token_id("@@@@")
    assert tokenizer.encode("@@@@", add_special=False) == [token_id]
    off = tokenizer.encode("@@@@", add_special=False, parse_special=False)
    assert token_id not in off
    assert tokenizer.decode(off) == "@@@@"


def test_exactly_one_bos(fields: dict[str, Any]) -> None:
    """A09: also when the text begins with BOS, and none when the text only looks so."""
    fields[K + "add_bos_token"] = True
    tokenizer = load(fields)
    bos = tokenizer.bos_id
    assert bos is not None
    text = tokenizer.token_text(bos)
    assert tokenizer.encode("hello")[0] == bos
    assert tokenizer.encode(text + "hello").count(bos) == 1
    assert tokenizer.encode("").count(bos) == 1
    assert tokenizer.encode(text + "hello", add_special=False).count(bos) == 1
    literal = tokenizer.encode(text + "hello", parse_special=False)
    assert literal.count(bos) == 1 and literal[0] == bos
    assert tokenizer.encode_parts([text, "hello"]).count(bos) == 1
    assert tokenizer.encode_parts(["hello"]).count(bos) == 1
    assert tokenizer.encode_parts(["hello"], add_bos=False).count(bos) == 0


def test_eos_is_added_when_the_file_says_so(fields: dict[str, Any]) -> None:
    fields[K + "add_eos_token"] = True
    tokenizer = load(fields)
    eos = fields[K + "eos_token_id"]
    assert tokenizer.encode("hello")[-1] == eos
    assert tokenizer.encode("hello" + tokenizer.token_text(eos)).count(eos) == 1
    assert eos not in tokenizer.encode("hello", add_special=False)


def test_flags_without_ids_are_a_notice() -> None:
    fields = bpe_fields()
    for key in ("bos_token_id", "eos_token_id"):
        del fields[K + key]
    fields[K + "add_bos_token"] = fields[K + "add_eos_token"] = True
    tokenizer = load(fields)
    assert not tokenizer.add_bos and not tokenizer.add_eos
    assert [notice.kind for notice in tokenizer.notices] == ["no_bos", "no_eos"]


def test_end_ids_come_from_fields_and_from_text() -> None:
    fields = bpe_fields(user_defined=("<|eot_id|>",))
    tokenizer = load(fields)
    ends = {tokenizer.token_text(i) for i in tokenizer.eos_ids}
    # Found by text among control tokens; the user-defined one only looks like an end.
    assert ends == {"<|im_end|>", "<|endoftext|>"}
    fields[K + "eot_token_id"] = tokenizer.token_id("<|eot_id|>")
    fields[K + "eom_token_id"] = 7
    assert load(fields).eos_ids == tokenizer.eos_ids | {7, tokenizer.token_id("<|eot_id|>")}


def test_half_a_surrogate_pair_becomes_the_replacement_character(fields: dict[str, Any]) -> None:
    """A15: from a JSON escape; whole pairs are joined."""
    tokenizer = load(fields)
    assert tokenizer.decode(tokenizer.encode("a \ud83d", add_special=False)) == "a \ufffd"
    assert tokenizer.decode(tokenizer.encode("\ude00b", add_special=False)) == "\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00", add_special=False)) == "😀"
    assert tokenizer.decode(tokenizer.encode("\udc80", add_special=False, parse_special=False)) == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_bytes(fields: dict[str, Any]) -> None:
    """Models pad their embedding; such an id may be sampled and must not crash a stream."""
    tokenizer = load(fields)
    for token_id in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert tokenizer.token_kind(token_id) is TokenKind.UNUSED
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_kinds(fields: dict[str, Any]) -> None:
    tokenizer = load(fields)
    kinds = {tokenizer.token_kind(i) for i in range(tokenizer.vocab_size)}
    assert {TokenKind.NORMAL, TokenKind.CONTROL, TokenKind.USER_DEFINED} <= kinds
    assert tokenizer.vocab_size == len(fields[K + "tokens"])


# --- SentencePiece
# ----------------------------------------------------------------------------------------------


def test_dummy_prefix_and_byte_fallback() -> None:
    tokenizer = load(spm_fields())
    pieces = [tokenizer.token_text(i) for i in tokenizer.encode("hello é", add_special=False)]
    assert pieces == ["▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"
    bare = load(spm_fields(add_space_prefix=False))
    pieces = [bare.token_text(i) for i in bare.encode("hello é", add_special=False)]
    assert pieces == ["he", "llo", "▁", "<0xC3>", "<0xA9>"]
    assert bare.decode(bare.encode("hello é")) == "hello é"


def test_user_defined_tokens_are_whole_and_literal_text_joins_its_neighbours() -> None:
    from edgellm_models.tokenizer.base import LiteralText

    tokenizer = load(spm_fields(add_space_prefix=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<tag>hell", add_special=False)] == [
        "<tag>",
        "he",
        "ll",
    ]
    parts = tokenizer.encode_parts([" he", LiteralText("llo"), " <tag>", LiteralText("<tag>")], add_bos=False)
    assert parts[:2] == [*tokenizer.encode(" hello", add_special=False)[:1], tokenizer.token_id("▁")]
    assert parts.count(tokenizer.token_id("<tag>")) == 1


def test_phi3_tokens_swallow_white_space() -> None:
    """GGUF has no field for it; llama.cpp goes by the name, and Phi-3's own files say the same."""
    fields = spm_fields(extra=(("<|user|>", 3), ("<|end|>", 3)))
    fields["general.name"] = "Phi-3 mini"
    swallowing, keeping = load(fields), load(spm_fields(extra=(("<|user|>", 3), ("<|end|>", 3))))
    assert swallowing.encode("<|user|>\n hello") == swallowing.encode("<|user|>hello")
    assert keeping.encode("<|user|>\n hello") != keeping.encode("<|user|>hello")
    assert swallowing.encode("<s>\nhello") != swallowing.encode("<s>hello")


def test_vocabulary_without_byte_tokens_uses_unknown() -> None:
    fields = spm_fields()
    keep = [i for i, kind in enumerate(fields[K + "token_type"]) if kind != 6]
    for name in ("tokens", "token_type", "scores"):
        fields[K + name] = [fields[K + name][i] for i in keep]
    tokenizer = load(fields)
    assert tokenizer.encode("é", add_special=False)[-1] == tokenizer.unk_id == 0


# --- what can be wrong
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", ["<0x-1>", "<0xZZ>", "<0x1>", "<0x100>", "<0x1 >", "0x41", "<0X41>", "<0x\u0661\u0661>"]
)
def test_malformed_byte_tokens_are_refused(spelling: str) -> None:
    """C07: never a lax hexadecimal parse, never a negative index; the digits are ASCII."""
    fields = spm_fields(extra=((spelling, 6),))
    with pytest.raises(BadInputError, match="type BYTE"):
        load(fields)
    # As an ordinary token the same spelling is only text.
    assert load(spm_fields(extra=((spelling, 1),))).token_id(spelling) is not None


def test_two_tokens_for_one_byte_are_refused() -> None:
    with pytest.raises(BadInputError, match="byte 255 has two tokens"):
        load(spm_fields(extra=(("<0xff>", 6),)))


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(fields: dict[str, Any]) -> None:
        if value is None:
            fields.pop(K + key, None)
        else:
            fields[K + key] = value(fields[K + key]) if callable(value) else value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("model", None), "model is missing"),
        (change("model", "bert"), "'bert'.*not supported"),
        (change("tokens", None), "tokens is missing"),
        (change("tokens", []), "for 0 tokens"),
        (change("tokens", "abc"), "must be an array, not str"),
        (change("tokens", lambda v: [*v[:-1], 7]), r"tokens\[\d+\] must be str, not int"),
        (change("tokens", lambda v: [*v[:-1], v[20]]), "in the vocabulary twice, as id 20 and id"),
        (change("tokens", lambda v: [*v[:-1], "x" * 70_000]), "has 70000 characters"),
        (change("token_type", lambda v: v[:-1]), "entries for"),
        (change("token_type", lambda v: [*v[:-1], "normal"]), "must be int, not str"),
        (change("bos_token_id", 10**9), "bos_token_id is 1000000000, outside the vocabulary"),
        (change("eos_token_id", -5), "outside the vocabulary"),
        (change("eos_token_id", "</s>"), "must be a token id"),
        (change("add_bos_token", "yes"), "must be true or false"),
    ],
)
def test_damaged_fields_are_one_clear_line(
    fields: dict[str, Any], damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    damage(fields)
    with pytest.raises(BadInputError, match=message) as caught:
        load(fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("merges", None), "without merges"),
        (change("merges", []), "without merges"),
        (change("merges", lambda v: [*v, "ab"]), "not two parts"),
        (change("merges", lambda v: [*v, "ab "]), "not two parts"),
        (change("merges", lambda v: [*v, "qqq zzz"]), "needs 'qqq', which is not in the vocabulary"),
        (change("pre", 7), "pre must be a name"),
    ],
)
def test_damaged_bpe_fields(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    fields = bpe_fields()
    damage(fields)
    with pytest.raises(BadInputError, match=message):
        load(fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("scores", None), "scores is missing"),
        (change("scores", lambda v: v[:-3]), "entries for"),
        (change("scores", lambda v: [*v[:-1], float("nan")]), "not a finite number"),
        (change("scores", lambda v: [*v[:-1], 1e39]), "not a finite number"),
        (change("add_space_prefix", "no"), "must be true or false"),
    ],
)
def test_damaged_sentencepiece_fields(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    fields = spm_fields()
    damage(fields)
    with pytest.raises(BadInputError, match=message):
        load(fields)


def test_sentencepiece_needs_an_unknown_token() -> None:
    fields = spm_fields()
    fields[K + "token_type"][0] = 1
    del fields[K + "unknown_token_id"]
    with pytest.raises(BadInputError, match="no unknown token"):
        load(fields)


def test_absent_ids_are_not_invented() -> None:
    """Converters write 2**32 - 1 for "none"; without the field a BPE vocabulary has no BOS."""
    fields = bpe_fields()
    fields[K + "bos_token_id"] = 0xFFFFFFFF
    assert load(fields).bos_id is None
    del fields[K + "bos_token_id"]
    assert load(fields).bos_id is None


def test_empty_entries_are_kept_in_place() -> None:
    fields = spm_fields(extra=(("", 5), ("", 5), ("after", 1)))
    tokenizer = load(fields)
    assert tokenizer.token_id("after") == tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(tokenizer.vocab_size - 2) == b""
