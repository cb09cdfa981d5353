"""Every key of the chat screen, driven on a scripted backend."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from edgellm_models.errors import BadInputError, EngineError, Notice, ResourceError
from edgellm_tui.app import EdgeChat, WayOut
from edgellm_tui.commands import COMMANDS, OTHER_KEYS
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.screens.loading import LoadingScreen
from edgellm_tui.widgets.prompt import ChatPrompt
from edgellm_tui.widgets.status_line import TopBar
from edgellm_tui.widgets.transcript import ErrorLine, QuietLine, Transcript
from tests.support.fake_backend import FailingOpener, FakeBackend, Script
from tests.ui.screen_support import chat_app, chat_screen, prompt, replies, send, shown, status, until
from tests.ui.test_chat_commands import Library

WORDS = ["The ", "capital ", "of ", "France ", "is ", "Paris."]
HELD = Script(pieces=WORDS, hold_after=3)


def test_enter_sends_and_the_whole_conversation_goes_along() -> None:
    async def scenario() -> None:
        backend = FakeBackend(Script(pieces=WORDS), Script(pieces=["It is."]))
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await pilot.press(*"Hi")
            await pilot.press("enter")
            await until(pilot, lambda: len(backend.calls) == 1 and not chat_screen(app).generating, "answer")
            assert "The capital of France is Paris." in shown(app)
            assert prompt(app).text == ""
            await send(pilot, app, "Sure?")
        roles = [(m.role, m.content) for m in backend.calls[1][1]]
        assert roles == [("user", "Hi"), ("assistant", "".join(WORDS)), ("user", "Sure?")]
        assert backend.calls[0][0] == backend.calls[1][0]
        assert backend.closed

    asyncio.run(scenario())


def test_system_prompt_and_sampling_travel_with_every_request() -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = chat_app(backend, system_prompt="Be brief.")
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
        assert [m.role for m in backend.calls[0][1]] == ["system", "user"]

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
def test_newline_keys_do_not_send(key: str) -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await pilot.press("a", key, "b")
            assert prompt(app).text == "a\nb"
            assert backend.calls == []

    asyncio.run(scenario())


def test_escape_stops_keeps_the_partial_answer_and_the_draft() -> None:
    """H07: Escape ends the answer and leaves what was being typed alone."""

    async def scenario() -> None:
        backend = FakeBackend(HELD, Script(pieces=["ok"]))
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press(*"draft")
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert prompt(app).text == "draft"
            assert replies(app)[0].text == "The capital of "
            assert "stopped" in shown(app)
            assert len(backend.cancelled) == 1
            prompt(app).clear()
            await send(pilot, app, "Then?")
        # The stopped half is part of the conversation.
        assert backend.calls[1][1][1].content == "The capital of "

    asyncio.run(scenario())


def test_a_prompt_sent_while_answering_is_refused_and_kept() -> None:
    async def scenario() -> None:
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await send(pilot, app, "Me too", wait=False)
            assert prompt(app).text == "Me too"
            assert "Still answering" in status(app).hint
            assert len(backend.calls) == 1
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_two_enters_in_one_breath_send_once() -> None:
    async def scenario() -> None:
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            screen = chat_screen(app)
            screen.post_message(ChatPrompt.Submitted("one"))
            screen.post_message(ChatPrompt.Submitted("two"))
            await until(pilot, lambda: len(backend.calls) == 1, "first request")
            await pilot.pause()
            assert len(backend.calls) == 1
            await pilot.press("escape")
            await until(pilot, lambda: not screen.generating, "stopped")

    asyncio.run(scenario())


def test_ctrl_c_stops_then_quits() -> None:
    """H09: the first Ctrl+C while an answer streams stops it, the second quits with 0."""

    async def scenario() -> None:
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press("ctrl+c")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert app.return_code is None
            assert replies(app)[0].text == "The capital of "
            await pilot.press("ctrl+c")
        assert app.return_code == 0

    asyncio.run(scenario())


def test_ctrl_c_when_idle_only_hints_and_the_window_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """H09: one Ctrl+C at rest explains itself; two that are far apart do not quit."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await pilot.press("ctrl+c")
            assert "Ctrl+C again quits" in status(app).hint
            chat_screen(app)._interrupted_at -= 10
            await pilot.press("ctrl+c")
            assert app.return_code is None
            await pilot.press("ctrl+c")
        assert app.return_code == 0

    asyncio.run(scenario())


def test_ctrl_c_copies_a_selection_and_does_not_stop() -> None:
    """H09: with text selected Ctrl+C copies, even while an answer streams."""

    async def scenario() -> None:
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press(*"abc", "shift+left", "shift+left")
            await pilot.press("ctrl+c")
            assert app.clipboard == "bc"
            assert chat_screen(app).generating
            assert prompt(app).text == "abc"
            await pilot.press("ctrl+c")
            await until(pilot, lambda: not chat_screen(app).generating, "the next one stops")

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [("ctrl+q",), ("ctrl+d",)])
def test_leaving_keys_end_with_0(keys: tuple[str, ...]) -> None:
    """H15: Ctrl+D on an empty prompt is a clean end."""

    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await pilot.press(*keys)
        assert app.return_code == 0
        assert backend.closed

    asyncio.run(scenario())


def test_ctrl_d_on_text_deletes_to_the_right_and_delete_never_leaves() -> None:
    """H15: Ctrl+D on a prompt that is not empty deletes; the Delete key on an empty one does nothing."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await pilot.press("a", "b", "home", "ctrl+d")
            assert prompt(app).text == "b"
            await pilot.press("ctrl+d", "delete")
            assert prompt(app).text == ""
            assert app.return_code is None

    asyncio.run(scenario())


def test_new_chat_forgets_and_takes_another_id() -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "one")
            await pilot.press("ctrl+n")
            assert replies(app) == []
            assert chat_screen(app).query_one(TopBar).context_used == 0
            await send(pilot, app, "two")
        assert [m.content for m in backend.calls[1][1]] == ["two"]
        assert backend.calls[0][0] != backend.calls[1][0]

    asyncio.run(scenario())


def test_new_chat_waits_for_a_running_answer() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(HELD))
        async with app.run_test() as pilot:
            await send(pilot, app, "one", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press("ctrl+n")
            assert len(replies(app)) == 1
            assert "stop it with Esc" in status(app).hint
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_copying_the_last_answer_is_exact_and_says_how() -> None:
    """H10: exact Unicode, and the message names the way it went and the way to a file."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["需要 ", "😊"])))
        async with app.run_test() as pilot:
            await pilot.press("ctrl+y")
            assert "no answer" in status(app).hint
            await send(pilot, app, "Hi")
            await pilot.press("ctrl+y")
            assert app.clipboard == "需要 😊"
            assert "OSC 52" in status(app).hint and "/save" in status(app).hint

    asyncio.run(scenario())


def test_copying_prefers_a_native_tool_and_not_over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H10: a clipboard tool gets the exact UTF-8; over SSH it would be the wrong machine's."""
    out = tmp_path / "clip"
    tool = tmp_path / "wl-copy"
    tool.write_text(f"#!/bin/sh\nexec /bin/cat > '{out}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["需要 😊"])))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            await pilot.press("ctrl+y")
            await until(pilot, lambda: "wl-copy" in status(app).hint, "copied by the tool")
            assert out.read_bytes() == "需要 😊".encode()
            out.unlink()
            monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
            await pilot.press("ctrl+y")
            await until(pilot, lambda: "OSC 52" in status(app).hint, "copied by the terminal")
            assert not out.exists()

    asyncio.run(scenario())


def test_a_broken_clipboard_tool_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "xclip"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("DISPLAY", ":7")

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["x"])))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            await pilot.press("ctrl+y")
            await until(pilot, lambda: "OSC 52" in status(app).hint, "fallback")
            assert app.clipboard == "x"

    asyncio.run(scenario())


def test_save_writes_the_exact_answer_and_never_over_a_file(tmp_path: Path) -> None:
    """H10: the way to a file when no clipboard works."""

    async def scenario() -> None:
        app = chat_app(FakeBackend(Script(pieces=["需要 😊\n"])), save_folder=tmp_path)
        async with app.run_test() as pilot:
            await send(pilot, app, "/save a.md")
            assert "no answer" in status(app).hint
            await send(pilot, app, "Hi")
            await send(pilot, app, "/save a.md")
            assert (tmp_path / "a.md").read_bytes() == "需要 😊\n".encode()
            await send(pilot, app, "/save a.md")
            assert "exists already" in status(app).hint
            await send(pilot, app, "/save missing/folder/a.md")
            assert "Not saved" in status(app).hint

    asyncio.run(scenario())


def test_slash_commands_and_what_is_none() -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "/hepl")
            assert "/help" in status(app).hint
            assert prompt(app).text == "/hepl"
            assert backend.calls == []
            await send(pilot, app, "//etc/hosts is what?")
            assert backend.calls[0][1][0].content == "/etc/hosts is what?"
            prompt(app).replace_text("/help")
            await pilot.press("enter")
            assert isinstance(app.screen, HelpScreen)
            await pilot.press("escape")
            prompt(app).replace_text("/quit")
            await pilot.press("enter")
        assert app.return_code == 0

    asyncio.run(scenario())


def test_f1_lists_every_key_that_is_bound() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test(size=(100, 90)) as pilot:
            await pilot.press("f1")
            assert isinstance(app.screen, HelpScreen)
            page = shown(app)
            for key in [key for key, _ in OTHER_KEYS] + [command.shown for command in COMMANDS]:
                assert key in page
            for command in COMMANDS:
                assert not command.slash or f"/{command.slash[0]}" in page
            await pilot.press("f1")
            assert isinstance(app.screen, ChatScreen)

    asyncio.run(scenario())
    bound = {
        key.strip()
        for owner in (EdgeChat, ChatScreen, ChatPrompt)
        for binding in owner.__dict__["BINDINGS"]
        for key in binding.key.split(",")
        if not key.startswith("no-key-")
    }
    listed = " ".join(key + " " + does for key, does in OTHER_KEYS).lower()
    listed += " ".join(command.shown for command in COMMANDS).lower()
    names = {"escape": "esc", "pageup": "pgup", "pagedown": "pgdn", "alt+enter": "ctrl+j"}
    assert {key for key in bound if names.get(key, key) not in listed} == set()


def test_up_and_down_bring_back_prompts_and_the_draft() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await send(pilot, app, "first")
            await send(pilot, app, "second")
            await pilot.press(*"new", "up")
            assert prompt(app).text == "second"
            await pilot.press("up")
            assert prompt(app).text == "first"
            await pilot.press("up")
            assert prompt(app).text == "first"
            await pilot.press("down", "down")
            assert prompt(app).text == "new"

    asyncio.run(scenario())


def test_up_moves_between_lines_first() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await send(pilot, app, "sent")
            prompt(app).replace_text("one\ntwo")
            await pilot.press("up")
            assert prompt(app).text == "one\ntwo"
            assert prompt(app).cursor_location[0] == 0
            await pilot.press("up")
            assert prompt(app).text == "sent"

    asyncio.run(scenario())


FAMILY = "👨‍👩‍👧"


@pytest.mark.parametrize(
    ("text", "graphemes"),
    [
        ("你好", ["你", "好"]),
        ("⏺️x", ["⏺️", "x"]),
        (f"a{FAMILY}", ["a", FAMILY]),
        ("e\u0301f", ["e\u0301", "f"]),
        ("👍🏽", ["👍🏽"]),
        ("🇩🇪🇫🇷", ["🇩🇪", "🇫🇷"]),
    ],
)
def test_backspace_and_arrows_go_by_characters_as_people_see_them(text: str, graphemes: list[str]) -> None:
    """H11: one key press removes or crosses one grapheme."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            prompt(app).replace_text(text)
            for count in range(len(graphemes) - 1, -1, -1):
                await pilot.press("left")
                assert prompt(app).cursor_location == (0, len("".join(graphemes[:count])))
            for count in range(1, len(graphemes) + 1):
                await pilot.press("right")
                assert prompt(app).cursor_location == (0, len("".join(graphemes[:count])))
            for count in range(len(graphemes) - 1, -1, -1):
                await pilot.press("backspace")
                assert prompt(app).text == "".join(graphemes[:count])

    asyncio.run(scenario())


def test_view_stays_where_the_reader_is() -> None:
    """H05: after PageUp the lines stay while text arrives, a hint shows, and End follows again."""

    async def scenario() -> None:
        lines = [f"line {n}\n\n" for n in range(400)]
        app = EdgeChat(FakeBackend(Script(pieces=lines, tokens_per_s=60)))
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: replies(app)[0].text.count("line") > 40, "text fills the screen")
            assert "new text below" not in shown(app)
            await pilot.press("pageup")
            await pilot.pause()
            # Without the last columns, where the scroll bar rightly grows shorter.
            before = [line[:74] for line in shown(app).splitlines()[1:17]]
            come = replies(app)[0].text.count("line")
            await until(pilot, lambda: replies(app)[0].text.count("line") > come + 60, "more text")
            assert [line[:74] for line in shown(app).splitlines()[1:17]] == before
            assert "new text below" in shown(app)
            await pilot.press("end")
            await until(pilot, lambda: "new text below" not in shown(app), "hint goes")
            come = replies(app)[0].text.count("line")
            await until(pilot, lambda: replies(app)[0].text.count("line") > come + 30, "more text")
            assert f"line {replies(app)[0].text.count('line') - 1}" in shown(app)
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_notices_are_lines_of_the_conversation() -> None:
    async def scenario() -> None:
        notice = Notice("context_trimmed", "dropped the 6 oldest turns (1,204 tokens)")
        app = EdgeChat(
            FakeBackend(Script(notices=[notice])), notices=(Notice("ctx", "context is 2,048 tokens"),)
        )
        async with app.run_test() as pilot:
            assert "context is 2,048 tokens" in shown(app)
            await send(pilot, app, "Hi")
            assert "dropped the 6 oldest turns" in shown(app)
            assert len(chat_screen(app).query(QuietLine)) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "script",
    [
        Script(pieces=[], error="NaN logits in layer 3"),
        Script(pieces=[], raises=EngineError("NaN logits in layer 3")),
        Script(pieces=[], raises=RuntimeError("NaN logits in layer 3")),
    ],
)
def test_a_failed_answer_shows_why_and_gives_the_question_back(script: Script) -> None:
    async def scenario() -> None:
        backend = FakeBackend(script, Script(pieces=["fine"]))
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            await until(pilot, lambda: chat_screen(app).query(ErrorLine), "error line")
            assert "NaN logits in layer 3" in shown(app)
            assert "Traceback" not in shown(app)
            assert prompt(app).text == "Hi"
            await pilot.press("enter")
            await until(pilot, lambda: len(backend.calls) == 2 and not chat_screen(app).generating, "retry")
        assert [m.content for m in backend.calls[1][1]] == ["Hi"]

    asyncio.run(scenario())


def test_text_before_a_failure_is_kept() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["half "], error="device lost")))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            await until(pilot, lambda: "device lost" in shown(app), "error line")
            assert "half" in shown(app)
            assert "broken off" in shown(app)
            assert prompt(app).text == ""

    asyncio.run(scenario())


def test_a_backend_that_does_not_stop_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm_tui.stream_worker.CANCEL_GRACE_S", 0.2)

    class Deaf(FakeBackend):
        async def cancel(self, conversation_id: str) -> None:
            self.cancelled.append(conversation_id)

    async def scenario() -> None:
        app = EdgeChat(Deaf(HELD))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "cut off")
            assert "did not stop in time" in shown(app)
            assert "The capital of" in shown(app)

    asyncio.run(scenario())


def test_figures_follow_the_answer() -> None:
    async def scenario() -> None:
        prefill = ((512, 2048, 256), (2048, 2048, 256))
        app = EdgeChat(FakeBackend(Script(pieces=["a ", "b ", "c "], prefill=prefill, hold_after=3)))
        async with app.run_test(size=(100, 40)) as pilot:
            await send(pilot, app, "Hi", wait=False)
            await until(pilot, lambda: status(app).now_tokens_per_s == 42.0, "polled")
            assert "writing, 3 tokens" in shown(app)
            assert "2,051 / 8,192" in shown(app)
            assert status(app).ttft_s is not None
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert status(app).answer_tokens_per_s == pytest.approx(42.0)
            assert "256 cached" in shown(app)

    asyncio.run(scenario())


def test_the_counters_are_polled_and_never_read_per_token() -> None:
    """H04: reading the counters costs four times a second, whatever the speed."""

    async def scenario() -> None:
        backend = FakeBackend(Script(pieces=["x "] * 1500, tokens_per_s=1500, burst=5))
        app = EdgeChat(backend)
        began = time.monotonic()
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            # However long a busy machine takes; three more where an answer begins and ends.
            assert backend.stats_reads <= (time.monotonic() - began) / 0.25 + 3

    asyncio.run(scenario())


def test_context_colours_change_at_75_and_90_percent() -> None:
    styles = set()
    for used in (100, 740, 760, 910):
        bar = TopBar()
        bar.set_reactive(TopBar.context_used, used)
        styles.add((used, str(bar._context_parts(1000)[1].content.spans[0].style)))
    assert styles == {(100, "dim"), (740, "dim"), (760, "bold $text-warning"), (910, "bold $text-error")}


def test_control_characters_of_the_model_never_reach_the_terminal() -> None:
    async def scenario() -> None:
        evil = "\x1b]0;owned\x07\x1b[2Jred \x9b31m [bold]plain[/bold] \u202etxt"
        notice = Notice("x", "line\x1b[31m\nbreak")
        app = EdgeChat(FakeBackend(Script(pieces=[evil], notices=[notice])))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi \x1b[31m")
            page = shown(app)
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in page if c != "\n")
            assert "\u202e" not in page
            assert "␛]0;owned" in page
            assert "[bold]plain[/bold]" in page
            # The conversation itself is not changed by how it is shown.
            assert replies(app)[0].text == evil

    asyncio.run(scenario())


def test_html_and_line_breaks_of_the_model_are_shown() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["<div>kept</div>\n\nRoses\nViolets <b>too</b>"])))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            page = shown(app)
            assert "<div>kept</div>" in page and "<b>too</b>" in page
            assert any(line.strip() == "Roses" for line in page.splitlines())

    asyncio.run(scenario())


def test_a_model_that_cannot_be_opened_says_so_and_sets_the_exit_code() -> None:
    async def scenario(error: Exception, code: int) -> None:
        app = EdgeChat(opener=lambda notice: FailingOpener(error)(), model_name="smollm2-135m")
        async with app.run_test() as pilot:
            await until(pilot, lambda: "could not be opened" in shown(app), "the reason")
            assert "a way out" in shown(app)
            await pilot.press("ctrl+q")
        assert app.return_code == code

    asyncio.run(scenario(ResourceError("needs 5 GB, 2 GB free; a way out"), 71))
    asyncio.run(scenario(BadInputError("bad magic; a way out"), 65))
    asyncio.run(scenario(RuntimeError("a way out"), 1))


def test_where_memory_is_short_the_screen_offers_ways_out() -> None:
    """A digit opens the model in the way that it stands for, Ctrl+O another model; nothing else does."""

    async def scenario(key: str, expected: str) -> None:
        opened: list[str] = []

        def opener_of(name: str, error: Exception | None = None):  # type: ignore[no-untyped-def]
            def opener(notice: object) -> FakeBackend:
                opened.append(name)
                if error is not None:
                    raise error
                return FakeBackend()

            return opener

        app = EdgeChat(
            opener=opener_of("as asked", ResourceError("needs 5 GB, 2 GB are free")),
            opener_for=opener_of,
            library=Library(),
            ways_out=lambda: [
                WayOut("take a context of 2,048 tokens", opener_of("shorter")),
                WayOut("keep the context, in 8 bits", opener_of("int8")),
            ],
            model_name="smollm2-135m",
        )
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "could not be opened" in shown(app), "the reason")
            page = shown(app)
            assert "1  take a context of 2,048 tokens" in page and "2  keep the context" in page
            assert "Ctrl+O  take another model" in page
            await pilot.press("3", "x")
            assert opened == ["as asked"]
            await pilot.press(key)
            if key == "ctrl+o":
                await until(pilot, lambda: "big-7b" in shown(app), "listed")
                await pilot.press(*"smol", "enter")
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "the chat")
            assert opened == ["as asked", expected]
            await pilot.press(*"12")
            assert prompt(app).draft == "12"
        assert app.return_code in (None, 0)

    asyncio.run(scenario("2", "int8"))
    asyncio.run(scenario("ctrl+o", "smollm2-135m"))


def test_opening_shows_progress_and_then_the_chat_with_its_notices() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def opener(notice):
            notice(Notice("ctx", "context limited to 2,048"))
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return FakeBackend()

        app = EdgeChat(opener=opener, model_name="smollm2-135m")
        async with app.run_test() as pilot:
            await until(pilot, lambda: "context limited" in shown(app), "notice while loading")
            assert isinstance(app.screen, LoadingScreen)
            assert "Opening smollm2-135m" in shown(app)
            gate.set()
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "chat")
            await until(pilot, lambda: "context limited" in shown(app), "notice kept")

    asyncio.run(scenario())


def test_ctrl_c_while_opening_is_130_and_does_not_wait() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def opener(notice):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return FakeBackend()

        app = EdgeChat(opener=opener)
        async with app.run_test() as pilot:
            await pilot.press("ctrl+c")
        assert app.return_code == 130
        assert app.opening
        gate.set()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_transcript_is_what_scrolls() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["a\n\n"] * 60)))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            scroller = chat_screen(app).query_one(Transcript).scroller
            bottom = scroller.scroll_y
            await pilot.press("pageup")
            assert scroller.scroll_y < bottom
            await pilot.press("home")
            await pilot.pause()
            assert scroller.scroll_y == 0
            await pilot.press("ctrl+end")
            await pilot.pause()
            assert scroller.is_vertical_scroll_end

    asyncio.run(scenario())
