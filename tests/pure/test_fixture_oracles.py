"""A judge that is missing skips a test where people work and fails it where every judge must be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.oracles import require_oracle


def test_a_missing_oracle_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_oracle is not installed"):
        require_oracle("no_such_oracle")


def test_a_missing_oracle_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_oracle is not installed"):
        require_oracle("no_such_oracle")


def test_a_present_oracle_is_returned() -> None:
    assert require_oracle("json").dumps([]) == "[]"


def test_no_test_skips_where_a_judge_is_missing_in_ci() -> None:
    """pytest's own way skips in CI too: a run without judges would be green."""
    tests = Path(__file__).resolve().parents[1]
    name = "import" + "orskip"
    assert [path.name for path in sorted(tests.rglob("*.py")) if name in path.read_text("utf-8")] == []


@pytest.mark.parametrize(("ci", "outcome"), [("", "skipped"), ("true", "error")])
def test_a_whole_file_can_need_a_judge(tmp_path: Path, ci: str, outcome: str) -> None:
    file = tmp_path / "test_whole.py"
    file.write_text("from tests.support.oracles import require_oracle\nrequire_oracle('no_such_oracle')\n")
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": paths},
        timeout=120,
    )
    assert f"1 {outcome}" in run.stdout and "no_such_oracle is not installed" in run.stdout, run.stdout
