"""Standard streams that are closed, full or interrupted early, and what is safe to show of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from edgellm.cli.output import json_line
from tests.support.command_line import ROOT, command_environment

CHAT = ["-m", "tests.support.fake_chat", "chat", "hi"]
ANSWER = "The capital of France is Paris.\n"

needs_sh = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


def shell(redirect: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=command_environment(),
        timeout=60,
        check=False,
    )


@needs_sh
@pytest.mark.parametrize(
    "words",
    [["-m", "edgellm", "list"], ["-m", "edgellm", "list", "--json"], ["-m", "edgellm", "--help"], CHAT],
    ids=" ".join,
)
@pytest.mark.parametrize("redirect", [">&-", "1</dev/null", ">/dev/full"])
def test_a_standard_output_that_takes_nothing_is_73(words: list[str], redirect: str) -> None:
    if redirect == ">/dev/full" and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = shell(redirect, *words)
    assert done.returncode == 73, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("edgellm: cannot write the output: ")
    assert "Traceback" not in done.stderr and done.stderr.count("edgellm: ") == 1


@needs_sh
@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "<&- 2>&-", "2</dev/null"])
def test_a_standard_error_that_takes_nothing_stops_no_answer(redirect: str) -> None:
    if "/dev/full" in redirect and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    for more in ([], ["--json"], ["-v"], ["--nonsense"]):
        done = shell(redirect, *CHAT, *more)
        if more == ["--nonsense"]:
            assert (done.returncode, done.stdout) == (2, "")
        else:
            assert done.returncode == 0
            assert "capital of France" in done.stdout if more else done.stdout == ANSWER


@needs_sh
def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    code = (
        "import os, sys; from edgellm.cli.standard_streams import occupy_streams; occupy_streams();"
        "sys.exit(os.open(os.devnull, os.O_RDONLY) if sys.stderr else 1)"
    )
    for redirect in ("", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert shell(redirect, "-c", code).returncode > 2


@pytest.mark.parametrize("words", [[], ["config"]], ids=["edgellm", "edgellm config"])
def test_without_a_command_the_help_is_shown_as_it_is(words: list[str]) -> None:
    done = shell("", "-m", "edgellm", *words)
    shown = shell("", "-m", "edgellm", *words, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == shown.stdout and done.stderr.count("\n") > 8


@needs_sh
@pytest.mark.parametrize("module", ["click", "edgellm.cli.main", "edgellm.cli.options", "edgellm.config"])
def test_ctrl_c_while_modules_are_imported_is_130_and_nothing_else(module: str) -> None:
    """Whatever is being imported: the module here is one that interrupts its own import."""
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['edgellm', 'list']\n"
        "from edgellm.__main__ import main\n"
        "main()\n"
    )
    done = shell("", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@needs_sh
def test_ctrl_c_at_any_early_moment_shows_no_traceback_of_ours() -> None:
    for delay in (0.08, 0.12, 0.16, 0.22):
        process = subprocess.Popen(
            [sys.executable, "-m", "edgellm", "tokenize", "smollm2-135m"],
            stdin=subprocess.PIPE,  # it would wait for text
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=command_environment(),
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        # Before the interpreter runs a line of ours, what it says is not in our hands.
        assert "edgellm/" not in err


def test_json_has_no_character_that_commands_a_terminal() -> None:
    text = "".join(map(chr, range(0x250))) + "\u2028\u2029 \ud800 \U0001f60a \\u009b \\"
    line = json_line({"text": text, text: [text]})
    assert json.loads(line) == {"text": text, text: [text]}
    assert not [c for c in line if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029"]
