"""Settings on the command line: wrong values, unknown variables, and where a name comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgellm.cli.options import unknown_variables
from edgellm.cli.output import counted
from edgellm.config import SETTINGS
from tests.support.command_line import run_edgellm

WRONG = [("CTX", "abc"), ("TOP_P", "7"), ("KERNELS", "magic"), ("SEED", "-1"), ("TEMP", "nan")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_config_show_shows_a_wrong_variable_among_the_others(name: str, value: str) -> None:
    environ = {f"EDGELLM_{name}": value, "EDGELLM_MAX_TOKENS": "7"}
    shown = run_edgellm("config", "show", "--origin", environ=environ)
    assert shown.returncode == 78 and shown.stderr.count("\n") == 1
    lines = shown.stdout.splitlines()
    assert len(lines) == len(SETTINGS)
    (wrong,) = [line for line in lines if "wrong" in line]
    assert (
        f"wrong: EDGELLM_{name} " in wrong and value in wrong and name.lower() in wrong.split("#")[0] + wrong
    )
    assert any(line.startswith("max_tokens = 7") for line in lines)
    found = json.loads(run_edgellm("config", "show", "--json", environ=environ).stdout)
    assert list(found["problems"]) == [name.lower()] and found["settings"]["max_tokens"] == 7
    other = run_edgellm("show", "smollm2-135m", environ=environ)
    assert (other.returncode, other.stdout) == (78, "")


def test_config_show_shows_a_wrong_key_of_a_file(tmp_path: Path) -> None:
    (tmp_path / ".edgellm.toml").write_text('ctx = "x"\nseed = 5\n')
    shown = run_edgellm("config", "show", folder=tmp_path)
    assert shown.returncode == 78 and "seed = 5" in shown.stdout
    assert f"{tmp_path / '.edgellm.toml'}: ctx must be an integer" in shown.stdout


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_configuration_that_is_no_file_is_78(tmp_path: Path, isolated_home: Path, kind: str) -> None:
    if kind == "pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    (isolated_home / "config").mkdir()
    for path in (isolated_home / "config" / "config.toml", tmp_path / ".edgellm.toml"):
        if kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        shown = run_edgellm("config", "show", folder=tmp_path, timeout_s=30)
        assert shown.returncode == 78 and f"{path} is not a file" in shown.stderr
        path.rmdir() if kind == "folder" else path.unlink()


@pytest.mark.parametrize("command", [["show"], ["pull"], ["chat", "hi"], ["complete", "hi"]], ids=" ".join)
def test_a_missing_model_says_where_its_name_is_from(command: list[str], tmp_path: Path) -> None:
    shown = run_edgellm(*command, environ={"EDGELLM_MODEL": "nope.gguf"}, folder=tmp_path)
    assert shown.returncode == 66 and "(the name comes from EDGELLM_MODEL)" in shown.stderr
    (tmp_path / ".edgellm.toml").write_text('model = "nope.gguf"')
    shown = run_edgellm(*command, folder=tmp_path)
    assert shown.returncode == 66 and f"comes from {tmp_path / '.edgellm.toml'})" in shown.stderr
    shown = run_edgellm(*command, "-m", "nope.gguf", folder=tmp_path)
    assert shown.returncode == 66 and "comes from" not in shown.stderr


def test_unknown_variables_are_said_with_the_nearest() -> None:
    known = {"EDGELLM_CTX": "1", "EDGELLM_HOME": "x", "EDGELLM_SYSTEM": "x", "EDGELLM_TEST_ANYTHING": "1"}
    assert unknown_variables({**known, "PATH": "x", "_EDGELLM_COMPLETE": "x"}) == []
    (notice,) = unknown_variables({**known, "EDGELLM_MODELL": "x"})
    assert "EDGELLM_MODELL" in notice.detail and "did you mean EDGELLM_MODEL?" in notice.detail
    shown = run_edgellm("show", "smollm2-135m", environ={"EDGELLM_THREDS": "1"})
    assert shown.returncode == 0 and "did you mean EDGELLM_THREADS?" in shown.stderr
    assert run_edgellm("show", "smollm2-135m", "-q", environ={"EDGELLM_THREDS": "1"}).stderr == ""


def test_list_marks_models_that_only_complete() -> None:
    lines = run_edgellm("list").stdout.splitlines()
    rows = json.loads(run_edgellm("list", "--json").stdout)["models"]
    base = {row["name"] for row in rows if row["chat"] is False}
    assert base and {line.split()[0] for line in lines if "base (complete only)" in line} == base


def test_one_is_not_many() -> None:
    assert (counted(0, "token"), counted(1, "token"), counted(2, "token")) == (
        "0 tokens",
        "1 token",
        "2 tokens",
    )
