"""What is typed faster than the screen works, or before there is one: nothing is lost or changes places."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgellm_tui.app import EdgeChat
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.screens.loading import LoadingScreen
from edgellm_tui.widgets.prompt import MAX_BLINKS
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import burst, chat_screen, prompt, shown, status, until

HELD = Script(pieces=["The ", "capital "], hold_after=2)
LEFT, RIGHT, UP, HOME, END, BACKSPACE, DELETE = (
    "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[H", "\x1b[F", "\x7f", "\x1b[3~",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("ab\ncd", "ab\ncd"),
        ("ab\n\ncd\n", "ab\n\ncd\n"),
        (f"abc{BACKSPACE}d", "abd"),
        (f"ab{LEFT}{LEFT}x{RIGHT}y", "xayb"),
        (f"ab{HOME}x{END}y", "xaby"),
        (f"ab{LEFT}{DELETE}c", "ac"),
        (f"one\nthree{UP}{END}\ntwo", "one\ntwo\nthree"),
        ("one two\x17three", "one three"),
        ("one\x01zero ", "zero one"),
        ("\x1b[200~p1\np2\x1b[201~ typed \x1b[200~p3\x1b[201~", "p1\np2 typed p3"),
        ("a b  c你好 d", "a b  c你好 d"),
    ],
)
def test_keys_in_one_breath_act_in_their_order(typed: str, text: str) -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            burst(app, typed)
            await pilot.pause()
            assert prompt(app).text == text
            prompt(app).clear()
            burst(app, typed + "\r")
            await until(pilot, lambda: backend.calls, "sent")
            assert backend.calls[0][1][0].content == text
            assert prompt(app).text == ""

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("typed", "sent", "kept"),
    [
        ("Hi\rmore", ["Hi"], "more"),
        ("Hi\rone\rtwo\r\rthree", ["Hi"], "one\ntwo\n\nthree"),
        ("Hi\rone\ntwo\r", ["Hi"], "one\ntwo"),
        ("Hi\r/new\rrest", ["Hi"], "/new\nrest"),
        (f"Hi\rone\r{BACKSPACE}x", ["Hi"], "onx"),
        ("/new\rHi\rmore", ["Hi"], "more"),
        ("/nonsense\rmore\r", [], "/nonsense\nmore"),
        ("\r\r  \rHi\r", ["  \nHi"], ""),
    ],
)
def test_what_follows_an_enter_stays(typed: str, sent: list[str], kept: str) -> None:
    async def scenario() -> None:
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            burst(app, typed)
            await until(pilot, lambda: len(backend.calls) == len(sent), "sent")
            assert [call[1][-1].content for call in backend.calls] == sent
            assert prompt(app).text == kept
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            assert prompt(app).text == kept

    asyncio.run(scenario())


def test_an_unknown_command_is_mended_where_it_stands() -> None:
    """A person who goes on typing after the refusal means the same line."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            await pilot.press(*"/hel", "enter", "wait:150", "x")
            assert prompt(app).text == "/helx"

    asyncio.run(scenario())


def test_a_long_unbracketed_paste_loses_nothing_and_leaves_the_screen_alive() -> None:
    async def scenario() -> None:
        lines = [f"line {n} of a paste of which every line ends in a carriage return" for n in range(500)]
        backend = FakeBackend(HELD)
        app = EdgeChat(backend)
        async with app.run_test() as pilot:
            await pilot.pause()
            started, cpu = time.monotonic(), time.process_time()
            burst(app, "".join(line + "\r" for line in lines))
            rest = "\n".join(lines[1:])
            await until(pilot, lambda: prompt(app).text == rest, "all lines")
            assert time.process_time() - cpu < 15, time.monotonic() - started
            assert [call[1][0].content for call in backend.calls] == [lines[0]]
            assert "Still answering" in status(app).hint
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def gated(backend: FakeBackend) -> tuple[threading.Event, Callable[[Any], FakeBackend]]:
    gate = threading.Event()

    def opener(notice: Any) -> FakeBackend:
        gate.wait(30)
        return backend

    return gate, opener


@pytest.mark.parametrize(
    ("typed", "sent", "kept"),
    [
        ("draft", [], "draft"),
        ("ab\ncd\rmore", ["ab\ncd"], "more"),
        ("one\rtwo\rthree", ["one"], "two\nthree"),
        (f"abc{BACKSPACE}\x1b[200~pasted\x1b[201~\r", ["abpasted"], ""),
    ],
)
def test_keys_while_the_model_opens_are_kept(typed: str, sent: list[str], kept: str) -> None:
    async def scenario() -> None:
        backend = FakeBackend(HELD)
        gate, opener = gated(backend)
        app = EdgeChat(opener=opener, model_name="smollm2-135m")
        async with app.run_test() as pilot:
            burst(app, typed)
            await until(pilot, lambda: "What you type is kept" in shown(app), "said so")
            assert isinstance(app.screen, LoadingScreen)
            assert backend.calls == []
            gate.set()
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "chat")
            await until(pilot, lambda: prompt(app).text == kept and len(backend.calls) == len(sent), "typed")
            assert [call[1][0].content for call in backend.calls] == sent
            await pilot.press("z")
            assert prompt(app).text == kept + "z"
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_keys_keep_their_order_across_the_moment_the_chat_appears() -> None:
    """Typed without a pause from the first screen to the second."""

    async def scenario() -> None:
        gate, opener = gated(FakeBackend())
        app = EdgeChat(opener=opener)
        text = "".join(f"{n} " for n in range(400))
        async with app.run_test() as pilot:
            for start in range(0, len(text), 4):
                if start == 400:
                    gate.set()
                burst(app, text[start : start + 4])
                await asyncio.sleep(0)
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "chat")
            await until(pilot, lambda: len(prompt(app).text) >= len(text), "everything typed")
            assert prompt(app).text == text

    asyncio.run(scenario())


def test_a_model_that_opens_behind_the_palette_is_shown() -> None:
    async def scenario() -> None:
        gate, opener = gated(FakeBackend())
        app = EdgeChat(opener=opener)
        async with app.run_test() as pilot:
            await pilot.press("ctrl+p")
            assert app.screen.is_modal
            await pilot.press("q")
            gate.set()
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "chat")
            await pilot.press(*"hi")
            assert prompt(app).text == "hi"

    asyncio.run(scenario())


def test_the_cursor_stops_blinking_when_nobody_types() -> None:
    """A chat at rest draws nothing; the next key makes the cursor blink again."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            field = prompt(app)
            for _ in range(MAX_BLINKS + 1):
                field._toggle_cursor_blink_visible()
            assert field._cursor_visible and not field.blink_timer._active.is_set()
            await pilot.press("a")
            assert field.blink_timer._active.is_set() and field.draft == "a"

    asyncio.run(scenario())
