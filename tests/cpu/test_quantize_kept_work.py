"""Unfinished work: every end of a job says what is kept, a resumed one where it went on; nothing is lost."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from edgellm.cli.errors import Terminated
from edgellm.cli.main import run
from edgellm_quantize import gguf_file, hf_folder, job, work_folder
from tests.support.tiny_models import make_tiny

GGUF = ("--type", "Q4_0")
FOLDER = ("--format", "gptq", "--group-size", "32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=3)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A fox met a hen by the old mill, and they talked. " * 30)
    return path


def quantize(source: Path, out: Path, text: Path, *more: str | Path) -> int:
    small = ("--calibration", text, "--samples", "4", "--sequence-length", "32", "--effort", "fast")
    return run(["quantize", *map(str, (source, out, *small, *more))])


def stop_in(layer: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends so when it comes to a layer (counted from 0)."""
    whole = job.quantize_layer

    def stopping(checkpoint: object, loader: object, plan: object, index: int, *rest: object) -> object:
        if index == layer:
            raise error
        return whole(checkpoint, loader, plan, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "quantize_layer", stopping)


def bytes_of(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize(("form", "named"), [(GGUF, False), (FOLDER, True)])
def test_an_interrupted_job_says_what_is_kept_and_where_it_goes_on(
    source: Path,
    text: Path,
    tmp_path: Path,
    error: type[BaseException],
    code: int,
    form: tuple[str, ...],
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / ("place" if named else "out.work")
    options = (*form, *(("--work-dir", work) if named else ()))
    assert quantize(source, tmp_path / "whole", text, *form) == 0
    with monkeypatch.context() as stopping:
        stop_in(2, error(), stopping)
        capsys.readouterr()
        assert quantize(source, tmp_path / "out", text, "-q", *options) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and not said.out
    assert f"2 of 3 layers are kept in {work}" in said.err and "--resume goes on" in said.err
    # A run that would begin anew does not throw them away.
    before = bytes_of(work)
    assert quantize(source, tmp_path / "out", text, *options) == 73
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "2 of 3 layers of an unfinished job" in said.err
    assert bytes_of(work) == before
    (work / "thesis.txt").write_text("years of work")
    assert quantize(source, tmp_path / "out", text, "--json", "--resume", *options) == 0
    said = capsys.readouterr()
    assert "went on with layer 3 of 3; finished before: 2" in said.err
    kinds = [notice["kind"] for notice in json.loads(said.out)["notices"]]
    assert kinds.count("resumed") == 1
    assert bytes_of(work) == {"thesis.txt": b"years of work"}  # what the job made is gone, no other file
    got, wanted = bytes_of(tmp_path / "out"), bytes_of(tmp_path / "whole")
    if form is GGUF:
        assert got["out"] == wanted["whole"]
    else:
        assert got == wanted


@pytest.mark.parametrize("named", [False, True])
def test_a_finished_job_leaves_no_work(source: Path, text: Path, tmp_path: Path, named: bool) -> None:
    """In the folder that the user named as in the one beside OUT, whose place is no part of the result."""
    options = ("--work-dir", tmp_path / "place") if named else ()
    assert quantize(source, tmp_path / "out", text, *GGUF, *options) == 0
    left = {path.name for path in tmp_path.iterdir()} - {"home", "text.txt", "out"}
    assert left == ({"place"} if named else set())
    assert not named or not list((tmp_path / "place").iterdir())


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ENOSPC])
@pytest.mark.parametrize("form", [GGUF, FOLDER])
def test_a_full_disk_says_what_is_kept(
    source: Path,
    text: Path,
    tmp_path: Path,
    number: int,
    form: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "File too large" if number == errno.EFBIG else "No space left on device")

    with monkeypatch.context() as stopping:
        stopping.setattr(gguf_file, "_write", full)
        stopping.setattr(hf_folder, "write_shards", full)
        assert quantize(source, tmp_path / "out", text, *form) == 73
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note")]
    assert len(said) == 1 and f"3 of 3 layers are kept in {tmp_path}/out.work" in said[0]
    assert "--resume goes on" in said[0] and "nothing was kept" not in said[0]
    assert quantize(source, tmp_path / "out", text, "--resume", *form) == 0
    assert "all 3 layers were finished before" in capsys.readouterr().err


def test_a_full_work_folder_says_what_is_kept(
    source: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flush = work_folder._flush

    def full(path: Path) -> None:
        if "layer-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    monkeypatch.setattr(work_folder, "_flush", full)
    assert quantize(source, tmp_path / "out", text, *GGUF) == 73
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no space left" in said and "1 of 3 layers are kept" in said


def test_a_matrix_that_cannot_be_written_leaves_a_way_on(
    source: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OUT is whole by then, so that --resume alone would be refused."""
    options = (*FOLDER, "--save-imatrix", tmp_path / "seen.gguf")
    with monkeypatch.context() as stopping:
        stop = KeyboardInterrupt()

        def stopped(*_: object) -> None:
            raise stop

        stopping.setattr("edgellm_quantize.imatrix_file.write_imatrix", stopped)
        assert quantize(source, tmp_path / "out", text, *options) == 130
    assert f"{tmp_path}/out is whole, but not the importance matrix" in capsys.readouterr().err
    (tmp_path / "out").rename(tmp_path / "away")
    assert quantize(source, tmp_path / "out", text, "--resume", *options) == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "away") and (tmp_path / "seen.gguf").is_file()


def test_nothing_is_said_of_work_that_the_job_did_not_touch(
    source: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Layers of an earlier job are promised only by a job that can go on with them."""
    with monkeypatch.context() as stopping:
        stop_in(1, KeyboardInterrupt(), stopping)
        assert quantize(source, tmp_path / "out", text, *GGUF) == 130
    capsys.readouterr()
    assert quantize(source, tmp_path / "out", text, "--type", "Q8_0", "--resume") == 65
    assert "layers are kept" not in capsys.readouterr().err
    # Jobs that keep nothing have no use for that folder.
    assert run(["quantize", str(source), str(tmp_path / "out"), "--type", "Q8_0"]) == 0
    assert (tmp_path / "out.work" / "manifest.json").is_file()
