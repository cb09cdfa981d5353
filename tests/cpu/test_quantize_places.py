"""Where outputs go: refused before any work, in one wording; what killed runs left is cleared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.errors import BadInputError, EdgeLLMError, OutputError
from edgellm_quantize import output_place
from edgellm_quantize.api import quantize_model
from edgellm_quantize.output_place import check_space
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeProgress, QuantizeRecipe
from tests.support.quantize_runs import RECIPES, interrupt, model_for, small_text


def never(*_: object) -> list[list[int]]:
    raise AssertionError("the model was run before the places were looked at")


def self_job(recipe: str, folder: Path) -> QuantizeJob:
    """The model would have to write its text before anything else is done."""
    spec = CalibrationSpec("self", samples=8, sequence_length=32)
    return QuantizeJob(
        model_for(recipe, folder / "model"), folder / "out", RECIPES[recipe], spec, generate=never
    )


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Every disk has so many bytes left."""
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def needed_bytes(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a job asks for, by its refusal on a full disk."""
    with monkeypatch.context() as full:
        with_free(full, 0)
        with pytest.raises(OutputError, match=r"out: no space: .* 0 are free") as raised:
            quantize_model(job)
    found = re.search(r"([\d,]+) bytes are needed", str(raised.value))
    assert found is not None
    return int(found[1].replace(",", ""))


CASES: list[tuple[Callable[[QuantizeJob, Path], QuantizeJob], type[EdgeLLMError], str]] = [
    (
        lambda job, folder: replace(job, out=folder / "no" / "out"),
        OutputError,
        r"no/out: the folder .*no does not exist: create it",
    ),
    (
        lambda job, folder: replace(job, save_imatrix=folder / "no" / "i.gguf"),
        OutputError,
        r"no/i\.gguf: the folder .*no does not exist: create it",
    ),
    (
        lambda job, folder: replace(job, save_imatrix=folder / "model"),
        OutputError,
        "model: this exists already",
    ),
    (lambda job, folder: replace(job, save_imatrix=job.out), OutputError, "cannot have one name"),
    (lambda job, folder: replace(job, work_dir=folder / "model"), BadInputError, "holds other files"),
    (
        lambda job, folder: replace(job, work_dir=folder / "model" / "config.json"),
        OutputError,
        "this is no folder",
    ),
    (lambda job, folder: replace(job, resume=True), BadInputError, "there is no work to resume"),
]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    CASES,
    ids=["out", "matrix", "matrix-folder", "one-name", "work-others", "work-file", "nothing-to-resume"],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_place_is_refused_before_any_work(
    recipe: str,
    change: Callable[[QuantizeJob, Path], QuantizeJob],
    kind: type[EdgeLLMError],
    words: str,
    tmp_path: Path,
) -> None:
    """E16: not after hours, and no folder is made on the way."""
    job = self_job(recipe, tmp_path)
    files = {path.name for path in job.source.iterdir()}
    with pytest.raises(kind, match=words):
        quantize_model(change(job, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name for path in job.source.iterdir()} == files


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_closed_folder_is_refused_before_any_work(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = self_job(recipe, tmp_path)
    monkeypatch.setattr(output_place.os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputError, match=f"out: writing in {re.escape(str(tmp_path))} is not permitted"):
        quantize_model(job)


@pytest.mark.parametrize("recipe", [QuantizeRecipe(), QuantizeRecipe(target_bpw=4.6), RECIPES["gptq"]])
def test_jobs_without_calibration_look_first_too(
    recipe: QuantizeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choosing types takes a while also from the weights alone."""
    job = QuantizeJob(model_for("target", tmp_path / "model"), tmp_path / "no" / "out", recipe)
    monkeypatch.setattr("edgellm_quantize.target_size.choose_for_size", never)
    with pytest.raises(OutputError, match=r"the folder .*no does not exist"):
        quantize_model(job)
    needed = needed_bytes(replace(job, out=tmp_path / "out"), monkeypatch)
    weights = sum(path.stat().st_size for path in job.source.glob("*.safetensors")) / 4
    assert 4 <= 8 * needed / weights < 12


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_space_that_is_asked_for_is_what_is_taken(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and work folder, measured while the job runs; a resumed job asks for less by what is there."""
    job = replace(self_job(recipe, tmp_path), calibration=small_text(tmp_path), generate=None)
    needed = needed_bytes(job, monkeypatch)
    work, most = tmp_path / "out.work", 0

    def measure(_: QuantizeProgress) -> None:
        nonlocal most
        files = list(work.iterdir()) if work.is_dir() else []
        most = max(most, sum(path.stat().st_size for path in files))

    quantize_model(replace(job, on_progress=measure))
    outputs = [tmp_path / "out"] if recipe in ("gguf", "target") else (tmp_path / "out").glob("*.safetensors")
    taken = most + sum(path.stat().st_size for path in outputs)
    assert 0.7 * taken < needed < 1.6 * taken
    shutil.rmtree(tmp_path / "out") if (tmp_path / "out").is_dir() else (tmp_path / "out").unlink()
    interrupt(job, "writing")
    there = sum(path.stat().st_size for path in work.iterdir())
    assert needed_bytes(replace(job, resume=True), monkeypatch) == needed - there


def test_disks_are_counted_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on one disk is added; another disk has its own room; a folder may be one that comes later."""
    (tmp_path / "second").mkdir()
    first, second = tmp_path / "out", tmp_path / "second" / "later" / "layer"
    with_free(monkeypatch, 100)
    check_space(first, [(first, 50), (second, 50)])
    with pytest.raises(OutputError, match="no space: 101 bytes are needed, 100 are free"):
        check_space(first, [(first, 50), (second, 51)])
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        found = real(path, *arguments, **options)
        parts = list(found)
        parts[2] += "second" in str(path)
        return os.stat_result(parts)

    monkeypatch.setattr(os, "stat", stat)
    check_space(first, [(first, 50), (second, 100)])
    with pytest.raises(OutputError, match=r"101 bytes are needed, 100 are free in .*second"):
        check_space(first, [(first, 50), (second, 101)])


def test_a_matrix_may_go_into_the_folder_that_is_written(tmp_path: Path) -> None:
    job = self_job("gptq", tmp_path)
    job = replace(job, calibration=small_text(tmp_path), save_imatrix=tmp_path / "out" / "imatrix.gguf")
    quantize_model(job)
    assert (tmp_path / "out" / "imatrix.gguf").is_file()


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_killed_run_left_goes_first(recipe: str, calibrated: bool, dead: int, tmp_path: Path) -> None:
    """A file, a folder, one of this process's own number (containers); not other outputs', not who runs."""
    folder = tmp_path / "place"
    folder.mkdir()
    job = replace(self_job(recipe, tmp_path), out=folder / "out", generate=None)
    job = replace(job, calibration=small_text(tmp_path) if calibrated else CalibrationSpec())
    stale = [f".out.{dead}.partial", f".out.{os.getpid()}.partial"]
    others = [f".out.{os.getppid()}.partial", f".other.{dead}.partial", f".out.gguf.{dead}.partial"]
    others += [".out.x.partial", ".out.partial"]
    if calibrated:
        job = replace(job, save_imatrix=folder / "i.gguf")
        stale.append(f".i.gguf.{dead}.partial")
    (folder / stale[0]).mkdir()
    (folder / stale[0] / "model.safetensors").write_text("half")
    for name in (*stale[1:], *others):
        (folder / name).write_text("half")
    seen = []

    def look(_: QuantizeProgress) -> None:
        if not seen:  # before the long part
            seen.extend(path.name for path in folder.iterdir())

    quantize_model(replace(job, on_progress=look))
    assert seen and not set(seen) & set(stale) - {f".out.{os.getpid()}.partial"}
    outputs = {"out", "i.gguf"} if calibrated else {"out"}
    assert {path.name for path in folder.iterdir()} == {*outputs, *others}
