"""E11: what a job takes does not grow with the layers of its model, and ``max_memory`` is kept to the end.

Each job runs in a process of its own, whose peak the system counts. The same job's peaks differ by 2 % from
run to run; a model that stays in memory once it was read is 25 % and more.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_quantize.calibrated_run import core_plan
from edgellm_quantize.choosing_memory import choosing_within_memory, feedback_bytes, sensitivity_bytes
from edgellm_quantize.job import estimate_memory
from edgellm_quantize.recipe import QuantizeRecipe
from tests.support.core_jobs import random_calibration
from tests.support.memory_jobs import calibration_text, deep_model, run_job
from tests.support.tiny_models import make_tiny

FORMATS: dict[str, dict[str, Any]] = {
    "gguf": {"format": "gguf", "type": "Q4_0", "effort": "fast"},
    "gptq": {"format": "gptq", "effort": "fast"},
    "awq": {"format": "awq", "effort": "fast"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "gguf": {"format": "gguf", "type": "Q8_0"},
    "gptq": {"format": "gptq", "effort": "fast"},
    "hf": {"format": "hf", "dtype": "f16"},
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_model(tmp_path_factory.mktemp("memory") / "deep")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_text(tmp_path_factory.mktemp("memory") / "text.txt")


@pytest.mark.parametrize("form", FORMATS)
def test_a_calibrated_job_takes_no_more_at_its_end(form: str, deep: Path, text: Path, tmp_path: Path) -> None:
    """Written, read back, and (for folders, whose codes are not read from the source again) its imatrix."""
    taken = run_job(deep, tmp_path / "out", FORMATS[form], text, save_imatrix=form != "gguf")
    assert taken.early
    assert taken.whole <= 1.1 * taken.early, taken


@pytest.mark.parametrize("form", PLAIN)
def test_a_job_without_calibration_takes_no_more_at_its_end(form: str, deep: Path, tmp_path: Path) -> None:
    taken = run_job(deep, tmp_path / "out", PLAIN[form], None)
    assert taken.early
    assert taken.whole <= 1.1 * taken.early, taken


def test_a_model_larger_than_max_memory_is_written(tmp_path: Path) -> None:
    """900 MiB of zeros, which take no room on the disk; encoding needs 720 MiB by its estimate."""
    source = deep_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_attention_heads=2)
    _widen_with_zeros(source, ffn=51_200)
    limit = 760 << 20
    assert (source / "model.safetensors").stat().st_size > 1.1 * limit
    taken = run_job(source, tmp_path / "out", {"format": "gguf", "type": "Q8_0"}, None, limit)
    assert taken.whole <= limit, taken


def _widen_with_zeros(folder: Path, ffn: int) -> None:
    """Make every feed-forward layer of a model so wide. All weights are 0 and lie in a hole of the file."""
    config = json.loads((folder / "config.json").read_text())
    narrow, config["intermediate_size"] = config["intermediate_size"], ffn
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    with path.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    position = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        size = 4
        if ".mlp." in name:
            entry["shape"] = [ffn if extent == narrow else extent for extent in entry["shape"]]
        for extent in entry["shape"]:
            size *= extent
        entry["data_offsets"] = [position, position + size]
        position += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + position)


@pytest.mark.parametrize(("vocab", "measured"), [(40_960, True), (221_184, False)])
def test_choosing_types_keeps_max_memory(vocab: int, measured: bool, text: Path, tmp_path: Path) -> None:
    """Beside a head of 221,184 tokens the model does not run in what suffices for all the rest."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": vocab}
    source = make_tiny("llama", tmp_path / "model", tie_word_embeddings=True, **sizes)
    checkpoint = open_checkpoint(source)
    spec = LayerLoader(checkpoint).spec
    checkpoint.close()
    least = max(sensitivity_bytes(spec) if measured else 0, feedback_bytes(spec, 256), 960 << 20)
    assert choosing_within_memory(spec, feedback=True, max_memory=least).measured == measured
    recipe = {"format": "gguf", "target_bpw": 5.0, "effort": "fast"}
    taken = run_job(source, tmp_path / "out", recipe, text, least)
    assert ("sensitivity_not_measured" in taken.notices) != measured
    assert taken.whole <= least, taken


def test_a_sequence_that_runs_whole_is_counted_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny("llama", tmp_path / "model"))
    spec = LayerLoader(checkpoint).spec
    checkpoint.close()
    plan = core_plan(QuantizeRecipe(), {}, "gptq")
    long = random_calibration(spec.vocab_size, sequences=1, length=4096)
    kv = 2 * spec.num_kv_heads * spec.head_dim
    row = (2 * spec.hidden_size + 2 * (spec.num_heads * spec.head_dim + kv) + 4 * spec.ffn_size) * 4
    found = estimate_memory(spec, plan, long, 256)
    assert found - estimate_memory(spec, plan, 4096, 256) == (4096 - 256) * row
    assert estimate_memory(spec, plan, 4096, 256, longest=4096) == found
