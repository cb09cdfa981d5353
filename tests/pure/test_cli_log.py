"""The log: what -v shows, what the file holds, its bound, and that it never stops a command."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from edgellm import log
from edgellm.cli.main import run
from edgellm.contracts import FinishReason, RequestTimings, Usage
from edgellm_models.errors import Notice
from tests.support.command_line import run_edgellm


def log_file(home: Path) -> Path:
    return home / "state" / "logs" / log.FILE_NAME


def log_some() -> None:
    with log.log_to_file():
        log.log_notice(Notice("context", "the context is 8 tokens"))
        timings = RequestTimings(0.0, 0.25, 1.0, 30, 21)
        log.log_answer("tiny", FinishReason.STOP, Usage(30, 0, 21), timings)
        log.ERROR.error("exit 70: no more")
        logging.getLogger("edgellm.load").info("only for -v")


def test_the_file_has_notices_answers_and_errors(isolated_home: Path) -> None:
    log_some()
    lines = log_file(isolated_home).read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO edgellm.notice: context: the context is 8 tokens",
        "INFO edgellm.answer: model tiny, stop, 30 prompt tokens (0 cached), 21 answer tokens, first after "
        "0.250 s, then 20.0 tokens/s",
        "ERROR edgellm.error: exit 70: no more",
    ]
    if os.name == "posix":
        assert stat.S_IMODE(log_file(isolated_home).stat().st_mode) == 0o600
    log.log_notice(Notice("late", "after the command"))
    assert "late" not in log_file(isolated_home).read_text(encoding="utf-8")


def test_an_error_is_logged_and_a_slip_makes_no_folder(isolated_home: Path) -> None:
    assert run(["list", "--nonsense"]) == 2 and run(["config", "show", "--ctx", "x"]) == 2
    assert run(["list"]) == 0 and run(["config", "path"]) == 0
    assert list(isolated_home.iterdir()) == []
    assert run(["show", "no-such-model"]) == 66
    assert "exit 66: no model or file 'no-such-model'" in log_file(isolated_home).read_text(encoding="utf-8")


def test_the_file_is_bounded(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_FILE_BYTES", 3000)
    with log.log_to_file():
        for number in range(200):
            log.log_notice(Notice("k", f"number {number} " + "x" * 5000))
    folder = log_file(isolated_home).parent
    assert sorted(path.name for path in folder.iterdir()) == ["edgellm.log", "edgellm.log.1"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6000
    assert "number 199 " in log_file(isolated_home).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["folder", "file", "pipe", "read-only"])
def test_a_log_that_cannot_be_written_is_no_fault(isolated_home: Path, kind: str) -> None:
    state = isolated_home / "state"
    if kind == "file":
        state.write_text("")
    elif kind == "folder":
        log_file(isolated_home).mkdir(parents=True)
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no named pipes here")
        log_file(isolated_home).parent.mkdir(parents=True)
        os.mkfifo(log_file(isolated_home))
    else:
        isolated_home.chmod(0o500)
    shown = run_edgellm("show", "no-such-model")
    isolated_home.chmod(0o700)
    assert shown.returncode == 66 and shown.stderr.count("\n") == 1


def test_verbose_shows_the_log_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []
    with log.log_to_file():
        log.show_log(written.append, everything=False)
        logging.getLogger("edgellm.load").info("opened %s", "a\x1b[31m\nb")
        logging.getLogger("edgellm.load").debug("too much")
        logging.getLogger("urllib3").info("not ours")
    assert len(written) == 1 and written[0].endswith("INFO edgellm.load: opened a [31m b\n")
    with log.log_to_file():
        log.show_log(written.append, everything=True)
        logging.getLogger("urllib3").debug("theirs")
    assert len(written) == 2 and "theirs" in written[1]
    logging.getLogger("urllib3").warning("afterwards")
    assert len(written) == 2
