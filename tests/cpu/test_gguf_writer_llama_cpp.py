"""Every family's dense GGUF against llama.cpp, which must say what transformers says of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm_quantize.writers import write_dense_gguf
from tests.support.bigram import make_bigram
from tests.support.conversion_cases import CASES
from tests.support.llama_cpp import LlamaCpp, LlamaCppError
from tests.support.oracles import TransformersModel, assert_same_until_tie, require_oracle
from tests.support.tiny_models import ARCHITECTURES, make_tiny
from tests.support.tiny_text import SAMPLE_TEXTS

PROMPTS = (
    "The keeper of the light counted " * 12,
    "def count_ships(ships):\n    total = 0\n    return total\n\n# 12345 Café déjà vu — море 今天",
    "Hello world, it's clear and it'll stay clear; they're going to sail at noon." * 2,
)
"""Longer than the fixtures' sliding window (16) and, two of them, than their original context (64)."""
NEW_TOKENS = 50


def _texts(reference: TransformersModel) -> list[str]:
    """Texts whose ids must agree; llama.cpp composes no characters (NFC), so it cannot agree on these."""
    normalizer = reference.tokenizer.backend_tokenizer.normalizer
    chat = [{"role": "user", "content": "Hello  \n there"}, {"role": "assistant", "content": " Yes ."}]
    texts = [*SAMPLE_TEXTS, *PROMPTS]
    if reference.tokenizer.chat_template:
        rendered = reference.tokenizer.apply_chat_template(chat, tokenize=False)
        texts.append(rendered.removeprefix(reference.tokenizer.bos_token or ""))
    if normalizer is None or "NFC" not in repr(normalizer):
        return texts
    return [text for text in texts if normalizer.normalize_str(text) == text]


def _judge(folder: Path, dtype: str, tolerance: float = 1e-4, new_tokens: int = NEW_TOKENS) -> None:
    require_oracle("xllamacpp")
    out = folder.with_suffix(".gguf")
    write_dense_gguf(folder, out, dtype)
    reference = TransformersModel(folder)
    equal = 0
    with LlamaCpp(out) as judge:
        for text in _texts(reference):
            assert judge.tokenize(text) == reference.encode(text), text
        for prompt in PROMPTS:
            ids = reference.encode(prompt)
            expected = reference.greedy(ids, new_tokens)
            equal += assert_same_until_tie(expected, judge.greedy(ids, new_tokens), prompt[:20], tolerance)
            log_probs = expected.logits[0].log_softmax(-1)
            for token_id, log_prob in judge.top_logprobs(ids):
                # llama.cpp's GELU is a table of f16 values; the others agree to 1e-3.
                assert abs(log_probs[token_id].item() - log_prob) < 500 * tolerance, (prompt[:20], token_id)
    assert equal > len(PROMPTS) * new_tokens // 2, "too many ties for a test"


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_continues_f32_files_like_transformers(case: str, tmp_path: Path) -> None:
    """C13, C11, D15, A17: permutation, biases, tied heads, ropes, norms, ids, judged by another program."""
    arch, overrides = CASES[case]
    _judge(make_tiny(arch, tmp_path / case, **overrides), "f32")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_continues_f32_files_of_quantizable_models_like_transformers(
    arch: str, tmp_path: Path
) -> None:
    """C13: the models that block types are tried on are right before they are quantized."""
    _judge(make_tiny(arch, tmp_path / arch, quantizable=True), "f32", new_tokens=12)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_files_of_quantizable_models(arch: str, dtype: str, tmp_path: Path) -> None:
    """The weights are exact, since the folder has the same type; llama.cpp rounds activations to it."""
    require_oracle("xllamacpp")
    folder = make_tiny(arch, tmp_path / arch, quantizable=True, dtype=dtype)
    out = folder.with_suffix(".gguf")
    write_dense_gguf(folder, out, dtype)
    reference = TransformersModel(folder)
    with LlamaCpp(out) as judge:
        for prompt in PROMPTS:
            ids = reference.encode(prompt)
            expected = reference.greedy(ids, 8)
            log_probs = expected.logits[0].log_softmax(-1)
            off = [abs(log_probs[token_id].item() - found) for token_id, found in judge.top_logprobs(ids)]
            # Measured: 0.07 and 0.43 where the logits spread over 60.
            assert max(off, default=0.0) < {"f16": 0.15, "bf16": 1.0}[dtype], prompt[:20]
            if dtype == "f16":
                assert_same_until_tie(expected, judge.greedy(ids, 8), prompt[:20], 2e-2)


def test_a_window_that_llama_cpp_ignores_is_told_and_right_within_it(tmp_path: Path) -> None:
    """GGUF's llama has no window: up to its length the file is exact; the writer tells the rest."""
    require_oracle("xllamacpp")
    folder = make_tiny("mistral", tmp_path / "windowed", sliding_window=24)
    report = write_dense_gguf(folder, folder.with_suffix(".gguf"), "f32")
    assert [notice.kind for notice in report.notices] == ["sliding_window_ignored"]
    assert "24" in report.notices[0].detail
    reference = TransformersModel(folder)
    ids = reference.encode("The keeper")
    with LlamaCpp(folder.with_suffix(".gguf")) as judge:
        count = 24 - len(ids)
        assert_same_until_tie(reference.greedy(ids, count), judge.greedy(ids, count), "inside the window")


@pytest.mark.parametrize("tokenizer", ["bpe", "spm"])
def test_a_scripted_model_follows_its_chain_in_llama_cpp(tokenizer: str, tmp_path: Path) -> None:
    """The fixture itself: another engine walks the same chain."""
    require_oracle("xllamacpp")
    chain = [" one", " two", b"\xf0", b"\x9f", b"\x98", b"\x80", "<tag>", " three"]
    folder = make_bigram(tmp_path / tokenizer, chain, added=["<tag>"], tokenizer=tokenizer, loop=True)
    write_dense_gguf(folder, folder.with_suffix(".gguf"), "f32")
    reference = TransformersModel(folder)
    ids = reference.encode("go")
    expected = reference.greedy(ids, 20).token_ids
    assert expected[:8] == expected[8:16]
    with LlamaCpp(folder.with_suffix(".gguf")) as judge:
        assert judge.greedy(ids, 20) == expected


def test_the_judge_reports_a_file_that_it_cannot_load(tmp_path: Path) -> None:
    require_oracle("xllamacpp")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(20))
    with pytest.raises(LlamaCppError, match="status"):
        LlamaCpp(bad)
