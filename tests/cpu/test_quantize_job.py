"""The streaming core as a whole: resume after kill -9, errors with a name, memory, cancelling, quality."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, OutputError, ResourceError
from edgellm_models.network.build import build_decoder
from edgellm_quantize import capture, work_folder
from edgellm_quantize.grids import BlockTypeGrid, IntegerGrid, dequantize
from edgellm_quantize.job import QuantizeCancelledError, estimate_memory, run_core
from edgellm_quantize.layer_rounding import CorePlan, uniform_grids
from edgellm_quantize.recipe import QuantizeProgress
from edgellm_quantize.rounding import RoundingOptions
from tests.support.core_jobs import as_checkpoint, folder_bytes, random_calibration, small_plan
from tests.support.paged import PagedRun
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("core") / "llama", num_hidden_layers=3)


def test_a_killed_job_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """kill -9 between a layer's file and its state, before the manifest counts it, and inside a layer."""
    points = ["rename 3", "rename 7", f"progress {(1 + 2 / 4) / 2:g}"]
    model = make_tiny("llama", tmp_path / "model", hidden_size=32, head_dim=8, intermediate_size=32)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.core_jobs", str(model), str(tmp_path), *points],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = folder_bytes(tmp_path / "whole")
    assert [name for name in whole if name.startswith("layer")] == [
        f"layer-{i:05d}.safetensors" for i in range(2)
    ]
    for number in range(3):
        assert folder_bytes(tmp_path / f"killed-{number}") == whole


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_is_kept_to_save_time_changes_no_byte(
    method: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last linear's input is kept while that is rounded, or computed again; AWQ changes it meanwhile."""
    checkpoint = open_checkpoint(llama)
    plan, calibration = small_plan(checkpoint, method), random_calibration(200)
    run_core(checkpoint, plan, tmp_path / "kept", calibration)
    monkeypatch.setattr(capture, "_MOST_KEPT_BYTES", 0)
    run_core(checkpoint, plan, tmp_path / "again", calibration)
    assert folder_bytes(tmp_path / "kept") == folder_bytes(tmp_path / "again")


def test_resume_refuses_work_of_another_job(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    plan = small_plan(checkpoint, "rtn")
    run_core(checkpoint, plan, tmp_path / "work")
    other = replace(plan, options=RoundingOptions(candidates=9))
    with pytest.raises(BadInputError, match=r"another job \(differing: options\)"):
        run_core(checkpoint, other, tmp_path / "work", resume=True)
    with pytest.raises(BadInputError, match="no work to resume"):
        run_core(checkpoint, plan, tmp_path / "nothing", resume=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInputError, match="holds other files"):
        run_core(checkpoint, plan, foreign)
    assert (foreign / "thesis.txt").exists()


def test_nan_in_the_source_is_named(llama: Path, tmp_path: Path) -> None:
    """E20: found when its layer is loaded, with tensor and index."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        BadInputError, match=r"layers\.1\.mlp\.down_proj\.weight has the value nan at \[3, 5\]"
    ):
        run_core(checkpoint, small_plan(checkpoint, "rtn"), tmp_path / "work")


def test_group_size_that_does_not_divide_is_named(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    plan = CorePlan(uniform_grids(checkpoint, IntegerGrid(4, 48)))
    with pytest.raises(
        BadInputError, match=r"proj\.weight: the group size 48 does not divide rows of (64|128) weights"
    ):
        run_core(checkpoint, plan, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_full_disk_keeps_what_is_finished(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16: one line that says no space; the layers before lie there and the job goes on from them."""
    checkpoint = open_checkpoint(llama)
    plan = small_plan(checkpoint, "rtn")
    original = work_folder._flush

    def full(path: Path) -> None:
        if "layer-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path)

    monkeypatch.setattr(work_folder, "_flush", full)
    with pytest.raises(OutputError, match="no space left"):
        run_core(checkpoint, plan, tmp_path / "work")
    monkeypatch.undo()
    assert not list((tmp_path / "work").glob(".*"))
    done = json.loads((tmp_path / "work" / "manifest.json").read_text())["layers_done"]
    assert done == 1
    result = run_core(checkpoint, plan, tmp_path / "work", resume=True)
    run_core(checkpoint, plan, tmp_path / "whole")
    assert folder_bytes(result.folder.path) == folder_bytes(tmp_path / "whole")


def test_progress_rises_and_a_stop_is_obeyed(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    plan = small_plan(checkpoint, "rtn")
    seen: list[QuantizeProgress] = []
    run_core(checkpoint, plan, tmp_path / "a", on_progress=seen.append)
    shares = [place.done for place in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert "layer 2 of 3" in " ".join(place.detail for place in seen)
    assert any("s left" in place.detail for place in seen)
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count > 6

    with pytest.raises(QuantizeCancelledError, match="resume"):
        run_core(checkpoint, plan, tmp_path / "b", should_stop=stop)
    run_core(checkpoint, plan, tmp_path / "b", resume=True)
    assert folder_bytes(tmp_path / "b") == folder_bytes(tmp_path / "a")


def test_max_memory_is_kept_by_doing_less(llama: Path, tmp_path: Path) -> None:
    """E11: what does not fit is left out in turn and said; what cannot fit at all is refused."""
    checkpoint = open_checkpoint(llama)
    plan = small_plan(checkpoint)
    spec = build_decoder(checkpoint).spec
    calibration = random_calibration(spec.vocab_size)
    without = estimate_memory(spec, replace(plan, asymmetric_share=0.0), calibration, 256)
    result = run_core(checkpoint, plan, tmp_path / "a", calibration, max_memory=without)
    assert [notice.kind for notice in result.notices] == ["asymmetric_term_left_out"]
    least = estimate_memory(spec, replace(plan, method="rtn"), calibration, 256)
    result = run_core(checkpoint, plan, tmp_path / "b", calibration, max_memory=least)
    assert result.notices[-1].kind == "error_feedback_left_out"
    assert {outcome.method for outcome in result.layer(0).outcomes.values()} == {"rtn"}
    with pytest.raises(ResourceError, match="max-memory 100 MiB: one layer of this model needs"):
        run_core(checkpoint, plan, tmp_path / "c", calibration, max_memory=100 << 20)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
def test_every_method_is_nearer_to_the_model_than_the_one_before(arch: str, tmp_path: Path) -> None:
    """KL divergence from the model on ids that calibration never saw: usual rounding > GPTQ, AWQ."""
    checkpoint = open_checkpoint(make_tiny(arch, tmp_path / arch, num_hidden_layers=2))
    decoder = build_decoder(checkpoint)
    calibration = random_calibration(decoder.spec.vocab_size, sequences=16, length=48)
    ids = torch.randint(
        0, decoder.spec.vocab_size, (96,), generator=torch.Generator().manual_seed(9)
    ).tolist()
    wanted = PagedRun(decoder).step([("a", ids)])[0].log_softmax(-1)

    def divergence(plan: CorePlan, name: str, calibrated: bool) -> float:
        result = run_core(checkpoint, plan, tmp_path / name, calibration if calibrated else None)
        found = (
            PagedRun(build_decoder(as_checkpoint(checkpoint, result))).step([("a", ids)])[0].log_softmax(-1)
        )
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    usual = divergence(small_plan(checkpoint, "rtn", candidates=0), "usual", False)
    fed_back = divergence(small_plan(checkpoint, "gptq"), "gptq", True)
    rescaled = divergence(small_plan(checkpoint, "awq"), "awq", True)
    assert 0 < fed_back < 0.9 * usual
    assert 0 < rescaled < 0.9 * usual


def test_block_types_of_a_mixture_go_through_error_feedback(tmp_path: Path) -> None:
    """Q4_K where rows are whole blocks of 256, and the types that stand in for it elsewhere."""
    checkpoint = open_checkpoint(
        make_tiny("llama", tmp_path / "model", quantizable=True, num_hidden_layers=1, intermediate_size=288)
    )
    vocab = checkpoint.tensors()["token_embd.weight"].shape[0]
    grids = {
        name: BlockTypeGrid(
            "Q5_0" if "ffn_down" in name else ("Q6_K" if "attn_v" in name else "Q4_K"), "fast"
        )
        for name in uniform_grids(checkpoint, IntegerGrid(4, 32))
    }
    plan = CorePlan(grids, "gptq", RoundingOptions(), 0.0)
    calibration = random_calibration(vocab, sequences=24, length=64)
    result = run_core(checkpoint, plan, tmp_path / "work", calibration).layer(0)
    rounded = run_core(checkpoint, replace(plan, method="rtn"), tmp_path / "rtn", calibration).layer(0)
    assert set(result.outcomes) == set(grids)
    for name, outcome in result.outcomes.items():
        assert outcome.weight.layout.value == grids[name].type_name  # type: ignore[union-attr]
        assert dequantize(outcome.weight).shape == tuple(checkpoint.tensors()[name].shape)
        assert outcome.method == "gptq" and rounded.outcomes[name].method == "rtn"
        assert outcome.relative_error is not None and outcome.relative_error < 0.02


def test_the_peak_is_that_of_this_process_alone() -> None:
    """getrusage's would begin with that of whoever started it."""
    code = "from edgellm_quantize.process_memory import peak_memory; print(peak_memory())"
    parent = (
        "import subprocess, sys; held = bytearray(b'x') * (600 << 20); "
        "print(subprocess.run([sys.executable, '-c', sys.argv[1]], check=True, capture_output=True, "
        "text=True).stdout)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", parent, code], check=True, capture_output=True, text=True, env=environment
    )
    assert 0 < int(done.stdout) < 300 << 20
