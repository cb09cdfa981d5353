"""What is shown while the model opens, and when it cannot be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from edgellm_tui.terminal_text import safe_line, safe_text
from edgellm_tui.widgets.figures import seconds_text

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LoadingScreen(Screen[None]):
    """A name, a moving mark and the seconds so far; or the error and the ways out."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+o", "app.other_model", "Another model", show=False),
        *(Binding(str(n), f"app.way_out({n - 1})", "A way out", show=False) for n in range(1, 6)),
    ]

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._model_name = safe_line(model_name) or "the model"
        self._since = time.monotonic()
        self._failed = False
        self.keeps_typing = False
        """Says that what is typed is not lost."""

    def compose(self) -> ComposeResult:
        yield Static(f"Opening {self._model_name}", markup=False, id="opening")
        yield Static("", markup=False, id="detail")

    def on_mount(self) -> None:
        self.set_interval(0.1, self._tick)

    def _tick(self) -> None:
        if not self._failed:
            elapsed = time.monotonic() - self._since
            frame = FRAMES[int(elapsed * 10) % len(FRAMES)]
            note = "\n\nWhat you type is kept for the prompt" if self.keeps_typing else ""
            self.query_one("#detail", Static).update(f"{frame} {seconds_text(elapsed)}{note}")

    def notice(self, text: str) -> None:
        """A line about what is happening."""
        self.query_one("#opening", Static).update(f"Opening {self._model_name}\n{safe_line(text)}")

    def fail(self, error: str, ways: Sequence[str] = (), *, others: bool = False) -> None:
        """Shows why there is no chat, and the keys that may lead to one: a digit for each of ``ways``, and
        Ctrl+O where there may be ``others``."""
        self._failed = True
        self.add_class("-failed")
        self.query_one("#opening", Static).update(f"✗ {self._model_name} could not be opened")
        keys = [(str(number), way) for number, way in enumerate(ways, 1)]
        keys += [("Ctrl+O", "take another model")] if others else []
        keys.append(("Ctrl+Q", "leave"))
        cells = max(len(does) for _, does in keys)
        lines = [Content.assemble((f"{key:>6}", "bold $primary"), f"  {does:<{cells}}") for key, does in keys]
        self.query_one("#detail", Static).update(Content("\n").join([safe_text(error), "", *lines]))
