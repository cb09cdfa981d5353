"""Markdown that only grows, at a cost per token that does not depend on how long it already is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.containers import Vertical
from textual.widgets import Markdown, Static

from edgellm_tui.terminal_text import TerminalText
from edgellm_tui.widgets.folding import Fold

SEGMENT_CHARACTERS = 500
"""A segment this long is closed where its last block or list item begins; only what follows still changes."""

SEGMENT_ITEMS = 8
"""A list this long is closed sooner: the widget builds the whole list anew for every piece of text."""

CHECK_CHARACTERS = 200
"""A segment is looked at for a cut each time it has grown by so much."""


def chat_parser() -> MarkdownIt:
    """Markdown as chats mean it: line breaks stay, HTML and bare addresses are text.

    HTML must be text because the widget shows no HTML: a ``<div>`` in an answer would silently vanish.
    """
    parser = MarkdownIt("gfm-like", {"html": False, "linkify": False})
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


@dataclass(frozen=True)
class Cut:
    """Where a growing text can be parted: nothing before ``line`` can change any more."""

    line: int
    """From 0."""
    in_list: bool = False
    """Between two items of a list that fills the text, rather than between blocks."""
    items: int = 0
    """Items of the last block, where that is a list."""
    number: int | None = None
    """Of the item at ``line`` in a numbered list, which a text of its own must state."""


def find_cut(source: str) -> Cut | None:
    """The start of the last top-level block, or of the last item where one list is all there is."""
    tokens = [token for token in chat_parser().parse(source) if token.map is not None]
    blocks = [token for token in tokens if token.level == 0]
    if not blocks:
        return None
    last = blocks[-1]
    assert last.map is not None
    within = tokens[tokens.index(last) :]
    items = [token for token in within if token.level == 1 and token.type == "list_item_open"]
    if last.map[0] > 0:
        return Cut(last.map[0], items=len(items))
    if len(items) < 2:
        return None
    begin = items[-1].map
    assert begin is not None
    if last.type == "bullet_list_open":
        return Cut(begin[0], in_list=True, items=len(items))
    number = int(last.attrs.get("start", 1)) + len(items) - 1
    return Cut(begin[0], in_list=True, items=len(items), number=number)


class Segment(Fold):
    """A piece of a document. Folded it is only its source and its height: the widgets are built anew when
    needed.
    """

    def __init__(self) -> None:
        super().__init__(classes="segment")
        self.source = ""
        self._markdown: Markdown | None = None
        self._list_goes_on = False

    async def append(self, text: str) -> None:
        self.source += text
        if self._markdown is None:
            self._markdown = Markdown(parser_factory=chat_parser, open_links=False)
            await self.mount(self._markdown)
        await self._markdown.append(text)

    async def cut(self) -> str | None:
        """Takes the last block or list item away and returns its source; None without need or place."""
        cut = find_cut(self.source)
        if cut is None or self._markdown is None:
            return None
        if len(self.source) < SEGMENT_CHARACTERS and cut.items < SEGMENT_ITEMS:
            return None
        lines = self.source.splitlines(keepends=True)
        self.source = "".join(lines[: cut.line])
        tail = "".join(lines[cut.line :])
        if cut.number is not None:
            tail = re.sub(r"\d+", str(cut.number), tail, count=1)
        self._list_goes_on = cut.in_list
        block = self._markdown.children[-1]
        await (block.children[-1] if cut.in_list else block).remove()
        self._join_list()
        return tail

    def _join_list(self) -> None:
        if self._list_goes_on and self._markdown is not None:
            self._markdown.children[-1].styles.margin = 0

    def release_content(self) -> None:
        self._markdown = None
        self.call_later(self._drop_widgets)

    async def _drop_widgets(self) -> None:
        if self.folded:
            await self.remove_children()
            # Textual caches the list and the layout of children; without a new child and a clear cache it
            # would keep
            # the removed blocks alive for as long as this segment, and garbage collection would pause for
            # them.
            await self.mount(Static())
            self._clear_arrangement_cache()

    def restore_content(self) -> None:
        self.measured = False
        self.call_later(self._rebuild)

    async def _rebuild(self) -> None:
        if self.folded or self._markdown is not None:
            return
        await self.remove_children()
        self._markdown = Markdown(parser_factory=chat_parser, open_links=False)
        with self.app.batch_update():
            await self.mount(self._markdown)
            await self._markdown.append(self.source)
            self._join_list()
            self.styles.height = "auto"
        self.call_after_refresh(self._note_height)

    def _note_height(self) -> None:
        self.measured = True
        self.post_message(self.Measured())


class StreamingMarkdown(Vertical):
    """One growing document, held as a column of segments of which only the last still grows.

    The text is made safe for a terminal on its way in. A reference link whose definition falls into another
    segment is shown as it was written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._safe = TerminalText()
        self._open: Segment | None = None
        self._next_check = CHECK_CHARACTERS
        self.closed: list[Segment] = []
        """Segments that no longer change."""

    async def append(self, text: str) -> None:
        """Shows ``text`` after what is there."""
        await self._append_safe(self._safe.feed(text))

    async def finish(self) -> None:
        """No more text comes: shows what was held back (at most a line end)."""
        await self._append_safe(self._safe.flush())
        if self._open is not None:
            self.closed.append(self._open)
            self._open = None

    async def _append_safe(self, text: str) -> None:
        if not text:
            return
        if self._open is None:
            # Blank lines before the first words would only move the answer down.
            text = text.lstrip("\n")
            if not text:
                return
            self._open = await self._new_segment()
        # Much text at once is still cut into segments.
        for start in range(0, len(text), CHECK_CHARACTERS):
            await self._open.append(text[start : start + CHECK_CHARACTERS])
            if len(self._open.source) >= self._next_check:
                await self._close_segment(self._open)

    async def _new_segment(self) -> Segment:
        segment = Segment()
        await self.mount(segment)
        return segment

    async def _close_segment(self, segment: Segment) -> None:
        """Moves the last block into a new segment, so that the one before it is never touched again."""
        with self.app.batch_update():
            tail = await segment.cut()
            if tail is None:
                # In proportion, so that a single long block is not parsed again for every piece of it.
                self._next_check = max(len(segment.source) + CHECK_CHARACTERS, len(segment.source) * 5 // 4)
                return
            self._open = await self._new_segment()
            await self._open.append(tail)
        self._next_check = len(tail) + CHECK_CHARACTERS
        self.closed.append(segment)
