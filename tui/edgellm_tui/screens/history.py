"""Saved chats: found by words, opened, renamed, deleted and brought back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from edgellm.contracts import ChatStore, SearchHit, StoredChat
from edgellm_models.errors import EdgeLLMError
from edgellm_tui.terminal_text import safe_line

LISTED = 200
ONE_LINE_CELLS = 60
"""From so many cells on title and facts of a chat share a line."""
SEARCH_DELAY_S = 0.15
"""The list follows what is typed after so long a pause."""


def age_text(seconds: float) -> str:
    """How long ago, in one word or two."""
    for size, unit in ((86400 * 365, "y"), (86400 * 30, "mo"), (86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds / size)} {unit}"
    return "now"


def _excerpt(hit: SearchHit) -> Content:
    """The place that was found, what was searched in bold."""
    parts: list[Content] = []
    at = 0
    for start, end in hit.marks:
        if start < at:
            continue
        parts.append(Content.styled(safe_line_keeping_ends(hit.excerpt[at:start]), "dim"))
        parts.append(Content.styled(safe_line_keeping_ends(hit.excerpt[start:end]), "bold $accent"))
        at = end
    parts.append(Content.styled(safe_line_keeping_ends(hit.excerpt[at:]), "dim"))
    return Content("").join(parts)


def safe_line_keeping_ends(text: str) -> str:
    """``safe_line`` of a piece, with the spaces at its ends, which part it from its neighbours."""
    lead = " " if text[:1].isspace() else ""
    trail = " " if text[-1:].isspace() and text.strip() else ""
    return lead + safe_line(text) + trail


@dataclass(frozen=True)
class Row:
    """One line of the list."""

    chat: StoredChat
    hit: SearchHit | None = None
    """The best place in it."""
    places: int = 1
    """Messages of it in which something was found."""


def by_chat(hits: Sequence[SearchHit]) -> list[Row]:
    """One line for each chat, where its best find stands."""
    found: dict[str, list[SearchHit]] = {}
    for hit in hits:
        found.setdefault(hit.chat.id, []).append(hit)
    rows = []
    for group in found.values():
        messages = [hit for hit in group if hit.message_id is not None]
        rows.append(Row(group[0].chat, (messages or group)[0], max(1, len(messages))))
    return rows


def row_content(row: Row, current: str | None, now: float, width: int = 0) -> Content:
    """Title, age and size; below it the place that was found, in lines of ``width`` cells."""
    chat = row.chat
    mark = "● " if chat.id == current else ("★ " if chat.pinned else "  ")
    title = safe_line(chat.title) or "untitled"
    count = f"{chat.num_messages} message{'s' * (chat.num_messages != 1)}"
    facts = " · ".join(part for part in (age_text(now - chat.updated), count, safe_line(chat.model)) if part)
    if 0 < width < ONE_LINE_CELLS:
        short = Content.styled(title, "bold").truncate(width - 2, ellipsis=True)
        less = Content.styled(facts, "dim").truncate(width - 4, ellipsis=True)
        line = Content.assemble((mark, "$primary"), short, "\n    ", less)
    else:
        line = Content.assemble((mark, "$primary"), (title, "bold"), "  ", (facts, "dim"))
    if row.hit is None or row.hit.message_id is None:
        return line
    found = _excerpt(row.hit)
    if row.places > 1:
        found = Content.assemble(found, (f"  and {row.places - 1} more", "dim"))
    lines = found.wrap(width - 4) if width > 10 else [found]
    return Content("\n").join([line, *(Content("    ") + part for part in lines)])


@dataclass(frozen=True)
class Picked:
    """The chat to open, and the message in it that was found."""

    chat_id: str
    message_id: str | None = None


class HistoryScreen(ModalScreen[Picked | None]):
    """Ends with what is to be opened, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", show=False, priority=True),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "move(10)", "Page down", show=False, priority=True),
        Binding("pageup", "move(-10)", "Page up", show=False, priority=True),
        Binding("f2,ctrl+r", "rename", "Rename", show=False, priority=True),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),
        Binding("ctrl+z", "bring_back", "Bring back", show=False, priority=True),
        Binding("ctrl+t", "pin", "Pin", show=False, priority=True),
    ]
    KEYS_LINE = "Enter open · Ctrl+R rename · Ctrl+D delete · Ctrl+T pin · Esc"

    def __init__(
        self, store: ChatStore, current: str | None = None, words: str = "", searching: bool = False
    ) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._words = words
        self._searching = searching
        self._rows: list[Row] = []
        self._renaming: StoredChat | None = None
        self._deleted: list[StoredChat] = []
        self._found_nothing = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet picker") as sheet:
            sheet.border_title = "Search in chats" if self._searching else "Chats"
            yield Input(self._words, placeholder="Search in all chats", compact=True)
            yield OptionList(compact=True)
            yield Static("", markup=False, classes="picker-line")

    def on_mount(self) -> None:
        self._say(self.KEYS_LINE)
        self.query_one(Input).focus()
        self._read()

    def _say(self, text: str) -> None:
        self.query_one(".picker-line", Static).update(safe_line(text))

    # --- the list ---

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None:
            self.set_timer(SEARCH_DELAY_S, self._read)

    def _read(self) -> None:
        self.run_worker(self._fill(), group="read", exclusive=True, exit_on_error=False)

    async def _fill(self) -> None:
        """Reads the store in a thread: a long history or a busy disk must not stop the keys."""
        words = self.query_one(Input).value.strip() if self._renaming is None else self._words

        def read() -> list[Row]:
            if words:
                return by_chat(self._store.search(words, limit=LISTED))
            return [Row(chat) for chat in self._store.list_chats(limit=LISTED)]

        try:
            rows = await asyncio.to_thread(read)
        except EdgeLLMError as error:
            self._say(str(error))
            return
        self._words = words
        self._rows = rows
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.clear_options()
        self._found_nothing, before = not rows, self._found_nothing
        now = time.time()
        width = options.scrollable_content_region.width - 1  # beside the scroll bar
        options.add_options([Option(row_content(row, self._current, now, width)) for row in rows])
        if rows:
            options.highlighted = min(at, len(rows) - 1)
            if before:
                self._say(self.KEYS_LINE)
        elif words or not self._deleted:  # else the way back is told
            nothing = "Nothing found: fewer words find more, titles count too · Esc closes"
            self._say(nothing if words else "No chats are saved yet: each question begins one · Esc closes")

    def _chosen(self) -> StoredChat | None:
        at = self.query_one(OptionList).highlighted
        return self._rows[at].chat if at is not None and at < len(self._rows) else None

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if self._rows:
            options.highlighted = max(0, min(len(self._rows) - 1, (options.highlighted or 0) + by))

    # --- what is done with a chat ---

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        if self._renaming is not None:
            self._finish_renaming(event.value)
            return
        at = self.query_one(OptionList).highlighted
        if at is not None and at < len(self._rows):
            self._pick(self._rows[at])

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self._pick(self._rows[event.option_index])

    def _pick(self, row: Row) -> None:
        self.dismiss(Picked(row.chat.id, row.hit.message_id if row.hit is not None else None))

    def action_leave(self) -> None:
        if self._renaming is not None:
            self._renaming = None
            self._show_input(self._words, "Search in all chats")
            self._say(self.KEYS_LINE)
        else:
            self.dismiss(None)

    def _show_input(self, text: str, placeholder: str) -> None:
        field = self.query_one(Input)
        field.placeholder = placeholder
        with field.prevent(Input.Changed):
            field.value = text
        field.cursor_position = len(text)

    def action_rename(self) -> None:
        chat = self._chosen()
        if chat is not None and self._renaming is None:
            self._renaming = chat
            self._show_input(chat.title, "New title")
            self._say("Enter renames · Esc leaves the title as it is")

    def _finish_renaming(self, title: str) -> None:
        chat, self._renaming = self._renaming, None
        assert chat is not None
        title = " ".join(title.split())
        self._show_input(self._words, "Search in all chats")
        self._say(self.KEYS_LINE)
        if title:
            self._change(lambda: self._store.update_chat(chat.id, title=title))

    def action_delete(self) -> None:
        chat = self._chosen()
        if chat is None or self._renaming is not None:
            return
        self._deleted.append(chat)
        self._change(lambda: self._store.delete_chat(chat.id))
        self._say(f"Deleted: {chat.title or 'untitled'} · Ctrl+Z brings it back")

    def action_bring_back(self) -> None:
        if self._deleted:
            chat = self._deleted.pop()
            self._change(lambda: self._store.restore_chat(chat.id))
            self._say(self.KEYS_LINE)

    def action_pin(self) -> None:
        chat = self._chosen()
        if chat is not None:
            self._change(lambda: self._store.update_chat(chat.id, pinned=not chat.pinned))

    def _change(self, change: Callable[[], object]) -> None:
        try:
            change()
        except EdgeLLMError as error:
            self._say(str(error))
        self._read()
