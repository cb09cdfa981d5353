"""``edgellm bench spec``: a real run's report, the profile it keeps, and what its figures leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgellm.bench.spec_bench import ClassTally, repeats
from edgellm.bench.spec_prompts import COPIES, prompts
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("m"), num_hidden_layers=4)


def run_bench(folder: Path, *arguments: str) -> int:
    from edgellm.cli.main import run

    options = ["--kernels", "torch", "--ctx", "1024", "--new-tokens", "32", "--repeat", "1", "--budget", "1"]
    return run(["bench", "spec", str(folder), *options, *arguments])


def test_a_run_reports_classes_and_keeps_a_profile(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    one = {"json": [["Say this as JSON: a boat of nine metres."]], "chat": [["Tell me about a baker."]]}
    monkeypatch.setattr("edgellm.bench.spec_prompts.prompts", lambda: one)
    assert run_bench(folder, "--json") == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    rows = report["classes"]
    assert [(row["mode"], row["class"]) for row in rows] == [
        (mode, kind) for mode in ("ngram", "skip", "auto") for kind in ("json", "chat")
    ]
    assert all(row["different"] == 0 and row["pairs"] + row["left_out"] == 1 for row in rows)
    assert any(row["ratio"] is not None and row["ratio"] > 0 for row in rows)
    found = report["calibration"]
    assert [other["name"] for other in found["others"]] == ["every other layer", "first half", "least change"]
    assert all(found["chosen"]["gain"] >= other["gain"] for other in found["others"])
    assert found["v4"] >= 1.0 and found["chosen"]["pass_cost"] > 0

    [profile] = (tmp_path / "cache" / "skip").iterdir()
    before = profile.read_bytes()
    assert run_bench(folder, "--class", "json", "--mode", "auto") == 0
    table = capsys.readouterr().out
    assert profile.read_bytes() == before
    assert "least change" in table and "auto   json" in table and "ngram" not in table
    profile.write_text("[]")
    assert run_bench(folder, "--calibrate-only") == 0
    assert "damaged" in capsys.readouterr().err and json.loads(profile.read_text())["format"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--class", "poems"], "--class poems: choose from chat, second turn, summary"),
        (["--mode", "fast"], "--mode fast: choose from ngram, skip, auto"),
        (["--spec", "auto"], "use --mode"),
        (["--draft", "x", "--mode", "ngram"], "--draft goes with --mode auto"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(folder, *arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and shown.out == ""


def test_answers_that_repeat_themselves_are_known() -> None:
    assert repeats([1, 2, 3, 4, 5, 6, 7, 8] * 10)
    assert not repeats(list(range(80)))
    assert not repeats([*([1, 2, 3, 4, 5, 6, 7, 8] * 8), *range(100, 164)])  # the first half may
    assert not repeats([])


def test_a_class_without_figures_says_so() -> None:
    report = ClassTally(left_out=6).report()
    assert report["ratio"] is None and report["tokens_per_step"] is None and report["left_out"] == 6
    tally = ClassTally([1.0, 3.0, 2.0], [10.0, 10.0, 12.0], proposed=40, accepted=30, steps=10, tokens=60)
    assert tally.report()["ratio"] == 2.0 and tally.report()["tokens_per_step"] == 2.0


def test_every_class_has_at_least_six_different_prompts() -> None:
    found = prompts()
    assert set(COPIES) < set(found) and len(found) == 6
    for kind, texts in found.items():
        assert len({tuple(turns) for turns in texts}) >= 6, kind
        assert all(len(turns) == (2 if kind == "second turn" else 1) for turns in texts)
