"""``edgellm chat`` where the model is here: it answers, and starts neither pip nor a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from edgellm.locations import Locations
from edgellm_models.catalog import LocalModel
from edgellm_models.catalog.store import StoredFile, move_into_place, write_manifest
from tests.support.command_line import SOURCE_ROOTS, command_environment, run_edgellm
from tests.support.tiny_models import make_tiny, tiny_gguf

ALARM = """
import os
def ring(what):
    with open(os.environ["FETCH_ALARM"], "a") as file:
        file.write(what + "\\n")
    raise ConnectionRefusedError(what)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "m")
    return tiny_gguf(folder, folder.with_suffix(".gguf"))


@pytest.fixture
def alarmed(tmp_path: Path) -> tuple[Mapping[str, str], Path]:
    """An environment in which pip and every connection only leave their names in a file, and the file."""
    traps, rung = tmp_path / "traps", tmp_path / "rung"
    (traps / "pip").mkdir(parents=True)
    (traps / "fetch_alarm.py").write_text(ALARM)
    (traps / "pip" / "__init__.py").write_text("")
    (traps / "pip" / "__main__.py").write_text("import fetch_alarm; fetch_alarm.ring('pip')")
    (traps / "sitecustomize.py").write_text(
        "import socket, fetch_alarm\n"
        "def connect(*_):\n    fetch_alarm.ring('connect')\n"
        "def look_up(*_, **__):\n    fetch_alarm.ring('look up')\n"
        "class Trap(socket.socket):\n    connect = connect_ex = connect\n"
        "socket.socket, socket.getaddrinfo = Trap, look_up\n"
    )
    paths = [str(traps), *(str(path) for path in SOURCE_ROOTS)]
    environ = {"PYTHONPATH": os.pathsep.join(paths), "FETCH_ALARM": str(rung), "HF_HUB_OFFLINE": "0"}
    return environ, rung


def put(models: Path, name: str, content: bytes) -> None:
    folder = models / ".partial" / "x"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(content)
    files = (StoredFile("m.gguf", len(content), "0" * 64),)
    made = LocalModel(name, folder, files, "m.gguf", "test", "MIT", "2026")
    write_manifest(made)
    move_into_place(made, models)


def test_the_alarm_rings_where_the_model_must_be_fetched(alarmed: tuple[Mapping[str, str], Path]) -> None:
    """So that the test below can fail: pip is started, and the hub looked for."""
    environ, rung = alarmed
    done = run_edgellm("chat", "Hi", environ={**environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode != 0 and done.stdout == ""
    assert "pip" in rung.read_text().split("\n")
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    subprocess.run([sys.executable, "-c", code], env=command_environment(environ), stderr=subprocess.DEVNULL)
    assert "look up" in rung.read_text().split("\n")


@pytest.mark.parametrize(
    ("name", "arguments", "stdin"),
    [
        ("smollm2-135m", ("Hi",), ""),
        ("smollm2-135m", (), "Hi\n"),
        ("hf:acme/tiny:tiny.gguf", ("-m", "hf:acme/tiny:tiny.gguf", "Hi"), ""),
    ],
)
def test_a_pulled_model_is_not_fetched_again(
    model: Path,
    alarmed: tuple[Mapping[str, str], Path],
    name: str,
    arguments: tuple[str, ...],
    stdin: str,
) -> None:
    environ, rung = alarmed
    put(Locations.from_environment().models, name, model.read_bytes())
    done = run_edgellm("chat", *arguments, "--max-tokens", "4", environ=environ, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and len(done.stdout) > 1
    assert not rung.exists(), rung.read_text()
    assert "pulling" not in done.stderr
