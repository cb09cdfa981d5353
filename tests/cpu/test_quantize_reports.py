"""What a job says of itself: clipped sequences, planned sizes, what its errors measure, seconds, choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe, QuantizeReport
from tests.support.tiny_models import make_tiny

TEXT = "A fox met a hen by the old mill, and they talked of 7 x 6 = 42. " * 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama", tmp_path_factory.mktemp("reports") / "model", quantizable=True, num_hidden_layers=2
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSpec:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return CalibrationSpec("file", path, samples=8, sequence_length=64)


def _kinds(report: QuantizeReport) -> list[str]:
    return [notice.kind for notice in report.notices]


@pytest.mark.parametrize("form", ["gguf", "gptq", "awq"])
def test_sequences_end_with_the_models_context(form: str, text: CalibrationSpec, tmp_path: Path) -> None:
    """Longer ones are clipped, which a notice says, in a dry run too; those that fit are left alone."""
    source = make_tiny("llama", tmp_path / "source", num_hidden_layers=1, max_position_embeddings=32)
    recipe = QuantizeRecipe(format=form, effort="fast", group_size=32)
    job = QuantizeJob(source, tmp_path / "out", recipe, text)
    planned = quantize_model(replace(job, dry_run=True))
    [detail] = [note.detail for note in planned.notices if note.kind == "sequence_length_clipped"]
    assert "32 tokens, the model's context, not 64" in detail
    assert any("256 tokens" in note.detail for note in planned.notices)
    report = quantize_model(job)
    assert report.calibration_tokens == 8 * 32 and "sequence_length_clipped" in _kinds(report)
    fitting = replace(job, out=tmp_path / "fits", calibration=replace(text, sequence_length=32))
    same = quantize_model(fitting)
    assert same.calibration_hash == report.calibration_hash
    assert "sequence_length_clipped" not in _kinds(same)


def test_own_text_ends_with_the_models_context(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", num_hidden_layers=1, max_position_embeddings=64)
    asked: list[int] = []

    def generate(prompts: Sequence[Sequence[int]], most: int, seed: int) -> list[list[int]]:
        asked.append(most + max(len(prompt) for prompt in prompts))
        return [[5] * most for _ in prompts]

    own = CalibrationSpec("self", samples=8, sequence_length=256)
    job = QuantizeJob(source, tmp_path / "out", QuantizeRecipe(effort="fast"), own, generate=generate)
    report = quantize_model(job)
    assert max(asked) == 64 and report.calibration_tokens <= 8 * 64
    assert "sequence_length_clipped" in _kinds(report)


def test_a_dry_run_says_how_the_job_will_choose(model: Path, text: CalibrationSpec, tmp_path: Path) -> None:
    """With a calibration text the types of a dry run are not the job's, and no text is asked for."""
    job = QuantizeJob(model, tmp_path / "out.gguf", QuantizeRecipe(target_bpw=9.0, effort="fast"), text)
    planned = quantize_model(replace(job, dry_run=True))
    [detail] = [note.detail for note in planned.notices if note.kind == "sensitivity_measured_later"]
    assert "the dry run does not run the model" in detail and "the job will choose by" in detail
    assert not any("gives a better choice" in note.detail for note in planned.notices)
    report = quantize_model(job)
    assert planned.bits_per_weight <= 9.0 and report.bits_per_weight <= 9.0
    assert not {"sensitivity_measured_later", "sensitivity_not_measured"} & set(_kinds(report))
    without = replace(job, out=tmp_path / "none.gguf", calibration=CalibrationSpec(), dry_run=True)
    assert "sensitivity_not_measured" in _kinds(quantize_model(without))
