"""F1: every key and command, from the same table as the bindings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgellm_tui.commands import COMMANDS, OTHER_KEYS, Command
from edgellm_tui.terminal_text import safe_line

KEY_CELLS = 14
SLASH_CELLS = 16


def keys_of(command: Command, keymap: Mapping[str, str]) -> str:
    """The keys as they are now: those of the table, or what a keymap puts in their place."""
    return safe_line(keymap[command.name]) if command.name in keymap else command.shown


def rows(keymap: Mapping[str, str], *, narrow: bool) -> list[tuple[Content, str]]:
    """The page by groups: what stands left, and what it does; a heading does nothing."""
    lines: list[tuple[Content, str]] = []

    def row(keys: str, slash: str, does: str) -> None:
        if narrow:
            head = Content.styled(f"{keys or slash:<12}", "bold $primary")
        else:
            head = Content.assemble(
                (f"{keys:<{KEY_CELLS}}", "bold $primary"), (f"{slash:<{SLASH_CELLS}}", "$secondary")
            )
        lines.append((head, does))

    def heading(text: str) -> None:
        if lines:
            lines.append((Content(" "), ""))
        lines.append((Content.styled(text, "bold"), ""))

    heading("Writing")
    for keys, does in OTHER_KEYS:
        row(keys, "", does)
    for group in dict.fromkeys(command.group for command in COMMANDS):
        heading(group)
        for command in COMMANDS:
            if command.group == group:
                slash = f"/{command.slash[0]} {command.argument}".strip() if command.slash else ""
                row(keys_of(command, keymap), slash, command.does)
    lines.append((Content(" "), ""))
    row("//", "", "sends a message that begins with a slash")
    row("other keys", "", 'in keys.toml beside config.toml, by names such as regenerate = "f5"')
    return lines


class HelpScreen(ModalScreen[None]):
    """Keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter,space", "dismiss", "Close", show=False),
    ]

    def __init__(self, keymap: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._keymap = keymap or {}

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="sheet help") as column:
            column.border_title = "Keys and commands"
            column.border_subtitle = "↑ ↓ scroll · Esc closes"
            for head, does in rows(self._keymap, narrow=self.app.size.width < 70):
                # What goes on over several lines stays in its column.
                with Horizontal(classes="help-row"):
                    yield Static(head, classes="help-keys")
                    if does:
                        yield Static(does, markup=False, classes="help-does")
