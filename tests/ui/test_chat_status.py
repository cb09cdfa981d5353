"""The bars and hints say what is true now, and in the room there is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgellm.contracts import FinishReason, RequestTimings, SamplingParams
from edgellm_tui.app import EdgeChat
from edgellm_tui.screens import chat
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
    monkeypatch.setattr(chat, "QUIT_WINDOW_S", 0.2)

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await pilot.press("ctrl+c")
            assert "again quits" in status(app).hint
            await until(pilot, lambda: status(app).hint == "", "hint ends", timeout_s=chat.HINT_S * 0.75)

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
