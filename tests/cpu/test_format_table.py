"""The table of docs/formats.md names every output that is measured, and shows what was."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from acceptance.output_formats import OUTPUTS
from acceptance.quantize_quality import CASES
from edgellm_models.checkpoint import open_checkpoint
from tests.support.real_models import real_model

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "format_table.py"))


def test_every_output_has_a_row() -> None:
    rows = TOOL["ROWS"]
    assert {row[0] for row in rows} - {""} == set(OUTPUTS)
    assert {row[1] for row in rows} - {""} <= set(CASES)


@pytest.mark.parametrize("model", TOOL["MODELS"])
def test_a_token_reads_the_tensors_of_the_model(model: str) -> None:
    """One reckoning for all rows, from the weights that the model's own file holds."""
    tensors = open_checkpoint(real_model(model)).tensors()
    assert TOOL["WEIGHTS"][model] == sum(math.prod(info.shape) for info in tensors.values())
    for line in TOOL["table"]().splitlines()[2:]:
        for cell, name in zip(re.findall(r"\| (\d+\.\d\d, \d+) \|", line), TOOL["MODELS"], strict=True):
            bits, megabytes = map(float, cell.split(", "))
            assert megabytes == pytest.approx(bits * TOOL["WEIGHTS"][name] / 8e6, abs=1)


def test_measured_cells_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL["table"].__globals__, "RESULTS", tmp_path)
    assert "0.031" not in TOOL["table"]()
    detail = {"bpw": 6.1655, "bytes": 105_455_008}
    name = "smollm2-135m: GGUF Q4_K_M"
    plain = {"name": f"{name}, loss without calibration", "value": 0.0312, "detail": detail}
    speed = {"name": f"{name}, decoding", "value": 199.6, "detail": {}}
    best = {"name": "smollm2-135m: KL from the twin, Q4_K_M", "value": 0.01448, "detail": detail}
    (tmp_path / "output_formats.json").write_text(json.dumps([plain, speed]), encoding="utf-8")
    (tmp_path / "quantize_quality.json").write_text(json.dumps([best]), encoding="utf-8")
    [row] = [line for line in TOOL["table"]().splitlines() if "the default" in line]
    assert "| 6.17, 104 | 200 | 0.031 | 0.014 | - | - | - | - |" in row
