"""Token ids of the two real models against llama.cpp and transformers, line by line over the corpus."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.tokenizer import load_tokenizer
from edgellm_models.tokenizer.shared import SharedTokenizer
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.corpus import corpus_blocks, corpus_lines
from tests.support.llama_cpp import LlamaCpp, require_llama_cpp
from tests.support.oracles import require_oracle
from tests.support.real_models import real_model

pytestmark = pytest.mark.real_model

CONTROL_TEXT = {
    "smollm2-135m": "<|im_start|>user\nHi there<|im_end|>\n<|endoftext|> x <repo_name>y<|im_end|><|im_end|>",
    "gemma3-270m": "<bos><start_of_turn>user\nHi  there<end_of_turn>\n\n\n<b>x</b>"
    " <unused3>\t\t[multimodal] <eos>",
}


def gguf_fields(path: Path) -> dict[str, Any]:
    """The file's metadata by the gguf package, which is not the reader under test elsewhere."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    require_llama_cpp()
    path = real_model(request.param)
    ours = load_tokenizer(path, "gguf", gguf_fields(path))
    log = tmp_path_factory.mktemp("llama") / "log"
    with LlamaCpp(path, context=256, log=log) as judge:
        yield request.param, path, ours, judge


def test_ids_equal_llama_cpp_on_the_corpus(model: tuple[str, Path, SharedTokenizer, LlamaCpp]) -> None:
    _, _, ours, judge = model
    texts = [*corpus_lines(), *corpus_blocks()]
    assert len(corpus_lines()) >= 500
    wrong = [text for text in texts if ours.encode(text) != judge.tokenize(text)]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, first {wrong[0]!r}"


def test_control_tokens_equal_llama_cpp(model: tuple[str, Path, SharedTokenizer, LlamaCpp]) -> None:
    name, _, ours, judge = model
    text = CONTROL_TEXT[name]
    ids = ours.encode(text, add_special=False)
    assert ids == judge.tokenize(text, add_special=False)
    assert ours.decode(ids, show_special=True) == text


def test_text_comes_back(model: tuple[str, Path, SharedTokenizer, LlamaCpp]) -> None:
    """Encoding loses nothing, with special tokens parsed or not, and the stream gives the same text."""
    _, _, ours, _ = model
    for text in corpus_blocks():
        if "▁" in text and ours.vocabulary.ids.get("▁") is not None:
            text = text.replace("▁", "_")  # SentencePiece spells a space so
        for parse in (True, False):
            ids = ours.encode(text, add_special=False, parse_special=parse)
            assert ours.decode(ids) == text
        decoder = StreamDecoder(ours)
        assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == text


def test_gemma_ids_equal_transformers() -> None:
    """transformers converts the GGUF's SentencePiece scores to merges: another algorithm, the same ids.

    Two lines are left to llama.cpp alone: a run of spaces longer than the longest piece, which transformers'
    conversion cuts in other places, and the literal character that spells a space, at which transformers does
    not cut.
    """
    transformers = require_oracle("transformers")
    path = real_model("gemma3-270m")
    ours = load_tokenizer(path, "gguf", gguf_fields(path))
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    lines = [line for line in corpus_lines() if "▁" not in line and " " * 32 not in line]
    assert len(lines) == len(corpus_lines()) - 2
    wrong = [
        line
        for line in lines
        if ours.encode(line, add_special=False) != theirs(line, add_special_tokens=False)["input_ids"]
    ]
    assert not wrong, f"{len(wrong)} of {len(lines)} differ, first {wrong[0]!r}"


# --- the seven fixture families: folder, GGUF and llama.cpp agree
# -------------------------------------------------

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gguf_and_llama_cpp_give_the_same_ids(family: str, tmp_path: Path) -> None:
    """A17: accents, dashes, numbers and everything else of the corpus, from both forms of each TINY model."""
    require_llama_cpp()
    from tests.support.tiny_models import make_tiny, tiny_gguf

    folder = make_tiny(family, tmp_path / family)
    path = tiny_gguf(folder, tmp_path / f"{family}.gguf")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    from_folder = load_tokenizer(folder, "safetensors", config)
    from_file = load_tokenizer(path, "gguf", gguf_fields(path))
    assert from_folder.eos_ids == from_file.eos_ids
    assert from_folder.bos_id == from_file.bos_id
    assert from_folder.add_bos == from_file.add_bos
    texts = ["Hello world! Café déjà vu — 123 😊", *corpus_lines(), *corpus_blocks()]
    for text in texts:
        assert from_folder.encode(text) == from_file.encode(text), text
    normalized = family.startswith(
        "qwen"
    )  # llama.cpp does not compose characters (NFC), the published models do
    with LlamaCpp(path, context=256, log=tmp_path / "log") as judge:
        for text in texts[::3]:
            if not normalized or unicodedata.is_normalized("NFC", text):
                assert from_file.encode(text) == judge.tokenize(text), text
