"""Two and three bits without a calibration are told to be a bad bargain, and only they."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe
from tests.support.tiny_models import make_tiny

TOLD: list[dict[str, Any]] = [
    {"type": "Q2_K"},
    {"type": "Q2_K_S"},
    {"type": "Q3_K_S"},
    {"type": "Q3_K_M"},
    {"type": "Q3_K_L"},
    {"format": "gptq", "bits": 2},
    {"format": "gptq", "bits": 3},
]
NOT_TOLD: list[dict[str, Any]] = [
    {"type": "Q4_K_S"},
    {"type": "Q4_0"},
    {"type": "Q8_0"},
    {"type": "F16"},
    {"type": "Q2_K", "target_bpw": 7.0},
    {"format": "gptq", "bits": 4},
    {"format": "gptq", "bits": 8},
    {"format": "awq"},
    {"format": "compressed-tensors"},
    {"format": "hf"},
]


def told(options: dict[str, Any], folder: Path, spec: CalibrationSpec) -> list[str]:
    source = make_tiny("llama", folder / "m", quantizable=True, num_hidden_layers=1)
    job = QuantizeJob(source, folder / "out", QuantizeRecipe(**options), spec, dry_run=True)
    notices = quantize_model(job).notices
    return [notice.detail for notice in notices if notice.kind == "few_bits_uncalibrated"]


@pytest.mark.parametrize("options", TOLD, ids=str)
def test_few_bits_are_told(options: dict[str, Any], tmp_path: Path) -> None:
    (detail,) = told(options, tmp_path, CalibrationSpec())
    assert "--calibration" in detail


@pytest.mark.parametrize("options", NOT_TOLD, ids=str)
def test_others_are_not(options: dict[str, Any], tmp_path: Path) -> None:
    assert told(options, tmp_path, CalibrationSpec()) == []


@pytest.mark.parametrize("options", [{"type": "Q3_K_M"}, {"format": "gptq", "bits": 3}], ids=str)
def test_with_a_calibration_nothing_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the sea is wide and the ships are few " * 300, encoding="utf-8")
    spec = CalibrationSpec("file", text, samples=4, sequence_length=64)
    assert told(options, tmp_path, spec) == []
