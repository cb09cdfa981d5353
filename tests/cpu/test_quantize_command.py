"""``edgellm quantize``: files that come out, JSON, dry runs, progress, refusals with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from edgellm.cli.main import run
from edgellm.cli.output import Output
from edgellm.cli.quantize import _Progress, command, own_writing
from edgellm_models.checkpoint import open_checkpoint
from edgellm_quantize.recipe import GGUF_TYPES, QuantizeProgress
from tests.support.tiny_models import make_tiny, tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


def quantize(*arguments: str | Path) -> int:
    return run(["quantize", *map(str, arguments)])


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_gguf_is_what_comes_out_unless_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q4_K_M without a word; every tensor in the report with its error; E13: fallbacks are said."""
    assert quantize(source, tmp_path / "out.gguf", "--json", "--effort", "fast") == 0
    report = answer(capsys)
    assert (report["format"], report["type"], report["dry_run"]) == ("gguf", "Q4_K_M", False)
    opened = open_checkpoint(tmp_path / "out.gguf")
    types = {name: info.type_name for name, info in opened.tensors().items()}
    assert {tensor["name"]: tensor["type"] for tensor in report["tensors"]} == types
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert by_name["blk.0.attn_q.weight"]["type"] == "Q5_0"
    assert 0 < by_name["blk.0.attn_q.weight"]["relative_error"] < 0.01
    assert "type_fallback" in [notice["kind"] for notice in report["notices"]]
    assert report["bits_per_weight"] > 5 and report["bytes"] == (tmp_path / "out.gguf").stat().st_size


@pytest.mark.parametrize("kind", [kind for kind in GGUF_TYPES if kind != "Q2_K_S"])
def test_types_without_calibration(
    source: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(source, tmp_path / "out.gguf", "--type", kind.lower(), "--effort", "fast") == 0
    assert open_checkpoint(tmp_path / "out.gguf").metadata["general.architecture"] == "llama"
    shown = capsys.readouterr()
    assert f"gguf {kind}" in shown.out and "bits per weight" in shown.out and "4x" not in shown.out


def test_folders_from_a_gguf(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = tiny_gguf(source, tmp_path / "tiny.gguf")
    assert quantize(gguf, tmp_path / "gptq", "--bits", "3", "--group-size", "32") == 0
    section = json.loads((tmp_path / "gptq" / "quantize_config.json").read_text())
    assert (section["bits"], section["checkpoint_format"], section["sym"]) == (3, "gptq_v2", True)
    assert "for vLLM: GPTQ of 3 bits" in capsys.readouterr().err
    assert quantize(gguf, tmp_path / "awq", "--format", "awq", "--group-size", "32", "-q") == 0
    assert quantize(gguf, tmp_path / "hf", "--format", "hf", "--dtype", "bf16") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    assert open_checkpoint(tmp_path / "hf").weight("blk.0.attn_q.weight").data.dtype.itemsize == 2


def test_calibrated_from_the_command_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text file and the model's own writing; the work folder goes when the output is there."""
    (tmp_path / "text.txt").write_text("A fox met a hen by the old mill, and they talked. " * 60)
    sizes = ("--samples", "4", "--sequence-length", "32", "--effort", "fast", "--json")
    text = ("--calibration", tmp_path / "text.txt", *sizes)
    assert quantize(source, tmp_path / "gptq", "--bits", "4", "--group-size", "32", *text) == 0
    report = answer(capsys)
    assert report["method"] == "gptq" and report["calibration_tokens"] == 128
    assert quantize(source, tmp_path / "out.gguf", "--save-imatrix", tmp_path / "seen.gguf", *text) == 0
    assert answer(capsys)["calibration_hash"] == report["calibration_hash"]
    imatrix = ("--imatrix", tmp_path / "seen.gguf")
    assert quantize(source, tmp_path / "second.gguf", *imatrix, "--type", "Q2_K_S") == 0
    # What the model writes may end early, so twice as much of it is asked for.
    own_text = ("--samples", "8", *sizes[2:])
    awq = ("--format", "awq", "--method", "awq", "--group-size", "32")
    assert quantize(source, tmp_path / "awq", *awq, *own_text) == 0
    out = capsys.readouterr().out
    own = json.loads(out[out.index('{"') :])
    assert own["method"] == "awq" and own["calibration_tokens"] > 32
    left = {path.name for path in tmp_path.iterdir()} - {"home"}
    assert left == {"text.txt", "gptq", "out.gguf", "seen.gguf", "second.gguf", "awq"}


def test_own_writing_continues_prompts(source: Path) -> None:
    generate = own_writing(source)
    first = generate([[5, 9], [7]], 6, 3)
    assert [len(ids) for ids in first] and all(0 < len(ids) <= 6 for ids in first)
    assert first == generate([[5, 9], [7]], 6, 3)
    alike = generate([[5, 9]] * 8, 12, 3)
    assert len({tuple(ids) for ids in alike}) == 8  # a beginning that is drawn twice gives two texts


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--bits", "4", "--group-size", "32"), ("--format", "hf")):
        assert quantize(source, tmp_path / "out", "--dry-run", *arguments) == 0
        shown = capsys.readouterr().out
        assert "would be" in shown and "bits per weight" in shown and "time about" in shown
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--type", "Q9_K"), 2, "type 'Q9_K' is not known"),
        (("--format", "exl3"), 2, "format 'exl3' is not known"),
        (("--format", "gptq", "--bits", "5"), 2, "gptq has no 5 bits; it has 2, 3, 4, 8"),
        (("--format", "awq", "--bits", "8"), 2, "awq has no 8 bits"),
        (("--type", "Q4_K_M", "--bits", "4"), 2, "--type goes with --format gguf, not gptq"),
        (("--format", "hf", "--imatrix", "x.gguf"), 2, "--imatrix goes with --format gguf or gptq or awq"),
        (("--tensor-type", "attn"), 2, "--tensor-type needs REGEX=TYPE"),
        (("--tensor-type", "([=Q4_K"), 2, "no regular expression"),
        (("--max-memory", "lots"), 2, "--max-memory needs bytes"),
        (("--calibration", "no/such.txt"), 66, "no/such.txt"),
        (("--imatrix", "no/such.gguf"), 66, "no such file"),
        (("--bits", "4", "--imatrix", "no/such.gguf"), 66, "no such file"),
        (("--format", "hf", "--calibration", __file__), 2, "a dense folder rounds nothing"),
        (("--bits", "4", "--group-size", "48"), 2, "group size 48 is read by no tool"),
        (("--bits", "4", "--group-size", "128"), 2, "groups of 128 do not divide"),
        (("--bits", "4", "--resume"), 2, "--resume goes with calibration"),
        (("--method", "gptq", "--calibration", "none"), 2, "needs calibration"),
    ],
)
def test_refusals(
    source: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, the right exit code, nothing left behind."""
    assert quantize(source, tmp_path / "out", *arguments) == code
    shown = capsys.readouterr()
    errors = [line for line in shown.err.splitlines() if not line.startswith("note")]
    assert len(errors) <= 2 and words in shown.err and not shown.out
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


def test_outputs_that_are_in_the_way(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E16: exit 73 for what exists, and for a folder that is missing; 66 for a missing source."""
    (tmp_path / "there").write_text("mine")
    for arguments in ((), ("--bits", "4", "--group-size", "32")):
        for text in ((), ("--calibration", "self")):
            assert quantize(source, tmp_path / "there", *arguments, *text) == 73
            assert quantize(source, tmp_path / "no" / "out", *arguments, *text) == 73
        imatrix = ("--save-imatrix", tmp_path / "no" / "i.gguf")
        assert quantize(source, tmp_path / "out", *arguments, "--calibration", "self", *imatrix) == 73
    assert (tmp_path / "there").read_text() == "mine"
    assert quantize(tmp_path / "nothing", tmp_path / "out") == 66
    (tmp_path / "empty").mkdir()
    assert quantize(tmp_path / "empty", tmp_path / "out") == 65


def test_progress_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    output = Output()
    monkeypatch.setattr(output, "status", lines.append)
    now = [100.0]
    monkeypatch.setattr("edgellm.cli.quantize.time.monotonic", lambda: now[0])
    progress = _Progress(output)
    progress(QuantizeProgress("quantizing", 0.0, "layer 1 of 4"))
    now[0] += 30
    progress(QuantizeProgress("quantizing", 0.25, "layer 2 of 4"))
    assert lines[0].endswith("0%  layer 1 of 4")
    assert "[######                  ]  25%  90 s left" in lines[1] or "2 min left" in lines[1]


def test_every_published_option_is_there() -> None:
    """Names of the published interface."""
    names = {name for param in command.params if isinstance(param, click.Option) for name in param.opts}
    published = {
        *("--format", "--type", "--bits", "--group-size", "--asym", "--dtype", "--method", "--effort"),
        *("--calibration", "--samples", "--sequence-length", "--imatrix", "--save-imatrix", "--target-bpw"),
        *("--tensor-type", "--work-dir", "--resume", "--max-memory", "--dry-run", "--json"),
    }
    assert published <= names
