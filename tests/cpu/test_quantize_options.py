"""``edgellm quantize``: no option is passed over in silence, and what is said has the digits that matter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import run
from edgellm.cli.output import Output
from edgellm.cli.quantize import _Progress, summary
from edgellm_quantize import calibrated_run, gguf_job
from edgellm_quantize.kquant_mix import ModelShape, choose_types
from edgellm_quantize.recipe import QuantizeProgress, QuantizeReport, TensorReport
from edgellm_quantize.sizes import memory_size, size_change
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256 and 64, so that both kinds of types come up."""
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("source") / "tiny",
        quantizable=True,
        num_hidden_layers=1,
        intermediate_size=256,
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def never_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said here is said before the model is run."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    for module in (calibrated_run, gguf_job):
        monkeypatch.setattr(module, "read_calibration", never)


def quantize(*arguments: str | Path) -> int:
    return run(["quantize", *map(str, arguments)])


def notices(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Kind to sentence, of a run with --json."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {notice["kind"]: notice["detail"] for notice in found["notices"]}


SELF = ("--calibration", "self")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target-bpw", "5", "--type", "Q4_K_M"), "--target-bpw and --type"),
        (("--group-size", "0"), "--group-size goes with"),
        (("--bits", "0", "--format", "gguf"), "--bits goes with"),
        (("--bits", "4", "--target-bpw", "0"), "--target-bpw goes with"),
        (("--samples", "4"), "--samples goes with --calibration"),
        (("--sequence-length", "64"), "--sequence-length goes with --calibration"),
        (("--bits", "4", "--seed", "0"), "--seed goes with --calibration"),
        (("--calibration", "none", "--samples", "4"), "--samples goes with --calibration"),
        (("--work-dir", "place"), "--work-dir goes with calibration"),
        (("--format", "hf", "--method", "rtn"), "--method goes with"),
        (("--format", "hf", "--effort", "best"), "--effort goes with"),
        (("--format", "hf", *SELF), "a dense folder rounds nothing"),
        (("--target-bpw", "1"), "above 1 and at most 16 bits per weight, not 1\n"),
        (("--target-bpw", "16.000001"), "at most 16 bits per weight, not 16.000001\n"),
        (("--target-bpw", "16.5"), "above 1 and at most 16 bits per weight, not 16.5\n"),
        (("--target-bpw", "1.5"), "1.5 bits per weight cannot be met: the smallest types"),
        (("--target-bpw", "1.5", *SELF), "1.5 bits per weight cannot be met: the smallest types"),
        (("--target-bpw", "4", "--tensor-type", "ffn=F16", *SELF), "4 bits per weight cannot be met"),
        (("--tensor-type", "atn_v=Q6_K"), "atn_v=Q6_K: no tensor of this model has such a name"),
        (
            ("--tensor-type", "attn_v=Q6_K", "--tensor-type", r"blk\.7\.=Q6_K", *SELF),
            r"blk\.7\.=Q6_K: no tensor",
        ),
        (("--target-bpw", "6", "--tensor-type", "atn_v=Q6_K"), "atn_v=Q6_K: no tensor"),
        (("--bits", "4", "--group-size", "512"), "groups of 512 do not divide"),
        (("--bits", "4", "--group-size", "48"), "group size 48 is read by no tool"),
        *(
            ((option, ""), f"{option} is empty")
            for option in ("--calibration", "--imatrix", "--save-imatrix", "--work-dir", "--format", "--type")
        ),
        *(((option, ""), f"{option} is empty") for option in ("--dtype", "--max-memory", "--tensor-type")),
    ],
)
def test_options_that_say_nothing_or_two_things(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip on the command line is one line and exit code 2, with a dry run as without."""
    for more in ((), ("--dry-run",)):
        assert quantize(source, tmp_path / "out", *arguments, *more) == 2
        said = capsys.readouterr()
        assert words in said.err and said.err.count("\n") == 1 and not said.out
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


@pytest.mark.parametrize("arguments", [(), ("--calibration", "NONE", "--method", "AUTO")])
def test_words_that_ask_for_nothing_go_with_every_format(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are read in either case, and the seed's variable is for every command."""
    monkeypatch.setenv("EDGELLM_SEED", "7")
    for form in ("hf", "gptq", "gguf"):
        assert quantize(source, tmp_path / "out", "--format", form, "--dry-run", *arguments) == 0


def test_variables_without_a_use_are_no_mistakes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They hold for every run; what the command line says beside them wins."""
    for name, value in (("SAMPLES", "4"), ("SEQUENCE_LENGTH", "64"), ("WORK_DIR", str(tmp_path / "work"))):
        monkeypatch.setenv(f"EDGELLM_{name}", value)
    monkeypatch.setenv("EDGELLM_EFFORT", "fast")
    with monkeypatch.context() as more:
        more.setenv("EDGELLM_METHOD", "gptq")
        assert quantize(source, tmp_path / "out", "--format", "hf", "--dry-run") == 0
    monkeypatch.setenv("EDGELLM_TYPE", "Q8_0")
    assert quantize(source, tmp_path / "out", "--target-bpw", "6", "--dry-run") == 0
    assert "target of 6 bits" in capsys.readouterr().out
    monkeypatch.setenv("EDGELLM_TARGET_BPW", "6")
    assert quantize(source, tmp_path / "out", "--type", "Q6_K", "--dry-run") == 0
    assert "Q6_K" in capsys.readouterr().out
    assert quantize(source, tmp_path / "out", "--dry-run") == 2  # two variables: none wins
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("word", ["self", "SELF", "Self"])
def test_self_is_known_in_either_case(source: Path, tmp_path: Path, word: str) -> None:
    arguments = ("--calibration", word, "--samples", "4", "--sequence-length", "8", "--effort", "fast")
    assert quantize(source, tmp_path / "out", "--bits", "4", "--dry-run", *arguments) == 0


@pytest.mark.parametrize("option", ["--calibration", "--imatrix"])
def test_inputs_that_are_no_files(
    source: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code, words in (("home", 65, "this is a folder"), ("nothing", 66, "no such file")):
        (tmp_path / "home").mkdir(exist_ok=True)
        assert quantize(source, tmp_path / "out", option, tmp_path / name) == code
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


@pytest.mark.parametrize("size", [(), ("--target-bpw", "8")])
def test_patterns_that_change_nothing_are_named(
    source: Path, tmp_path: Path, size: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Norms keep their type; what an earlier pattern decides is decided. The others are not spoken of."""
    patterns = ("attn_v=Q6_K", "_norm=Q8_0", r"blk\.0\.attn_v=Q4_K", "attn=Q8_0")
    arguments = [part for pattern in patterns for part in ("--tensor-type", pattern)]
    assert (
        quantize(source, tmp_path / "out", "--json", "--dry-run", "--effort", "fast", *size, *arguments) == 0
    )
    found = [line for line in capsys.readouterr().err.splitlines() if "changes nothing" in line]
    assert len(found) == 2
    assert (
        "_norm=Q8_0" in found[0] and "blk.0.attn_norm.weight" in found[0] and "stay as they are" in found[0]
    )
    assert r"blk\.0\.attn_v=Q4_K" in found[1] and "a pattern before it" in found[1]


def test_a_named_type_that_does_not_fit_is_told_with_a_target_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = make_tiny("llama", tmp_path / "narrow", num_hidden_layers=1)
    arguments = ("--target-bpw", "8", "--tensor-type", "attn_q=Q4_K", "--dry-run", "--json")
    assert quantize(narrow, tmp_path / "out", *arguments) == 0
    assert "1 of Q4_K became Q5_0" in notices(capsys)["type_fallback"]


def test_a_target_that_is_not_used_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source in Q8_0 loses nothing in Q8_0: larger types are no better."""
    assert quantize(source, tmp_path / "q8.gguf", "--type", "Q8_0") == 0
    capsys.readouterr()
    arguments = ("--dry-run", "--json", "--effort", "fast")
    assert quantize(tmp_path / "q8.gguf", tmp_path / "out", "--target-bpw", "16", *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    told = [n["detail"] for n in report["notices"] if n["kind"] == "target_not_used"]
    assert len(told) == 1 and f"take {report['bits_per_weight']:.2f} bits per weight, not 16:" in told[0]
    assert 8.5 <= report["bits_per_weight"] < 10
    assert quantize(source, tmp_path / "out", "--target-bpw", "7", *arguments) == 0
    assert "target_not_used" not in notices(capsys)


def test_a_group_that_does_not_divide_is_told_with_a_way_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(source, tmp_path / "out", "--bits", "4", "--group-size", "512") == 2
    assert "take --group-size 128 or 64 or 32" in capsys.readouterr().err


def test_little_memory_is_told_in_its_unit(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (("1K", "1 KiB"), ("100", "100 bytes"), ("64M", "64 MiB")):
        for form in ((), ("--bits", "4"), ("--bits", "4", *SELF, "--dry-run")):
            assert quantize(source, tmp_path / "out", "--max-memory", given, *form) == 71
            assert f"max-memory {said}: " in capsys.readouterr().err
    assert [memory_size(n) for n in (0, 1023, 1 << 20)] == ["0 bytes", "1,023 bytes", "1 MiB"]


def test_small_changes_of_size_have_their_unit() -> None:
    changes = {0: "+0 bytes", 96: "+96 bytes", -1500: "-1.5 kB", 5_120: "+5.1 kB", 7_340_032: "+7.3 MB"}
    assert {count: size_change(count) for count in changes} == changes
    mixture = choose_types("Q4_K_M", {"blk.0.attn_k.weight": (32, 64)}, ModelShape("llama", 1, 4, 2))
    assert mixture.notices()[0].detail.endswith("(rows of 64): +256 bytes")


NAME = "a\x1b]0;title\x07\nb\u2028c\x9b2Jd"


def report_of(error: float, name: str = "blk.0.attn_q.weight") -> QuantizeReport:
    tensors = (TensorReport(name, "Q4_K", (256, 256), 36_864, error, 0.1, "rtn", "weights"),)
    return QuantizeReport(
        out=Path(f"/tmp/{NAME}"),
        format="gguf",
        type_name="Q4_K_M",
        tensors=tensors,
        nbytes=40_000,
        num_weights=65_536,
        method="rtn",
        calibration_hash=None,
        calibration_tokens=0,
        seconds=1.0,
        peak_bytes=0,
        dry_run=False,
    )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        *((0.0, "0%"), (1.2345e-8, "0.00000123%"), (4.2e-5, "0.00420%"), (0.0123, "1.23%")),
        *((0.999, "99.9%"), (1.0, "100%"), (25.0, "2500%")),
    ],
)
def test_small_errors_keep_their_digits(error: float, shown: str) -> None:
    assert f"blk.0.attn_q.weight {shown}" in "\n".join(summary(report_of(error)))


def test_names_reach_no_terminal_raw(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files and tensors: in the summary, in errors, in notices, in progress."""
    for line in summary(report_of(0.1, NAME)):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", line)
    shown: list[str] = []
    output = Output()
    monkeypatch.setattr(output, "status", shown.append)
    _Progress(output)(QuantizeProgress("writing", 0.5, NAME))
    assert shown and not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", shown[0])
    out = tmp_path / "a\x1b]0;title\x07\nb"
    for code, lines in ((0, 3), (73, 1)):
        assert quantize(source, out, "--type", "Q8_0", "--effort", "fast") == code
        said = capsys.readouterr()
        text = said.out + said.err
        assert "\x1b" not in text and "\x07" not in text and text.count("\n") >= lines
        assert "a ]0;title b" in text
