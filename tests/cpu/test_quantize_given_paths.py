"""No option of ``edgellm quantize`` writes over what is there, over another output, or into the source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm.cli.main import run
from edgellm_quantize import calibrated_run, gguf_job
from tests.support.tiny_models import make_tiny, tiny_gguf


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(autouse=True)
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this is refused before the model is run."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("edgellm.cli.quantize.own_writing", lambda path: never)
    for module in (calibrated_run, gguf_job):
        monkeypatch.setattr(module, "read_calibration", never)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder and a GGUF file of one tiny model."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny("llama", folder / "tiny", num_hidden_layers=1)
    tiny_gguf(folder / "tiny", folder / "tiny.gguf")
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below, by its name and content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"-"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def place(tmp_path: Path, models: Path) -> Path:
    """Models of its own, a text, an importance matrix, and links of each kind."""
    os.link(models / "tiny.gguf", tmp_path / "tiny.gguf")
    (tmp_path / "tiny").mkdir()
    for path in (models / "tiny").iterdir():
        os.link(path, tmp_path / "tiny" / path.name)
    (tmp_path / "text.txt").write_text("A fox met a hen by the old mill. " * 30)
    (tmp_path / "seen.gguf").write_bytes(b"an importance matrix")
    (tmp_path / "nowhere.gguf").symlink_to(tmp_path / "nothing")
    (tmp_path / "soft.gguf").symlink_to("tiny.gguf")
    os.link(tmp_path / "text.txt", tmp_path / "hard.gguf")
    (tmp_path / "place").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", ["gguf", "gptq"])
@pytest.mark.parametrize("source", ["tiny", "tiny.gguf"])
@pytest.mark.parametrize(
    "matrix",
    [
        *("tiny.gguf", "tiny", "tiny/model.safetensors", "tiny/config.json", "text.txt", "seen.gguf"),
        *("soft.gguf", "hard.gguf", "nowhere.gguf"),
        *("out", "place/out", "tiny/../out", "out.work", "out.work/i.gguf", "place/out.work/layer-0"),
        *("out/model.safetensors", "out/config.json", "out/sub/i.gguf"),
    ],
)
def test_the_importance_matrix_is_written_over_nothing(
    place: Path, source: str, matrix: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(place)
    arguments = [
        "--format",
        form,
        "--calibration",
        str(place / "text.txt"),
        "--save-imatrix",
        f"{place}/{matrix}",
    ]
    assert run(["quantize", str(place / source), str(place / "out"), *arguments]) == 73
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and matrix.rpartition("/")[2] in said.err and not said.out
    assert everything(place) == before


def test_the_importance_matrix_that_is_read_stays(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(place)
    both = ["--imatrix", str(place / "seen.gguf"), "--save-imatrix", str(place / "place" / "seen.gguf")]
    assert run(["quantize", str(place / "tiny"), str(place / "out"), *both]) == 73
    assert "exists already" in capsys.readouterr().err and everything(place) == before


@pytest.mark.parametrize("source", ["tiny", "tiny/../tiny"])
@pytest.mark.parametrize(
    "name", ["other.safetensors", "adapter.json", "tokenizer.model", "Notes.TXT", "c.jinja"]
)
def test_an_output_becomes_no_file_of_the_source(
    place: Path, source: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(place)
    text = ["--calibration", str(place / "text.txt")]
    for out, more in ((f"tiny/{name}", []), ("out", ["--save-imatrix", f"{place}/place/tiny/{name}"])):
        assert run(["quantize", f"{place}/{source}", f"{place}/{out}", *text, *more]) == 73
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "one of the source folder's own files" in said
    assert everything(place) == before


def test_a_gguf_file_may_lie_in_the_source_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No reader of the folder looks at it: the same model comes of it afterwards."""
    for name in ("first.gguf", "second.gguf"):
        arguments = ["--type", "Q8_0", "--effort", "fast"]
        assert run(["quantize", str(place / "tiny"), str(place / "tiny" / name), *arguments]) == 0
    first = (place / "tiny" / "first.gguf").read_bytes()
    assert first == (place / "tiny" / "second.gguf").read_bytes()


@pytest.mark.parametrize(
    ("out", "work"), [("out", "out"), ("out", "out/work"), ("work/out", "work"), ("place/out", "tiny/../out")]
)
@pytest.mark.parametrize("form", ["gguf", "gptq"])
def test_output_and_work_folder_are_two_places(
    place: Path, out: str, work: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "work").mkdir()
    before = everything(place)
    arguments = ["--format", form, "--calibration", str(place / "text.txt"), "--work-dir", f"{place}/{work}"]
    assert run(["quantize", str(place / "tiny"), f"{place}/{out}", *arguments]) == 73
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "work folder" in said and everything(place) == before
