"""Folders: EDGELLM_HOME moves all of them, looking makes none, and the runtime folder is private."""

from __future__ import annotations

import os
import stat
from dataclasses import fields
from pathlib import Path

import pytest

from edgellm.locations import Locations
from edgellm_models.errors import OutputError, PermissionDeniedError


def test_the_home_variable_moves_everything(tmp_path: Path) -> None:
    locations = Locations.from_environment({"EDGELLM_HOME": str(tmp_path / "home")})
    places = [getattr(locations, f.name) for f in fields(locations)]
    assert len(set(places)) == 5
    assert all(place.is_relative_to(tmp_path / "home") for place in places)
    assert locations.models.is_relative_to(locations.data)
    assert not (tmp_path / "home").exists(), "looking makes no folder"


def test_a_relative_home_does_not_move_with_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    locations = Locations.from_environment({"EDGELLM_HOME": "here"})
    assert locations.data == tmp_path / "here" / "data"


def test_the_platform_decides_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGELLM_HOME")
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    locations = Locations.from_environment()
    assert locations.config_file == tmp_path / "config" / "edgellm" / "config.toml"
    assert locations.models == tmp_path / "data" / "edgellm" / "models"
    assert locations.runtime == tmp_path / "edgellm"


def test_the_runtime_folder_is_private(tmp_path: Path) -> None:
    locations = Locations.from_environment({"EDGELLM_HOME": str(tmp_path)})
    (tmp_path / "run").mkdir(mode=0o755)
    assert locations.ensure_runtime() == tmp_path / "run"
    assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o700


def test_a_planted_runtime_folder_is_refused(tmp_path: Path) -> None:
    locations = Locations.from_environment({"EDGELLM_HOME": str(tmp_path)})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionDeniedError, match=r"is not this user's"):
        locations.ensure_runtime()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    locations = Locations.from_environment({"EDGELLM_HOME": str(tmp_path / "file")})
    with pytest.raises(OutputError, match=r"cannot make the folder .*EDGELLM_HOME"):
        locations.ensure(locations.models)
