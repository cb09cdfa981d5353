"""The recipe that outputs keep: what applies to them, under the same keys whatever they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import run
from tests.support.tiny_models import make_tiny, tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return make_tiny("llama", folder, quantizable=True, num_hidden_layers=1, intermediate_size=256)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


def quantize(*arguments: str | Path) -> int:
    return run(["quantize", *map(str, arguments)])


def gguf_record(path: Path) -> dict[str, Any]:
    from edgellm_models.checkpoint import open_checkpoint

    opened = open_checkpoint(path)
    found: dict[str, Any] = json.loads(str(opened.metadata["edgellm.quantize.recipe"]))
    return found


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [
        (("--type", "q5_k_s"), {"format": "gguf", "type": "Q5_K_S", "method": "rtn", "effort": "fast"}),
        (("--type", "F16"), {"format": "gguf", "type": "F16"}),
        (
            ("--target-bpw", "7", "--tensor-type", "attn_v=Q6_K"),
            {
                "format": "gguf",
                "target_bpw": 7.0,
                "tensor_types": [["attn_v", "Q6_K"]],
                "method": "rtn",
                "effort": "fast",
            },
        ),
        (
            ("--bits", "4", "--group-size", "32"),
            {
                "format": "gptq",
                "bits": 4,
                "group_size": 32,
                "symmetric": True,
                "checkpoint_format": "gptq",
                "method": "rtn",
                "effort": "fast",
            },
        ),
        (
            ("--format", "awq"),
            {
                "format": "awq",
                "bits": 4,
                "group_size": 128,
                "symmetric": False,
                "method": "rtn",
                "effort": "fast",
            },
        ),
        (("--format", "hf", "--dtype", "f32"), {"format": "hf", "dtype": "f32"}),
    ],
)
def test_outputs_keep_the_part_of_the_recipe_that_they_have_a_use_for(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], recipe: dict[str, Any]
) -> None:
    effort = () if "hf" in arguments else ("--effort", "fast")
    assert quantize(source, tmp_path / "out", *arguments, *effort) == 0
    if (tmp_path / "out").is_file():
        record = gguf_record(tmp_path / "out")
    else:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        record = config.get("edgellm") or config["quantization_config"]["meta"]
    assert record["recipe"] == recipe
    assert set(record) == {"quantizer", "recipe", "calibration", "imatrix", "source"}
    assert record["quantizer"][0].startswith("edgellm:") and record["source"] == "tiny"
    assert record["calibration"] is None is record["imatrix"]


def test_calibrated_outputs_have_the_same_keys(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A fox met a hen by the old mill, and they talked. " * 30)
    text = ("--calibration", tmp_path / "text.txt", "--samples", "4", "--sequence-length", "32")
    matrix = ("--save-imatrix", tmp_path / "seen.gguf")
    assert quantize(source, tmp_path / "out", "--type", "Q4_K_S", "--effort", "fast", *text, *matrix) == 0
    record = gguf_record(tmp_path / "out")
    assert set(record) == {"quantizer", "recipe", "calibration", "imatrix", "source"}
    recipe = {"format": "gguf", "type": "Q4_K_S", "method": "gptq", "effort": "fast", "damping": 0.05}
    assert record["recipe"] == recipe and record["calibration"]["source"] == "text.txt"
    imatrix = ("--imatrix", tmp_path / "seen.gguf")
    assert quantize(source, tmp_path / "again", "--type", "Q4_K_S", "--effort", "fast", *imatrix) == 0
    assert gguf_record(tmp_path / "again")["imatrix"] == "seen.gguf"


def test_a_gguf_source_is_named_too(source: Path, tmp_path: Path) -> None:
    gguf = tiny_gguf(source, tmp_path / "tiny.gguf")
    assert quantize(gguf, tmp_path / "out", "--type", "Q8_0", "--effort", "fast") == 0
    assert gguf_record(tmp_path / "out")["source"] == "tiny.gguf"
