"""Pictures of the chat screen in every state, compared with committed ones (--snapshot-update renews)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from edgellm.contracts import FinishReason
from edgellm_models.errors import Notice, ResourceError
from edgellm_tui.app import EdgeChat
from edgellm_tui.settings import ChatSettings
from edgellm_tui.themes import DARK, LIGHT
from edgellm_tui.widgets.stats_panel import Snapshot, StatsPanel
from edgellm_tui.widgets.transcript import ErrorLine
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_screen, prompt, replies, send, shown, status, until
from tests.ui.test_chat_live import SNAPSHOT

SIZES = {"80x24": (80, 24), "120x40": (120, 40), "40x12": (40, 12)}
ANSWER = """Paris is the **capital** of France, on the *Seine*.

## Facts

- About `2.1 million` people
- Twenty districts
  1. numbered from the centre

| City | People |
|---|---|
| Paris | 2.1 M |
| Lyon | 0.5 M |

```python
def greet(name: str) -> str:
    return f"Hello, {name}!"  # 你好
```

> Fluctuat nec mergitur.
"""
PIECES = [ANSWER[i : i + 9] for i in range(0, len(ANSWER), 9)]

Before = Callable[[Pilot], Awaitable[None]]


def app_for(*scripts: Script, theme: str = DARK.name) -> EdgeChat:
    return EdgeChat(FakeBackend(*scripts), settings=ChatSettings(theme=theme))


def freeze_panel(app: EdgeChat, shown: Snapshot | None = None) -> None:
    """The live panel with fixed figures: what is polled from now on does not reach it."""
    panel = chat_screen(app).query_one(StatsPanel)
    panel.history.samples.clear()
    panel.history.samples.extend((12.0, 30.0, 41.0, 38.0, 42.0, 40.0))
    type(panel).show(panel, shown or SNAPSHOT, sample=False)
    panel.show = lambda *args, **kwargs: None  # type: ignore[method-assign]


def still(app: EdgeChat) -> None:
    """Takes the clock out of the picture."""
    prompt(app).cursor_blink = False
    # A line that was drawn while the cursor was off would be taken from there.
    prompt(app)._line_cache.clear()
    prompt(app).refresh()
    freeze_panel(app)
    line = status(app)
    if line.busy:
        chat_screen(app)._refresh_progress = lambda stats=None: None  # type: ignore[method-assign]
        line.ttft_s, line.now_tokens_per_s, line.answer_tokens_per_s = 0.184, 42.0, 40.3


async def settled(pilot: Pilot) -> None:
    """Waits until the picture has been the same for a while, however busy the machine is."""
    same, last = 0, ""
    while same < 4:
        await pilot.pause(0.1)
        now = pilot.app.export_screenshot()
        same, last = (same + 1, last) if now == last else (0, now)


async def empty(pilot: Pilot) -> None:
    still(pilot.app)
    await settled(pilot)


async def answered(pilot: Pilot) -> None:
    await send(pilot, pilot.app, "What is the capital of France?")
    still(pilot.app)
    await settled(pilot)


async def streaming(pilot: Pilot) -> None:
    app = pilot.app
    await send(pilot, app, "Tell me about Paris,\nin two lines.", wait=False)
    held = "".join(PIECES[:12])
    await until(pilot, lambda: replies(app)[0].text == held, "the text")
    await until(pilot, lambda: "12 tokens" in status(app).phase and status(app).now_tokens_per_s, "polled")
    prompt(app).replace_text("a draft for later")
    still(app)
    await settled(pilot)


async def stopped(pilot: Pilot) -> None:
    await streaming(pilot)
    await pilot.press("escape")
    await until(pilot, lambda: not chat_screen(pilot.app).generating, "stopped")
    still(pilot.app)
    await settled(pilot)


async def failed(pilot: Pilot) -> None:
    await send(pilot, pilot.app, "Hello?")
    await until(pilot, lambda: chat_screen(pilot.app).query(ErrorLine) and "✗" in shown(pilot.app), "error")
    still(pilot.app)
    await settled(pilot)


async def help_page(pilot: Pilot) -> None:
    still(pilot.app)
    await pilot.press("f1")
    await settled(pilot)


NOTICE = Notice("context_trimmed", "the context was full: dropped the 6 oldest turns (1,204 tokens)")
CASES: dict[str, tuple[Callable[[], EdgeChat], Before]] = {
    "empty": (lambda: app_for(), empty),
    "answered": (lambda: app_for(Script(pieces=PIECES)), answered),
    "streaming": (lambda: app_for(Script(pieces=PIECES[:12], hold_after=12)), streaming),
    "stopped": (lambda: app_for(Script(pieces=PIECES[:12], hold_after=12)), stopped),
    "notice": (
        lambda: app_for(Script(pieces=PIECES[:4], notices=[NOTICE], reason=FinishReason.LENGTH)),
        answered,
    ),
    "error": (
        lambda: app_for(Script(pieces=[], error="NaN logits in layer 3; try --activations exact")),
        failed,
    ),
    "help": (lambda: app_for(), help_page),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_screen(snap_compare: Any, case: str, size: str) -> None:
    make, before = CASES[case]
    assert snap_compare(make(), run_before=before, terminal_size=SIZES[size])


@pytest.mark.parametrize("case", ["empty", "answered", "error", "help"])
def test_light_theme(snap_compare: Any, case: str) -> None:
    make, before = CASES[case]
    app = make()
    app._settings = ChatSettings(theme=LIGHT.name)
    assert snap_compare(app, run_before=before, terminal_size=(100, 30))


@pytest.mark.parametrize("case", ["answered", "streaming", "error"])
def test_no_color(snap_compare: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    make, before = CASES[case]
    assert snap_compare(make(), run_before=before, terminal_size=(80, 24))


@pytest.mark.parametrize("size", SIZES)
def test_model_that_cannot_be_opened(snap_compare: Any, size: str) -> None:
    def opener(notice: Any) -> FakeBackend:
        raise ResourceError("smollm2-135m needs 1,204 MB, 800 MB are free; try --ctx 2048 or --kv-dtype bf16")

    async def before(pilot: Pilot) -> None:
        await until(pilot, lambda: "could not be opened" in shown(pilot.app), "the reason")

    app = EdgeChat(opener=opener, model_name="smollm2-135m")
    assert snap_compare(app, run_before=before, terminal_size=SIZES[size])
