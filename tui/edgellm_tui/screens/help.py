"""F1: every key and command, in one place that the tests compare with the bindings."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgellm_tui.slash import COMMANDS

KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "send"),
    ("Ctrl+J", "new line; Shift+Enter too, where the terminal sends it"),
    ("Esc", "stop the answer; what has come stays, your draft too"),
    ("Ctrl+C", "copy the selection, else stop; twice: quit"),
    ("Ctrl+Y", "copy the last answer"),
    ("Ctrl+N", "new chat"),
    ("Up, Down", "earlier prompts"),
    ("PgUp, PgDn", "scroll; Ctrl+Home, Ctrl+End: to the ends"),
    ("Ctrl+P", "commands and themes"),
    ("Ctrl+D", "leave, when the prompt is empty"),
    ("Ctrl+Q", "quit"),
    ("F1", "this page"),
)


class HelpScreen(ModalScreen[None]):
    """Keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter,space", "dismiss", "Close", show=False),
    ]

    def compose(self) -> ComposeResult:
        def row(name: str, does: str) -> Content:
            return Content.assemble((f"{name:<12}", "bold $primary"), does)

        lines = [row(name, does) for name, does in KEYS]
        lines.append(Content(""))
        lines += [row(f"/{name}", does) for name, does in COMMANDS.items()]
        lines.append(row("//", "sends a message that begins with a slash"))
        with VerticalScroll(classes="help") as column:
            column.border_title = "Keys and commands"
            column.border_subtitle = "Esc closes"
            for line in lines:
                yield Static(line, classes="help-row")
