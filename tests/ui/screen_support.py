"""Helpers of the screen tests: an app on a scripted backend, and waiting for what it shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from textual._xterm_parser import XTermParser
from textual.pilot import Pilot

from edgellm_tui.app import EdgeChat
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.settings import ChatSettings
from edgellm_tui.widgets.prompt import ChatPrompt
from edgellm_tui.widgets.reply import Reply
from edgellm_tui.widgets.status_line import StatusLine
from tests.support.fake_backend import FakeBackend


def chat_app(backend: FakeBackend, **settings: object) -> EdgeChat:
    return EdgeChat(backend, settings=ChatSettings(**settings))  # type: ignore[arg-type]


def chat_screen(app: EdgeChat) -> ChatScreen:
    assert isinstance(app.screen, ChatScreen), app.screen
    return app.screen


def prompt(app: EdgeChat) -> ChatPrompt:
    return chat_screen(app).query_one(ChatPrompt)


def status(app: EdgeChat) -> StatusLine:
    return chat_screen(app).query_one(StatusLine)


def replies(app: EdgeChat) -> list[Reply]:
    return list(chat_screen(app).query(Reply))


async def until(pilot: Pilot, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Waits until ``condition`` holds; fails with ``what`` if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.01)
    await pilot.pause()


def burst(app: EdgeChat, data: str) -> None:
    """Lets ``data`` arrive from the terminal all at once: CR is an Enter, LF is Ctrl+J."""
    driver = app._driver
    assert driver is not None
    for event in XTermParser().feed(data):
        event.set_sender(app)
        driver.send_message(event)


async def send(pilot: Pilot, app: EdgeChat, text: str, *, wait: bool = True) -> None:
    """Types nothing but puts ``text`` into the prompt and presses Enter; waits for the end of the answer."""
    prompt(app).replace_text(text)
    await pilot.press("enter")
    if wait:
        await until(pilot, lambda: not chat_screen(app).generating, "the answer ends")


def shown(app: EdgeChat) -> str:
    """The characters on the screen, line by line."""
    height = app.size.height
    rows = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in row) for row in rows[:height])
