"""Calibration tokens: windows, BOS, templates, seeds, the model's own text, and clear errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgellm_models.errors import BadInputError, NotFoundError, UsageError
from edgellm_models.tokenizer import load_chat_templates, load_tokenizer
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_quantize.calibration import CalibrationTokens, calibration_tokens, hash_of
from edgellm_quantize.recipe import CalibrationSpec
from tests.support.tiny_models import make_tiny

PROSE = "The quick brown fox jumps over the lazy dog, and nobody minds.\n" * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mistral", tmp_path_factory.mktemp("calibration") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model, "safetensors", json.loads((model / "config.json").read_text()))


def _tokens(spec: CalibrationSpec, tokenizer: Tokenizer, **options: object) -> CalibrationTokens:
    found = calibration_tokens(spec, tokenizer, tokenizer.vocab_size, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_windows_begin_with_bos_and_are_drawn_by_the_seed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(PROSE + "".join(f"Line {i} has its own words.\n" for i in range(800)))
    spec = CalibrationSpec("file", path, samples=10, sequence_length=64)
    found = _tokens(spec, tokenizer)
    assert len(found.sequences) == 10
    assert all(sequence[0] == tokenizer.bos_id for sequence in found.sequences)
    assert max(len(sequence) for sequence in found.sequences) == 64
    assert _tokens(spec, tokenizer) == found and found.hash == hash_of(found.sequences)
    other = _tokens(CalibrationSpec("file", path, samples=10, sequence_length=64, seed=1), tokenizer)
    assert other.hash != found.hash
    assert [notice.kind for notice in found.notices] == ["few_calibration_tokens"]


def test_conversations_go_through_the_models_template(
    model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jsonl"
    chat = {
        "messages": [{"role": "user", "content": "Hi " * 60}, {"role": "assistant", "content": "Ho " * 60}]
    }
    path.write_text(json.dumps(chat) + "\n\n" + json.dumps({"text": PROSE}) + "\n")
    templates = load_chat_templates(model, "safetensors", {})
    assert templates is not None
    spec = CalibrationSpec("file", path, samples=40, sequence_length=400)
    found = _tokens(spec, tokenizer, templates=templates)
    rendered = tokenizer.encode(
        templates.render(chat["messages"], add_generation_prompt=False), add_special=False
    )
    assert any(
        list(sequence)[-50:] == rendered[-50:] or list(sequence) == rendered[:400]
        for sequence in found.sequences
    )
    for sequence in found.sequences:
        assert sequence[0] == tokenizer.bos_id and sequence[1] != tokenizer.bos_id
    with pytest.raises(BadInputError, match="line 1: the model has no chat template"):
        _tokens(spec, tokenizer)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_line_feeds_alone(tokenizer: Tokenizer, tmp_path: Path, end: str) -> None:
    """JSON strings may hold every other character at which str.splitlines cuts, raw, and form feeds lie
    between lines of none."""
    inside = [chr(code) for code in range(0x20, 0x3000) if len(f"a{chr(code)}b".splitlines()) == 2]
    assert "\u2028" in inside and "\x85" in inside
    texts = [f"{PROSE}{character}{PROSE}" for character in inside] + [PROSE]
    raw, escaped = tmp_path / "raw.jsonl", tmp_path / "escaped.jsonl"
    raw.write_bytes(
        end.join(json.dumps({"text": text}, ensure_ascii=False) for text in [*texts, ""]).encode()
    )
    escaped.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, ""]))
    found = [
        _tokens(CalibrationSpec("file", path, samples=500, sequence_length=64), tokenizer)
        for path in (raw, escaped)
    ]
    assert found[0].sequences == found[1].sequences and len(found[0].sequences) > len(texts)


def test_errors_name_the_file_and_the_way_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Too little text is an error, not a bad model."""
    short, binary, lines = tmp_path / "short.txt", tmp_path / "binary.txt", tmp_path / "x.jsonl"
    short.write_text("Not much.")
    binary.write_bytes(b"abc\xff\xfe")
    lines.write_text('{"text": "a"}\nnot json\n')
    for path, kind, message in (
        (short, BadInputError, "tokens are too few to calibrate with: at least 128"),
        (binary, BadInputError, r"no UTF-8 text \(byte 3\)"),
        (lines, BadInputError, "line 2: this is no JSON"),
        (tmp_path / "gone.txt", NotFoundError, "gone.txt: the calibration file cannot be read"),
    ):
        with pytest.raises(kind, match=message):
            _tokens(CalibrationSpec("file", path), tokenizer)
    assert calibration_tokens(CalibrationSpec(), tokenizer, 10) is None
    with pytest.raises(UsageError, match="needs a model that runs"):
        _tokens(CalibrationSpec("self"), tokenizer)


def test_the_model_writes_its_own_text(model: Path, tokenizer: Tokenizer) -> None:
    """Answers through the template and free text in turn; what comes back is kept behind its prompt, and
    texts that end early are followed by others."""
    templates = load_chat_templates(model, "safetensors", {})
    calls: list[tuple[int, int]] = []

    def generate(prompts: Sequence[Sequence[int]], most: int, seed: int) -> list[list[int]]:
        calls.append((len(prompts), seed))
        return [[5 + index % 90] * min(most, 20) for index in range(len(prompts))]

    spec = CalibrationSpec("self", samples=16, sequence_length=96, seed=7)
    found = _tokens(spec, tokenizer, templates=templates, generate=generate)
    assert 1500 < found.num_tokens <= 16 * 96
    assert calls[:2] == [(16, 7), (16, 8)] and len(calls) <= 8
    calls.clear()
    assert found == _tokens(spec, tokenizer, templates=templates, generate=generate)
    assert all(sequence[0] == tokenizer.bos_id and len(sequence) <= 96 for sequence in found.sequences)
    whole = found.sequences[:-1]  # the last is cut to what is left
    assert all(len(set(sequence[-5:])) == 1 for sequence in whole)
    with pytest.raises(BadInputError, match="token id 99999 is none of the model's"):
        _tokens(spec, tokenizer, generate=lambda prompts, most, seed: [[99999] * 8 for _ in prompts])
    with pytest.raises(BadInputError, match="0 answers came"):
        _tokens(spec, tokenizer, generate=lambda prompts, most, seed: [])
