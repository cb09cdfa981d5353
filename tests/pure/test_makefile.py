"""`make chat PROMPT=...` hands the prompt to the program whole, whatever is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_venv(tmp_path: Path) -> Path:
    """A set-up environment whose `edgellm` prints its arguments, its prompt and its input."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "edgellm"
    program.write_text('#!/bin/sh\nprintf "%s|%s|" "$*" "$EDGELLM_PROMPT"\ncat\n')
    program.chmod(0o755)
    (venv / ".runtime").touch()
    return venv


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the capital of France?",
        'it\'s $HOME; "x"',
        "two\nlines",
        "$$ $(shell id) `id` # % \\ é 你好",
        "",
    ],
)
def test_the_prompt_arrives_whole(fake_venv: Path, prompt: str) -> None:
    command = [
        "make",
        "--no-print-directory",
        "-C",
        str(ROOT),
        "chat",
        f"VENV={fake_venv}",
        f"PROMPT={prompt}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"chat|{prompt}|"


def test_piped_input_reaches_the_program(fake_venv: Path) -> None:
    command = ["make", "--no-print-directory", "-C", str(ROOT), "chat", f"VENV={fake_venv}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PROMPT", "MAKEFLAGS")}
    done = subprocess.run(command, capture_output=True, text=True, input="hi\n", timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, "chat||hi\n")
