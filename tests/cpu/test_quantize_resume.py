"""Jobs that were stopped: the same bytes when they go on, and a refusal where that would mix two jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from edgellm_models.errors import BadInputError
from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob
from tests.support.quantize_runs import POINTS, RECIPES, interrupt, model_for, output_bytes, small_text
from tests.support.tiny_models import make_tiny, tiny_gguf


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_jobs_go_on_to_the_same_output(recipe: str, tmp_path: Path) -> None:
    """E16: kill -9 of a process in a layer and while it writes; nothing but the output is left in the end."""
    model = model_for(recipe, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.quantize_runs", str(model), str(tmp_path), recipe],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = output_bytes(tmp_path / "whole" / "out")
    for number in range(len(POINTS)):
        assert [path.name for path in (tmp_path / str(number)).iterdir()] == ["out"]
        assert output_bytes(tmp_path / str(number) / "out") == whole


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> QuantizeJob:
    """A job with a target of which all layers are done and no output is written."""
    folder = tmp_path_factory.mktemp("stopped")
    job = QuantizeJob(
        model_for("target", folder / "model"), folder / "out", RECIPES["target"], small_text(folder)
    )
    interrupt(job, "writing")
    return job


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"target_bpw": 6.0}, "target_bpw"),
        ({"tensor_types": ()}, "tensor_types"),
        ({"tensor_types": (("attn_v", "Q5_K"),)}, "tensor_types"),
        ({"effort": "default"}, "effort"),
        ({"method": "rtn"}, "measured, method"),
        (None, "calibration"),
    ],
)
def test_types_of_another_job_are_not_taken(
    change: dict[str, Any] | None, word: str, stopped: QuantizeJob, tmp_path: Path
) -> None:
    """A resumed job with another target is refused: it would write a file of the old one's size."""
    shutil.copytree(stopped.out.with_name("out.work"), tmp_path / "out.work")
    job = replace(stopped, out=tmp_path / "out", resume=True)
    if change is not None:
        job = replace(job, recipe=replace(job.recipe, **change))
    else:
        job = replace(job, calibration=replace(job.calibration, samples=7))
    with pytest.raises(BadInputError, match=rf"out\.work: .* another job \(differing: {word}\): give the"):
        quantize_model(job)
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_another_model_of_the_same_shape_is_refused(recipe: str, form: str, tmp_path: Path) -> None:
    """Weights that were trained on: same names, types, shapes and bytes, and half of the layers are done."""
    shape = {"quantizable": recipe in ("gguf", "target"), "num_hidden_layers": 2}

    def source(seed: int) -> Path:
        folder = make_tiny("llama", tmp_path / f"model{seed}", seed=seed, **shape)
        return folder if form == "folder" else tiny_gguf(folder, tmp_path / f"{seed}.gguf")

    first, second = source(0), source(1)
    job = QuantizeJob(first, tmp_path / "out", RECIPES[recipe], small_text(tmp_path))
    interrupt(job, "quantizing", 0.5)
    if form == "folder":
        shutil.rmtree(first)
    second.rename(first)
    with pytest.raises(BadInputError, match=r"another job \(differing: weights\)"):
        quantize_model(replace(job, resume=True))
    assert not job.out.exists()


def test_work_of_another_version_is_refused(
    stopped: QuantizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounding may differ, and one file says one version."""
    shutil.copytree(stopped.out.with_name("out.work"), tmp_path / "out.work")
    monkeypatch.setattr("edgellm_quantize.provenance.tool_version", lambda: "0.0.1")
    with pytest.raises(BadInputError, match=r"another job \(differing: edgellm\)"):
        quantize_model(replace(stopped, out=tmp_path / "out", resume=True))


class Writer:
    """Writes the same for the same prompts, half of what is asked for, and counts its calls."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.seeds: list[int] = []
        self.interrupted_at = interrupted_at

    def __call__(self, prompts: Sequence[Sequence[int]], most: int, seed: int) -> list[list[int]]:
        if self.interrupted_at == len(self.seeds):
            raise KeyboardInterrupt
        self.seeds.append(seed)
        return [
            [5 + (seed + index + place) % 90 for place in range(most // 2)] for index in range(len(prompts))
        ]


def own_text(recipe: str, folder: Path, generate: Callable[..., Any]) -> QuantizeJob:
    spec = CalibrationSpec("self", samples=12, sequence_length=32, seed=3)
    model = model_for(recipe, folder / "model")
    return QuantizeJob(model, folder / "out", RECIPES[recipe], spec, generate=generate)


@pytest.mark.parametrize(
    ("recipe", "phase", "share"),
    [("gptq", "quantizing", 0.5), ("gguf", "writing", 0.0), ("target", "calibrating", 0.01)],
)
def test_what_the_model_wrote_is_not_written_again(
    recipe: str, phase: str, share: float, tmp_path: Path
) -> None:
    """Also where the job was stopped before its first layer, while it chose types."""
    writer = Writer()
    job = own_text(recipe, tmp_path, writer)
    interrupt(job, phase, share)
    assert len(writer.seeds) > 1

    def never(*_: object) -> list[list[int]]:
        raise AssertionError("asked again")

    with pytest.raises(BadInputError, match=r"another job \(differing: seed\)"):
        quantize_model(replace(job, resume=True, calibration=replace(job.calibration, seed=4)))
    resumed = quantize_model(replace(job, resume=True, generate=never))
    whole = quantize_model(
        replace(job, out=tmp_path / "whole" if recipe == "gptq" else tmp_path / "out.whole")
    )
    assert resumed.calibration_hash == whole.calibration_hash
    assert list(output_bytes(resumed.out).values()) == list(output_bytes(whole.out).values())
    assert not list(tmp_path.glob("*.work"))


def test_rounds_that_are_missing_are_written(tmp_path: Path) -> None:
    """Stopped while it wrote: what is there is kept, the rest follows; without resume all is written anew."""
    job = own_text("gptq", tmp_path, Writer(interrupted_at=1))
    with pytest.raises(KeyboardInterrupt):
        quantize_model(job)
    rest, again = Writer(), Writer()
    quantize_model(replace(job, resume=True, generate=rest))
    quantize_model(replace(job, out=tmp_path / "again", generate=again))
    assert rest.seeds == again.seeds[1:] and again.seeds[0] == 3
    assert output_bytes(tmp_path / "out") == output_bytes(tmp_path / "again")


def test_text_that_is_too_short_leaves_nothing(tmp_path: Path) -> None:
    job = own_text("gptq", tmp_path, lambda prompts, most, seed: [[5, 6]] * len(prompts))
    with pytest.raises(BadInputError, match="too few to calibrate with"):
        quantize_model(replace(job, calibration=replace(job.calibration, samples=1)))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def cut(path: Path) -> None:
    """As after a crash of the system: the second half is missing."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lacks_a_tensor(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        notes = stored.metadata()
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path, notes)


def lacks_notes(path: Path) -> None:
    save_file(load_file(path), path)


def another_shape(path: Path) -> None:
    save_file({name: tensor[:-1].contiguous() for name, tensor in load_file(path).items()}, path)


def other_value(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"value": {"types": {}, "rounds": [{}]}}))


def lacks_its_value(path: Path) -> None:
    path.write_text(json.dumps({"depends": json.loads(path.read_text())["depends"]}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("layer-00001.safetensors", cut),
        ("layer-00001.safetensors", zeros),
        ("layer-00000.safetensors", lacks_a_tensor),
        ("layer-00000.safetensors", lacks_notes),
        ("state-00002.safetensors", cut),
        ("state-00002.safetensors", zeros),
        ("state-00002.safetensors", lacks_a_tensor),
        ("state-00002.safetensors", another_shape),
        ("kept-types.json", cut),
        ("kept-types.json", zeros),
        ("kept-types.json", lacks_its_value),
        ("kept-types.json", other_value),
    ],
)
def test_a_damaged_file_is_named(
    name: str, damage: Callable[[Path], None], stopped: QuantizeJob, tmp_path: Path
) -> None:
    shutil.copytree(stopped.out.with_name("out.work"), tmp_path / "out.work")
    damage(tmp_path / "out.work" / name)
    with pytest.raises(BadInputError, match=rf"{name}: .*damaged: remove its folder to begin anew"):
        quantize_model(replace(stopped, out=tmp_path / "out", resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]


@pytest.mark.parametrize("damage", [cut, lacks_its_value, other_value])
def test_damaged_writing_is_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    job = own_text("gptq", tmp_path, Writer())
    interrupt(job, "quantizing")
    damage(tmp_path / "out.work" / "kept-calibration.json")
    with pytest.raises(BadInputError, match=r"kept-calibration\.json: .*damaged: remove its folder"):
        quantize_model(replace(job, resume=True))
