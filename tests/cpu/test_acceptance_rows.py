"""Rows of measured figures are kept as they come, beside those of other processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance import harness
from acceptance.harness import Figure, record


def test_rows_of_two_runs_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def kept() -> list[str]:
        return [row["name"] for row in json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))]

    def figures() -> Iterator[Figure]:
        yield Figure("first", 1.0, "", "none", True)
        assert kept() == ["first"]
        assert record("speed", [Figure("of another run", 2.0, "", "at least 3", False)]) is False
        yield Figure("second", 3.0, "", "none", True)

    assert record("speed", figures()) is True
    assert kept() == ["first", "of another run", "second"]
    assert record("speed", [Figure("not kept", 4.0, "", "none", True)], keep=False) is True
    assert record("speed", [Figure("lost", float("nan"), "", "at most 1", False)]) is False
    assert "NaN" not in (tmp_path / "speed.json").read_text(encoding="utf-8") and kept()[-1] == "lost"
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
