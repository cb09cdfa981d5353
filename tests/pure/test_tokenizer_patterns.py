"""Every pre-tokenizer against a pipeline of the tokenizers library written down from the published
tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tests.support.corpus import corpus_blocks, corpus_lines
from tests.support.vocabularies import bpe_fields, trained_bpe

FIELD_REPORT_TEXT = "12345 I'LL\r\n\r\n  x\té中文 🫠"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def published(name: str) -> tuple[list[Any], bool, bool]:
    """(pre-tokenizer steps, NFC, ignore_merges) as the named family's tokenizer.json has them."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Split

    def split(pattern: str) -> Any:
        return Split(Regex(pattern), "isolated")

    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    raw = ByteLevel(add_prefix_space=False, use_regex=False)
    table: dict[str, tuple[list[Any], bool, bool]] = {
        "gpt-2": ([gpt2], False, False),
        "smollm": ([Digits(individual_digits=True), gpt2], False, False),
        "refact": ([Digits(individual_digits=True), gpt2], False, False),
        "starcoder": ([Digits(individual_digits=True), gpt2], False, False),
        "command-r": ([Digits(individual_digits=True), gpt2], True, False),
        "llama-bpe": ([split(LLAMA3), raw], False, True),
        "llama3": ([split(LLAMA3), raw], False, True),
        "qwen2": ([split(QWEN2), raw], True, False),
        "deepseek-r1-qwen": ([split(QWEN2), raw], True, False),
        "qwen35": ([split(QWEN35), raw], True, False),
        "tekken": ([split(TEKKEN), raw], False, True),
        "gpt-4o": ([split(O200K), raw], False, False),
        "deepseek-coder": (
            [
                split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(r"[一-龥ࠀ-一가-퟿]+"),
                Digits(individual_digits=True), raw,
            ],
            False,
            False,
        ),
        "deepseek-v3": (
            [split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), raw], False, False,
        ),
    }  # fmt: skip
    if name == "falcon":
        steps = [Punctuation("contiguous"), gpt2, Digits(individual_digits=False), split("[0-9][0-9][0-9]")]
        return steps, False, False
    return table[name]


NAMES = (
    "gpt-2", "smollm", "refact", "starcoder", "command-r", "llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen",
    "qwen35", "tekken", "gpt-4o", "deepseek-coder", "deepseek-v3",
)  # fmt: skip


def pipeline(name: str) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    steps, nfc, ignore_merges = published(name)
    pieces, merges = trained_bpe()
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_the_published_pipeline(name: str) -> None:
    """A11, A17: every family is cut, composed and merged as its makers do, on every line and across line
    ends."""
    ours = load_tokenizer(Path("x.gguf"), "gguf", bpe_fields(name))
    theirs = pipeline(name)
    texts = [FIELD_REPORT_TEXT, *corpus_lines(), *corpus_blocks()]
    wrong = [text for text in texts if ours.encode(text, add_special=False) != theirs.encode(text).ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, first {wrong[0]!r}"


def test_the_families_differ_on_the_corpus() -> None:
    """Guards the test above: a corpus on which two families agree could not tell them apart."""
    seen: dict[tuple[int, ...], str] = {}
    for name in (
        "gpt-2",
        "smollm",
        "llama-bpe",
        "qwen2",
        "qwen35",
        "tekken",
        "gpt-4o",
        "deepseek-coder",
        "deepseek-v3",
    ):
        ours = load_tokenizer(Path("x.gguf"), "gguf", bpe_fields(name))
        ids = tuple(i for text in corpus_blocks() for i in ours.encode(text, add_special=False))
        assert ids not in seen, f"{name} and {seen[ids]} cut the corpus alike"
        seen[ids] = name


def test_falcon_like_sequence() -> None:
    """A11: several steps one after the other, each cutting what the one before left.

    Falcon's file looks for digits after bytes became characters, where some bytes look like digits; its
    vocabulary was trained so, but this one was not, hence ASCII only.
    """
    ours = load_tokenizer(Path("x.gguf"), "gguf", bpe_fields("falcon"))
    theirs = pipeline("falcon")
    lines = [line for line in corpus_lines() if line.isascii()]
    assert len(lines) > 150
    wrong = [line for line in lines if ours.encode(line, add_special=False) != theirs.encode(line).ids]
    assert not wrong, f"{len(wrong)} of {len(lines)} differ, first {wrong[0]!r}"


def test_unknown_name_lists_the_known_ones() -> None:
    """A11: never silently another family's splitting."""
    with pytest.raises(BadInputError, match=r"'mystery'.*known are:.*llama-bpe.*qwen2.*smollm"):
        load_tokenizer(Path("x.gguf"), "gguf", bpe_fields("mystery"))


def test_missing_name_is_a_notice() -> None:
    fields = bpe_fields(None)
    tokenizer = load_tokenizer(Path("x.gguf"), "gguf", fields)
    assert [notice.kind for notice in tokenizer.notices] == ["pre_tokenizer_missing"]
    named = load_tokenizer(Path("x.gguf"), "gguf", bpe_fields("default"))
    assert tokenizer.encode(FIELD_REPORT_TEXT) == named.encode(FIELD_REPORT_TEXT)
    assert named.notices == ()


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_known_name_loses_nothing(name: str) -> None:
    import unicodedata

    tokenizer = load_tokenizer(Path("x.gguf"), "gguf", bpe_fields(name))
    for text in corpus_blocks():
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == expected
