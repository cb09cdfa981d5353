"""Pictures of the sheets and the live panel, compared with committed ones (--snapshot-update renews)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from edgellm.contracts import ChatMessage, DraftCounts, EngineStats
from edgellm_tui.app import EdgeChat
from edgellm_tui.screens import history
from edgellm_tui.settings import ChatSettings
from edgellm_tui.themes import DARK, LIGHT
from edgellm_tui.unsaved import MemoryStore
from edgellm_tui.widgets.stats_panel import StatsPanel
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_screen, send, shown, status, until
from tests.ui.test_chat_commands import Library
from tests.ui.test_chat_live import SNAPSHOT
from tests.ui.test_chat_looks import PIECES, SIZES, freeze_panel, settled, still

STATS = EngineStats(
    time=1.0,
    running=1,
    kv_blocks={"used": 40, "shared": 8, "cached": 25, "free": 190, "evicted": 2},
    draft=DraftCounts(120, 77, 40),
    weight_bytes=98_000_000,
    kv_bytes=380_000_000,
    kernel_backend="native",
)


def app_with_chats(theme: str) -> EdgeChat:
    store = MemoryStore()
    for title, answer in (
        ("What is the capital of France?", "Paris, on the Seine."),
        ("Explain unified memory", "One pool of memory for both processors."),
        ("A poem about rain, in two lines", "Rain on the roof, the Seine of the sky."),
    ):
        chat = store.create_chat(model="smollm2-135m")
        question = store.add_message(chat.id, ChatMessage("user", title), parent_id=None)
        store.add_message(chat.id, ChatMessage("assistant", answer), parent_id=question.id)
    backend = FakeBackend(Script(pieces=PIECES))
    backend.engine_stats = STATS
    return EdgeChat(backend, store=store, library=Library(), settings=ChatSettings(theme=theme))


def quiet(app: EdgeChat) -> None:
    for field in app.screen.query(Input):
        field.cursor_blink = False


async def chats(pilot: Pilot) -> None:
    still(pilot.app)
    await pilot.press("ctrl+s")
    quiet(pilot.app)
    await until(pilot, lambda: "A poem" in shown(pilot.app), "listed")
    await settled(pilot)


async def found(pilot: Pilot) -> None:
    await chats(pilot)
    await pilot.press(*"seine")
    await until(pilot, lambda: len(pilot.app.screen._rows) == 2, "found")
    await settled(pilot)


async def models(pilot: Pilot) -> None:
    still(pilot.app)
    await pilot.press("ctrl+o")
    quiet(pilot.app)
    await until(pilot, lambda: "big-7b" in shown(pilot.app), "listed")
    await settled(pilot)


async def parameters(pilot: Pilot) -> None:
    still(pilot.app)
    await pilot.press("f3")
    quiet(pilot.app)
    await settled(pilot)


async def palette(pilot: Pilot) -> None:
    still(pilot.app)
    await pilot.press("ctrl+p", *"copy")
    quiet(pilot.app)
    await until(pilot, lambda: "Alt+C" in shown(pilot.app), "listed")
    await settled(pilot)


async def panel(pilot: Pilot) -> None:
    app = pilot.app
    await send(pilot, app, "What is the capital of France?")
    view = chat_screen(app).query_one(StatsPanel)
    if not view.display:
        await pilot.press("f2")
    still(app)
    freeze_panel(app, replace(SNAPSHOT, interval_p50_s=0.023, interval_p95_s=0.041))
    status(app).phase = "ready"
    await settled(pilot)


CASES: dict[str, Callable[[Pilot], Awaitable[None]]] = {
    "chats": chats,
    "found": found,
    "models": models,
    "parameters": parameters,
    "panel": panel,
    "palette": palette,
}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "age_text", lambda seconds: "now")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_sheet(snap_compare: Any, case: str, size: str) -> None:
    assert snap_compare(app_with_chats(DARK.name), run_before=CASES[case], terminal_size=SIZES[size])


@pytest.mark.parametrize("case", ["found", "models", "parameters"])
def test_sheet_in_light_colours(snap_compare: Any, case: str) -> None:
    assert snap_compare(app_with_chats(LIGHT.name), run_before=CASES[case], terminal_size=(80, 24))


@pytest.mark.parametrize("case", ["found", "models"])
def test_sheet_without_colours(snap_compare: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_with_chats(DARK.name), run_before=CASES[case], terminal_size=(80, 24))


def test_panel_in_light_colours(snap_compare: Any) -> None:
    assert snap_compare(app_with_chats(LIGHT.name), run_before=panel, terminal_size=(120, 40))


def test_panel_without_colours(snap_compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_with_chats(DARK.name), run_before=panel, terminal_size=(120, 40))
