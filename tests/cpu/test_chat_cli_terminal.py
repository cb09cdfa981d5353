"""``edgellm chat`` on a real pseudo-terminal: the screen and the line mode, as a person meets them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.support.pty_screen import ROOT, SOURCES, Terminal

HELD = json.dumps([{"pieces": ["The ", "capital "], "hold_after": 2}, {"pieces": ["Again."]}])


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        started.append(Terminal(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


Start = Callable[..., Terminal]


def assert_restored(terminal: Terminal) -> None:
    """The alternate screen, mouse reports, bracketed paste and the cursor are as before."""
    for mode in (b"1049", b"1000", b"1003", b"2004"):
        assert terminal.raw.rfind(b"\x1b[?" + mode + b"h") < terminal.raw.rfind(b"\x1b[?" + mode + b"l"), mode
    assert terminal.raw.rfind(b"\x1b[?25l") < terminal.raw.rfind(b"\x1b[?25h")
    assert b"Traceback" not in terminal.raw


# --- the screen ---


def test_screen_answers_stops_and_gives_the_terminal_back(terminal: Start) -> None:
    """H07 and H09 with real keys: Escape keeps the draft, two Ctrl+C leave with 0 and a clean terminal."""
    window = terminal(FAKE_SCRIPTS=HELD)
    window.until("Ask anything")
    window.send("Hello\r")
    window.until("The capital")
    window.send("draft")
    window.until("draft")
    window.send("\x1b")
    window.until("stopped")
    assert "draft" in window.text
    assert "Q4_1" in window.text and "8,192" in window.text
    window.send("\x03")
    window.until("again quits")
    window.send("\x03")
    assert window.end() == 0
    assert_restored(window)


def test_a_screen_that_is_killed_in_an_answer_opens_again_with_all_of_it(terminal: Start) -> None:
    window = terminal(FAKE_SCRIPTS=HELD)
    window.until("Ask anything")
    window.send("First question\r")
    window.until("The capital")
    time.sleep(1.0)  # what was streamed a second ago is on the disk
    window.process.kill(9)
    window.end()
    window = terminal("--continue")
    window.until("First question")
    window.until("The capital")
    window.send("Go on\r")
    window.until("Paris.")
    window.send("\x11")
    assert window.end() == 0


@pytest.mark.parametrize("key", ["\x04", "\x11"])
def test_ctrl_d_and_ctrl_q_leave_with_0(terminal: Start, key: str) -> None:
    """H15: leaving is no abort."""
    window = terminal()
    window.until("Ask anything")
    window.send(key)
    assert window.end() == 0
    assert_restored(window)
    assert b"Abort" not in window.raw


def test_sigterm_gives_the_terminal_back(terminal: Start) -> None:
    window = terminal(FAKE_SCRIPTS=HELD)
    window.until("Ask anything")
    window.send("Hello\r")
    window.until("The capital")
    window.process.kill(15)
    assert window.end() == 143
    assert_restored(window)


def test_leaving_while_the_model_loads_does_not_wait(terminal: Start) -> None:
    """``end`` waits far less than the load would take."""
    window = terminal(FAKE_LOAD_S="600")
    window.until("Opening smollm2-135m")
    window.send("\x03")
    assert window.end() == 130
    assert_restored(window)


def test_a_model_that_cannot_chat_is_said_on_the_screen(terminal: Start) -> None:
    window = terminal(FAKE_BASE_MODEL="1")
    window.until("could not be opened")
    window.until("edgellm complete")
    window.send("\x11")
    assert window.end() == 65
    assert_restored(window)


def test_pasted_lines_are_one_prompt(terminal: Start, tmp_path: Path) -> None:
    record = tmp_path / "asked"
    window = terminal(FAKE_RECORD=str(record))
    window.until("Ask anything")
    window.send("\x1b[200~first\nsecond\x1b[201~")
    window.until("second")
    window.send("\r")
    window.until("Paris")
    assert json.loads(record.read_text())["messages"] == [["user", "first\nsecond"]]
    window.send("\x11")
    assert window.end() == 0


def test_wide_and_joined_characters_keep_the_cursor_right(terminal: Start) -> None:
    """H11: the cursor stands behind what was typed, by the widths of the terminal, and goes by characters."""
    window = terminal()
    window.until("Ask anything")
    window.send("你好é")
    window.until("é")
    row = next(y for y, line in enumerate(window.screen.display) if "你" in line)
    start = window.screen.display[row].index("你")
    window.until(lambda: "好" in window.screen.display[row])
    # The drawn cursor is a reversed cell.
    window.until(lambda: _cursor_column(window, row) == start + 5)
    window.send("\x1b[D")
    window.until(lambda: _cursor_column(window, row) == start + 4)
    window.send("\x1b[D\x1b[D")
    window.until(lambda: _cursor_column(window, row) == start)
    window.send("\x1b[C\x7f")
    window.until(lambda: "你" not in window.text)
    assert "好é" in window.text.replace(" ", "")
    window.send("\x11")
    window.end()


def _cursor_column(window: Terminal, row: int) -> int | None:
    cells = window.screen.buffer[row]
    usual = cells[window.screen.columns // 2].bg
    marked = [x for x in range(3, window.screen.columns - 3) if cells[x].reverse or cells[x].bg != usual]
    return marked[0] if marked else None


@pytest.mark.parametrize("columns", [10, 20])
def test_narrow_windows_and_resizing_lose_nothing(terminal: Start, columns: int) -> None:
    """H11 and H13: ten columns are no fault, and after growing everything is there."""
    window = terminal(columns=columns, rows=12, FAKE_SCRIPTS='[{"pieces": ["Paris ", "is ", "big."]}]')
    window.until(lambda: "Ask" in window.text)
    window.send("Hello there\r")
    window.until("big.")
    window.process.setwinsize(24, 80)
    window.screen.resize(24, 80)
    window.until("Hello there")
    window.until("Paris is big.")
    window.send("\x11")
    assert window.end() == 0
    assert_restored(window)


@pytest.mark.parametrize(
    "extra",
    [
        {"COLUMNS": "10"},
        {"NO_COLOR": "1"},
        {"LANG": "C", "LC_ALL": "C"},
        {"LANG": "POSIX", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_odd_environments_still_open(terminal: Start, extra: dict[str, str]) -> None:
    """H13: NO_COLOR, a C locale and a wrong COLUMNS give a screen or one line, never a traceback."""
    window = terminal(**extra)
    window.until(lambda: "Ask" in window.text)
    if "NO_COLOR" in extra:
        # Shades of grey are no colours: red, green and blue are equal in all of them.
        for red, green, blue in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", window.raw):
            assert red == green == blue
    window.send("\x11")
    assert window.end() == 0
    assert b"Traceback" not in window.raw


# --- lines ---


@pytest.mark.parametrize("term", ["dumb", "", "xyz", None])
def test_terminals_without_a_screen_get_lines(terminal: Start, term: str | None) -> None:
    """H13: TERM=dumb, empty, unset or unknown gives the line mode and says why."""
    window = terminal(TERM=term)
    window.until("cannot show the chat screen")
    window.until(lambda: window.screen.display[window.screen.cursor.y].startswith("> "))
    window.send("Hi\r")
    window.until("The capital of France is Paris.")
    window.send("\x04")
    assert window.end() == 0
    assert b"\x1b[?1049h" not in window.raw
    assert b"Traceback" not in window.raw


@pytest.mark.parametrize("redirect", ["2>{errors}", "2>/dev/null", "2>&-", "2>/dev/full"])
def test_without_a_standard_error_to_draw_on_it_is_the_line_mode(tmp_path: Path, redirect: str) -> None:
    if "full" in redirect and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    code = 'exec "$0" -m tests.support.fake_chat chat ' + redirect.format(errors=tmp_path / "errors")
    environ = {**os.environ, "PYTHONPATH": SOURCES, "TERM": "xterm-256color"}
    window = pexpect.spawn("sh", ["-c", code, sys.executable], cwd=str(ROOT), env=environ, timeout=60)
    try:
        window.expect_exact("> ")
        window.send("One\r")
        window.expect_exact("The capital of France is Paris.")
        window.expect_exact("> ")
        window.send("\x04")
        window.expect(pexpect.EOF)
        assert "Traceback" not in str(window.before)
    finally:
        window.close()
    assert window.exitstatus == 0


def test_line_mode_talks_stops_and_leaves_with_0(terminal: Start, tmp_path: Path) -> None:
    """H15: Ctrl-D at the empty prompt leaves with 0; Ctrl-C during an answer only stops it."""
    record = tmp_path / "asked"
    window = terminal("--plain", "--system", "Be brief.", FAKE_SCRIPTS=HELD, FAKE_RECORD=str(record))
    window.until("/quit or Ctrl-D leaves")
    window.until("> ")
    window.send("One\r")
    window.until("The capital")
    window.send("\x03")
    window.until("stopped")
    window.send("Two\r")
    window.until("Again.")
    window.send("/nonsense\r")
    window.until("is no command here")
    window.send("\x04")
    assert window.end() == 0
    assert b"Traceback" not in window.raw
    second = json.loads(record.read_text().splitlines()[1])["messages"]
    assert second[:2] == [["system", "Be brief."], ["user", "One"]]
    assert second[2:] == [["assistant", "The capital "], ["user", "Two"]]


def test_line_mode_saves_what_was_stopped_and_takes_it_up(terminal: Start, tmp_path: Path) -> None:
    """H09 and H15: neither a stopped answer nor leaving loses anything; /new is another chat."""
    record = tmp_path / "asked"
    window = terminal("--plain", FAKE_SCRIPTS=HELD)
    window.until("> ")
    window.send("One\r")
    window.until("The capital")
    window.send("\x03")
    window.until("stopped")
    window.send("/new\r")
    window.until("a new conversation")
    window.send("Two\r")
    window.until("Again.")
    window.send("\x04")
    assert window.end() == 0
    window = terminal("--plain", "-c", FAKE_RECORD=str(record))
    window.until("going on with chat")
    window.until("> ")
    window.send("Three\r")
    window.until("Paris.")
    window.send("\x04")
    assert window.end() == 0
    assert json.loads(record.read_text())["messages"] == [
        ["user", "Two"],
        ["assistant", "Again."],
        ["user", "Three"],
    ]
    from edgellm.history.store import HistoryStore, chats_file
    from edgellm.locations import Locations

    store = HistoryStore(chats_file(Locations.from_environment().data))
    older = store.branch(store.list_chats()[1].id)
    assert [m.message.content for m in older] == ["One", "The capital "]


def test_ctrl_c_at_the_line_prompt_is_130(terminal: Start) -> None:
    window = terminal("--plain")
    window.until("> ")
    window.send("\x03")
    assert window.end() == 130
    assert b"Traceback" not in window.raw


def test_a_fault_in_line_mode_is_a_line_and_the_talk_goes_on(terminal: Start) -> None:
    scripts = [{"pieces": [], "error": "NaN logits"}, {"pieces": ["Fine."]}]
    window = terminal("--plain", FAKE_SCRIPTS=json.dumps(scripts))
    window.until("> ")
    window.send("One\r")
    window.until("NaN logits")
    window.send("Two\r")
    window.until("Fine.")
    window.send("/quit\r")
    assert window.end() == 0


def test_a_prompt_on_a_terminal_is_one_answer_made_safe(terminal: Start) -> None:
    """What a model writes cannot steer the terminal, also without the screen."""
    evil = "\x1b]0;owned\x07\x1b[31mred\x9b2J"
    window = terminal("Hi", FAKE_SCRIPTS=json.dumps([{"pieces": [evil[:3], evil[3:]]}]))
    assert window.end() == 0
    assert "\u241b]0;owned\u2407" in window.text
    assert b"\x1b" not in window.raw and b"\x07" not in window.raw


def test_interrupting_one_answer_keeps_it_and_is_130(terminal: Start) -> None:
    window = terminal("Hi", FAKE_SCRIPTS=HELD)
    window.until("The capital")
    window.send("\x03")
    assert window.end() == 130
    assert b"The capital " in window.raw
    assert b"Traceback" not in window.raw
