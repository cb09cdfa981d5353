"""Markdown that only grows, at a cost per token that does not depend on how long it already is."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.containers import Vertical
from textual.widgets import Markdown, Static

from edgellm_tui.terminal_text import TerminalText
from edgellm_tui.widgets.folding import Fold

SEGMENT_CHARACTERS = 1500
"""A segment this long is closed at the start of its last block. Layout and repaint then touch the open
segment only.
"""


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


def last_block_line(source: str) -> int:
    """Line (from 0) at which the last top-level block of ``source`` begins; nothing before it can change
    any more.
    """
    for token in reversed(chat_parser().parse(source)):
        if token.map is not None and token.level == 0:
            return token.map[0]
    return 0


class Segment(Fold):
    """A piece of a document. Folded it is only its source and its height: the widgets are built anew when
    needed.
    """

    def __init__(self) -> None:
        super().__init__(classes="segment")
        self.source = ""
        self._markdown: Markdown | None = None

    async def append(self, text: str) -> None:
        self.source += text
        if self._markdown is None:
            self._markdown = Markdown(parser_factory=chat_parser, open_links=False)
            await self.mount(self._markdown)
        await self._markdown.append(text)

    async def cut_last_block(self) -> str | None:
        """Takes the last block away and returns its source; None if it is the only one."""
        line = last_block_line(self.source)
        if line == 0 or self._markdown is None:
            return None
        lines = self.source.splitlines(keepends=True)
        self.source = "".join(lines[:line])
        await self._markdown.children[-1].remove()
        return "".join(lines[line:])

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
        self._next_check = SEGMENT_CHARACTERS
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
        for start in range(0, len(text), SEGMENT_CHARACTERS):
            await self._open.append(text[start : start + SEGMENT_CHARACTERS])
            if len(self._open.source) >= self._next_check:
                await self._close_segment(self._open)

    async def _new_segment(self) -> Segment:
        segment = Segment()
        await self.mount(segment)
        return segment

    async def _close_segment(self, segment: Segment) -> None:
        """Moves the last block into a new segment, so that the one before it is never touched again."""
        with self.app.batch_update():
            tail = await segment.cut_last_block()
            if tail is None:
                # One block alone: wait until it has doubled rather than parse it again at every piece.
                self._next_check = 2 * len(segment.source)
                return
            self._open = await self._new_segment()
            await self._open.append(tail)
        self._next_check = max(SEGMENT_CHARACTERS, 2 * len(tail))
        self.closed.append(segment)
