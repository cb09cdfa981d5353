"""What a job says of itself: clipped sequences, planned sizes, what its errors measure, seconds, choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgellm.cli.quantize import summary
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_models.tokenizer import load_tokenizer
from edgellm_quantize.api import quantize_model
from edgellm_quantize.calibration import calibration_tokens
from edgellm_quantize.capture import open_stream
from edgellm_quantize.grids import dequantize
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe, QuantizeReport
from tests.support.quantize_runs import interrupt
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


@pytest.mark.parametrize(
    ("form", "method"), [("gguf", "auto"), ("gguf", "rtn"), ("gptq", "auto"), ("awq", "auto")]
)
def test_errors_say_what_they_measure(
    form: str, method: str, model: Path, text: CalibrationSpec, tmp_path: Path
) -> None:
    """One meaning whatever the format: of outputs where error feedback had a Hessian, else of weights; the
    figure is that of the values in the file."""
    recipe = QuantizeRecipe(format=form, method=method, effort="fast")
    report = quantize_model(QuantizeJob(model, tmp_path / "out", recipe, text))
    source, written = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    by_name = {tensor["name"]: tensor for tensor in report.as_json()["tensors"]}
    rounded = {name for name, tensor in by_name.items() if tensor["method"] != "copy"}
    assert rounded >= {name for name in by_name if is_block_linear(name)}
    for name, tensor in by_name.items():
        assert (tensor["relative_error"] is None) == (name not in rounded)
        feedback = method != "rtn" and is_block_linear(name)
        measure = "outputs" if feedback else "weights"
        assert tensor["error_measure"] == (measure if name in rounded else None)
        assert name not in rounded or tensor["seconds"] > 0
    if form == "awq":
        return  # its factors are in the file's weights
    name = "blk.0.attn_v.weight"  # its inputs are those of the model as it was
    weight = dequantize(source.weight(name))
    error = dequantize(written.weight(name)) - weight
    loader = LayerLoader(source)
    tokenizer = load_tokenizer(model, "safetensors", source.metadata)
    tokens = calibration_tokens(text, tokenizer, loader.spec.vocab_size)
    assert tokens is not None
    stream = open_stream(loader, tokens.sequences, 4096)
    x = torch.cat(list(stream.inputs("qkv", loader.layer(0), 0)))
    if method == "rtn":
        wanted = float(error.square().sum() / weight.square().sum())
    else:
        wanted = float((x @ error.t()).square().sum() / (x @ weight.t()).square().sum())
    assert by_name[name]["relative_error"] == pytest.approx(wanted, rel=1e-3)


def test_what_an_earlier_run_rounded_took_no_time_in_this_one(
    model: Path, text: CalibrationSpec, tmp_path: Path
) -> None:
    job = QuantizeJob(model, tmp_path / "a", QuantizeRecipe(format="gptq", effort="fast"), text)
    first = quantize_model(job)
    job = replace(job, out=tmp_path / "b")
    interrupt(job, "writing")
    again = quantize_model(replace(job, resume=True))
    for before, after in zip(first.tensors, again.tensors, strict=True):
        assert after.seconds == 0 and (before.seconds > 0) == is_block_linear(before.name)
        assert (after.relative_error, after.error_measure) == (before.relative_error, before.error_measure)


def test_the_summary_does_not_compare_errors_of_two_kinds(
    model: Path, text: CalibrationSpec, tmp_path: Path
) -> None:
    report = quantize_model(QuantizeJob(model, tmp_path / "out", QuantizeRecipe(effort="fast"), text))
    lines = {line.partition(":")[0]: line for line in summary(report)}
    outputs, weights = (
        lines[f"largest relative squared errors of {kind}"] for kind in ("outputs", "weights")
    )
    assert "blk." in outputs and "token_embd" not in outputs
    assert "token_embd" in weights and "blk." not in weights
