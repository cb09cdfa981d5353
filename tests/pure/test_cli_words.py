"""The words of ``chat`` and ``complete``: no other model answers where a name was mistyped."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.cli.chat import split_words
from edgellm.cli.complete import names_a_model
from edgellm_models.catalog import load_catalog
from edgellm_models.errors import NotFoundError


def dropped_letters(name: str) -> list[str]:
    """Every spelling of a name that lacks one letter in the middle."""
    return [name[:i] + name[i + 1 :] for i in range(1, len(name) - 1)]


@pytest.mark.parametrize("name", load_catalog())
def test_a_mistyped_catalog_name_is_66_with_the_right_one(name: str) -> None:
    for typed in {name.upper(), name.replace("-", ":"), name.replace("-", "_"), *dropped_letters(name)}:
        if typed in load_catalog():
            continue
        with pytest.raises(NotFoundError, match="a prompt goes after -p") as caught:
            split_words((typed, "hello"), None, model_named=False)
        assert name in str(caught.value), typed
    for prompt in ((), ("hello",)):
        with pytest.raises(NotFoundError, match=name):
            split_words((name.upper(), *prompt), None, model_named=False)
    with pytest.raises(NotFoundError, match=name):
        split_words((name[:-2],), "hello", model_named=False)
    assert names_a_model(name.upper())


@pytest.mark.parametrize("word", ["notes.txt", "Model.GGUF", "config.json", "weights.safetensors", "some-7b"])
def test_a_word_of_the_form_of_a_file_or_model_is_66(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ((word,), (word, "hello")):
        with pytest.raises(NotFoundError, match="a prompt goes after -p"):
            split_words(words, None, model_named=False)
    assert split_words((), word, model_named=False) == (None, word)
    assert split_words((word,), None, model_named=True) == (None, word)


@pytest.mark.parametrize(
    "prompt",
    ["What is it?", "Summarize", "Gemma", "covid-19", "e.g.", "3.5", "Write notes.txt for me", "Hi there"],
)
def test_a_prompt_stays_a_prompt(prompt: str) -> None:
    assert split_words((prompt,), None, model_named=False) == (None, prompt)
    words = tuple(prompt.split())
    assert split_words(words, None, model_named=False) == (None, prompt)
    assert not names_a_model(prompt)
