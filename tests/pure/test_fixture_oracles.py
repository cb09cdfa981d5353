"""A judge that is missing skips a test where people work and fails it where every judge must be."""

from __future__ import annotations

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
