"""The fixtures' tokenizers: the same every time, in their family's manner, one in both of their forms."""

from __future__ import annotations

import json

import pytest

from tests.support.tiny_styles import BPE_STYLES, SPM_STYLES
from tests.support.tiny_text import SAMPLE_TEXTS
from tests.support.tiny_tokenizers import STYLES, byte_alphabet, make_tokenizer


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_the_same_every_time(style: str) -> None:
    from tests.support import tiny_tokenizers

    first = make_tokenizer(style)
    tiny_tokenizers._trained_bpe.cache_clear()
    tiny_tokenizers._trained_spm.cache_clear()
    assert make_tokenizer(style) == first
    assert len(set(first.pieces)) == first.vocab_size == len(first.pieces)


@pytest.mark.parametrize("style", list(SPM_STYLES))
def test_tokenizer_json_splits_as_tokenizer_model(style: str) -> None:
    """transformers reads one, others the other: they must be one tokenizer."""
    import sentencepiece
    from tokenizers import Tokenizer

    made = make_tokenizer(style)
    model = sentencepiece.SentencePieceProcessor(model_proto=made.files["tokenizer.model"])
    rules = Tokenizer.from_str(made.files["tokenizer.json"].decode())
    for text in SAMPLE_TEXTS:
        assert rules.encode(text, add_special_tokens=False).ids == model.encode(text), text
    assert any(model.is_byte(token_id) for token_id in model.encode("今天"))
    assert model.bos_id() == made.bos_id


@pytest.mark.parametrize("style", list(BPE_STYLES))
def test_byte_level_styles_keep_every_text(style: str) -> None:
    from tokenizers import Tokenizer

    rules = Tokenizer.from_str(make_tokenizer(style).files["tokenizer.json"].decode())
    for text in SAMPLE_TEXTS:
        ids = rules.encode(text, add_special_tokens=False).ids
        decoded = rules.decode(ids, skip_special_tokens=False)
        assert decoded == (rules.normalizer.normalize_str(text) if rules.normalizer else text)


def test_styles_split_differently() -> None:
    """A11: digits and contractions tell the patterns apart; styles that agreed on all would test nothing."""
    from tokenizers import Tokenizer

    def words(style: str, text: str) -> tuple[str, ...]:
        rules = Tokenizer.from_str(make_tokenizer(style).files["tokenizer.json"].decode())
        return tuple(word for word, _ in rules.pre_tokenizer.pre_tokenize_str(text))

    text = "12345 I'LL it's aB"
    assert len({words(style, text) for style in BPE_STYLES}) == len(BPE_STYLES)


def test_extra_tokens_and_templates_are_taken() -> None:
    made = make_tokenizer("llama3", chat_template=None, extra_tokens=[("<x>", False), ("<|eot_id|>", True)])
    entries = json.loads(made.files["tokenizer.json"])["added_tokens"]
    assert [entry["content"] for entry in entries].count("<|eot_id|>") == 1
    assert entries[-1] == {**entries[-1], "content": "<x>", "special": False, "id": made.vocab_size - 1}
    assert "chat_template" not in json.loads(made.files["tokenizer_config.json"])
    with pytest.raises(ValueError, match="llama3"):
        make_tokenizer("llama9")


def test_the_byte_alphabet_is_one_to_one() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet.values())) == 256
    assert alphabet[ord("a")] == "a" and alphabet[ord(" ")] == "Ġ" and alphabet[0xFF] == "ÿ"
