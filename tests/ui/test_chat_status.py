"""The bars and hints say what is true now, and in the room there is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgellm.contracts import FinishReason, RequestTimings, SamplingParams
from edgellm_tui.app import EdgeChat
from edgellm_tui.screens import chat_parts, conversation_actions, text_actions
from edgellm_tui.widgets.status_line import TopBar
from edgellm_tui.widgets.transcript import ErrorLine, Transcript
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_app, chat_screen, prompt, replies, send, shown, status, until

HELD = Script(pieces=["The ", "capital "], hold_after=2)


@pytest.mark.parametrize("key", ["enter", "ctrl+n"])
def test_a_hint_that_it_still_answers_ends_with_the_answer(key: str) -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(HELD))
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press(*"me", key)
            assert "Still answering" in shown(app)
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert status(app).hint == ""
            assert "Still answering" not in shown(app)
            await pilot.press("ctrl+y")
            assert "Copied" in status(app).hint

    asyncio.run(scenario())


def test_other_hints_outlive_the_answer_and_end_with_the_next_message() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(HELD))
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press("ctrl+y", "escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert "Copied" in status(app).hint
            await send(pilot, app, "Go", wait=False)
            assert status(app).hint == ""
            await until(pilot, lambda: len(replies(app)) == 2 and replies(app)[1].text, "second answer")
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_a_hint_about_quitting_ends_when_it_is_no_longer_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_actions, "QUIT_WINDOW_S", 0.2)

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await pilot.press("ctrl+c")
            assert "again quits" in status(app).hint
            await until(
                pilot, lambda: status(app).hint == "", "hint ends", timeout_s=chat_parts.HINT_S * 0.75
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["short", "line\n" * 40, "x" * 3000, "word " * 3000])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
def test_no_hint_at_the_end_after_a_refused_prompt(text: str, size: tuple[int, int]) -> None:
    """The refused text goes back to the prompt, which grows and takes lines from the conversation."""

    async def scenario() -> None:
        error = "the conversation takes 9,000 tokens and the context holds 8,192; /new starts over"
        answer = Script(pieces=["words\n\n"] * 30)
        app = EdgeChat(FakeBackend(answer, Script(pieces=[], error=error)))
        async with app.run_test(size=size) as pilot:
            await send(pilot, app, "Hi")
            await send(pilot, app, text)
            await until(pilot, lambda: chat_screen(app).query(ErrorLine), "error")
            assert prompt(app).text == text
            await until(pilot, lambda: "starts over" in shown(app), "error in view")
            await pilot.pause(0.2)
            assert chat_screen(app).query_one(Transcript).scroller.at_end
            assert "new text below" not in shown(app)

    asyncio.run(scenario())


def test_a_hint_goes_when_the_view_grows_to_the_end() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["a\n\n"] * 20), HELD))
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Hi")
            await send(pilot, app, "Go", wait=False)
            await pilot.press("pageup")
            chat_screen(app).query_one(Transcript).text_arrived()
            await until(pilot, lambda: "new text below" in shown(app), "hint")
            await pilot.resize_terminal(80, 100)
            await until(pilot, lambda: "new text below" not in shown(app), "hint goes")
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sampling", "foot"),
    [
        (SamplingParams(temperature=0.7), "seed 1234"),
        (SamplingParams(temperature=0.7, seed=2**32 - 1), "seed 4294967295"),
        (SamplingParams(temperature=0.0), None),
    ],
)
def test_the_seed_of_a_drawn_answer_is_told(sampling: SamplingParams, foot: str | None) -> None:
    async def scenario() -> None:
        script = Script(pieces=["a "] * 1200, burst=100, reason=FinishReason.LENGTH, prefill=((99, 99, 9),))
        app = chat_app(FakeBackend(script), sampling=sampling)
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Hi")
            await until(pilot, lambda: "cut: token limit" in shown(app), "figures")
            assert foot in shown(app) if foot else "seed" not in shown(app)

    asyncio.run(scenario())


@pytest.mark.parametrize("ttft_s", [0.0, 0.0471, 2.5])
@pytest.mark.parametrize("ending", [FinishReason.STOP, FinishReason.LENGTH])
def test_bar_and_answer_give_the_same_figures(ttft_s: float, ending: FinishReason) -> None:
    async def scenario() -> None:
        timings = RequestTimings(0.0, ttft_s, 0.5, 30, 22)
        app = EdgeChat(FakeBackend(Script(pieces=["a ", "b "], reason=ending, timings=timings)))
        async with app.run_test(size=(100, 30)) as pilot:
            await send(pilot, app, "Hi")
            await until(pilot, lambda: shown(app).count("42.0 tok/s") == 2, "both rates")
            times = [part.split("  ")[0].split(" ·")[0] for part in shown(app).split("first token ")[1:]]
            expected = {0.0: [], 0.0471: ["47 ms"] * 2, 2.5: ["2.50 s"] * 2}[ttft_s]
            assert times == expected

    asyncio.run(scenario())


def test_an_answer_without_a_token_has_no_first_token() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["a"], hold_after=0)))
        async with app.run_test(size=(100, 30)) as pilot:
            await send(pilot, app, "Hi", wait=False)
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            await until(pilot, lambda: "before the first word" in shown(app), "figures")
            assert "first token" not in shown(app)

    asyncio.run(scenario())


@pytest.mark.parametrize("pieces", [[], ["half "]])
def test_a_failed_answer_leaves_the_context_as_the_conversation_is(pieces: list[str]) -> None:
    async def scenario() -> None:
        broken = Script(pieces=pieces, prefill=((50, 50, 0),), error="device lost")
        app = EdgeChat(FakeBackend(Script(pieces=["fine"]), broken))
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            bar = chat_screen(app).query_one(TopBar)
            assert bar.context_used == 31
            await send(pilot, app, "More")
            await until(pilot, lambda: "device lost" in shown(app), "error")
            assert bar.context_used == (51 if pieces else 31)

    asyncio.run(scenario())


COMMANDS = [
    ("/copy", ["Copied 1,234,567 characters (OSC 52)", "/save FILE"]),
    ("/save a.md", ["Saved to ", "a.md"]),
    ("/save there.md", ["there.md exists already and was left alone"]),
    ("/save missing/folder/a.md", ["Not saved, no such file or directory: ", "missing/folder/a.md"]),
    ("/save " + "long/" * 60 + "a.md", ["Not saved, no such file or directory: ", "long/a.md"]),
    ("/save " + "x" * 300, ["Not saved, file name too long: "]),
    ("/save there.md/a.md", ["Not saved, not a directory: ", "there.md/a.md"]),
    ("/save nul\0.md", ["Not saved, no such path: ", ".md"]),
    ("/save ~no-such-person/a.md", ["Not saved, no such path: ", "a.md"]),
    ("/hepl", ["/hepl is no command, did you mean /help? (// sends it as text)"]),
    ("/" + "y" * 200, ["/yyy", "F1 lists the commands (// sends it as text)"]),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_hints_fit_into_80_columns_and_speak_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: list[str]
) -> None:
    """H10: what happened and the way to a file can be read to the end, with no error number or traceback."""
    folder = tmp_path / ("a-folder-with-quite-a-long-name-" * 3)
    folder.mkdir()
    (folder / "there.md").write_text("mine")

    async def scenario() -> None:
        app = chat_app(FakeBackend(Script(pieces=["x"])), save_folder=folder)
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Hi")
            monkeypatch.setattr(text_actions.TextActions, "_last_answer", "x" * 1_234_567)
            await send(pilot, app, command)
            await until(pilot, lambda: status(app).hint, "hint")
            line = shown(app).splitlines()[-1]
            for part in said:
                assert part in line, line
            assert "Errno" not in line
            assert status(app).hint.replace("\0", "␀") in line, "cut"
            assert (folder / "there.md").read_text() == "mine"

    asyncio.run(scenario())


def test_an_answer_that_no_file_can_hold_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        app = chat_app(FakeBackend(), save_folder=tmp_path)
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            monkeypatch.setattr(text_actions.TextActions, "_last_answer", "half \ud83d")
            await send(pilot, app, "/save a.md")
            assert "Not saved" in status(app).hint
            assert list(tmp_path.iterdir()) == []

    asyncio.run(scenario())


def test_a_hint_without_room_says_that_it_is_cut() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test(size=(30, 12)) as pilot:
            await send(pilot, app, "/hepl")
            assert shown(app).splitlines()[-1].rstrip().endswith("…")

    asyncio.run(scenario())
