"""Markdown that only grows, at a cost per token that does not depend on how long it already is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from edgellm_tui.markdown_document import MarkdownDocument
from edgellm_tui.markdown_lines import Line, layout
from edgellm_tui.markdown_rows import Item
from edgellm_tui.terminal_text import TerminalText

PIECE_CHARACTERS = 4000
"""Much text at once (a saved answer) is taken in pieces, so that keys are answered in between."""

MAX_STRIPS = 400
"""Drawn lines that are kept: a few screens full."""


class StreamingMarkdown(Widget):
    """One growing document in one widget that draws its own lines.

    Blocks that can no longer change are read, coloured and wrapped once for a width; only the last block is
    made anew with every piece. The text is made safe for a terminal on its way in.
    """

    DEFAULT_CSS = """
    StreamingMarkdown {
        width: 1fr;
        height: auto;
    }
    """

    class LinkClicked(Message):
        """The reader wants to have ``address``."""

        def __init__(self, address: str) -> None:
            super().__init__()
            self.address = address

    def __init__(self) -> None:
        super().__init__()
        self.document = MarkdownDocument()
        self._safe = TerminalText()
        self._width = 0
        self._taken = 0
        """Settled items that are laid out."""
        self._lines: list[Line] = []
        self._rows: list[str] = []
        self._settled_lines = 0
        self._settled_rows = 0
        self._strips: dict[int, Strip] = {}
        self._styles_by_name: dict[str, Style] = {}

    # --- text ---

    async def append(self, text: str) -> None:
        """Shows ``text`` after what is there."""
        safe = self._safe.feed(text)
        for start in range(0, len(safe), PIECE_CHARACTERS):
            if start:
                await asyncio.sleep(0)
            self.document.feed(safe[start : start + PIECE_CHARACTERS])
        if safe:
            self._grown()

    async def finish(self) -> None:
        """No more text comes: shows what was held back."""
        self.document.feed(self._safe.flush())
        self.document.finish()
        self._grown()

    def _grown(self) -> None:
        if not self._width:
            self.refresh(layout=True)
            return
        before, kept = len(self._lines), self._settled_lines
        self._lay_out()
        if len(self._lines) != before:
            self.refresh(layout=True)
        elif before > kept:
            self.refresh(Region(0, kept, self._width, before - kept))

    # --- lines ---

    def _lay_out(self) -> None:
        """Lays out what was settled since the last time, and the open block."""
        items = self.document.settled
        for line in range(self._settled_lines, len(self._lines)):
            self._strips.pop(line, None)
        del self._lines[self._settled_lines :], self._rows[self._settled_rows :]
        self._add(items[self._taken :])
        self._taken = len(items)
        self._settled_lines, self._settled_rows = len(self._lines), len(self._rows)
        self._add(self.document.open)

    def _add(self, items: Sequence[Item]) -> None:
        lines, rows = layout(items, self._width, len(self._rows))
        self._lines += lines
        self._rows += rows

    def _fit(self, width: int) -> None:
        if width != self._width and width > 0:
            self._width = width
            self._taken = self._settled_lines = self._settled_rows = 0
            self._lines.clear()
            self._rows.clear()
            self._strips.clear()
            self._lay_out()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._fit(width)
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        self._fit(self.size.width)
        if not 0 <= y < len(self._lines):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        strip = self._strips.get(y)
        if strip is None:
            if len(self._strips) >= MAX_STRIPS:
                self._strips.clear()
            strip = self._strips[y] = self._draw(self._lines[y])
        return strip

    def _draw(self, line: Line) -> Strip:
        base = self.visual_style
        if line.kind == "code":
            base += self._named_style("on $surface")
        text = line.text
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(line.row)) is not None:
            shift = line.margin - line.start
            begin = max(line.margin, span[0] + shift)
            end = len(text) if span[1] < 0 else min(len(text), span[1] + shift)
            if begin < end:
                chosen = Style.from_styles(self.screen.get_component_styles("screen--selection"))
                text = text.stylize(chosen, begin, end)
        segments: list[Segment] = []
        at = 0
        for part, style in text.render(base, end="", parse_style=self._named_style):
            drawn = base + style
            for piece in (part[: max(0, line.margin - at)], part[max(0, line.margin - at) :]):
                if not piece:
                    continue
                if at < line.margin:
                    segments.append(Segment(piece, drawn.rich_style))
                else:
                    place = at - line.margin + line.start
                    segments.append(Segment(piece, drawn.rich_style_with_offset(place, line.row)))
                at += len(piece)
        return Strip(segments, text.cell_length).extend_cell_length(self._width, base.rich_style)

    def _named_style(self, style: str | Style) -> Style:
        if isinstance(style, Style):
            return style
        known = self._styles_by_name.get(style)
        if known is None:
            known = self._styles_by_name[style] = Style.parse(style, self.app.theme_variables)
        return known

    # --- looks, selection, links ---

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles_by_name.clear()
        self._strips.clear()

    def selection_updated(self, selection: Selection | None) -> None:
        self._strips.clear()
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(self._rows)), "\n"

    def action_link(self, address: str) -> None:
        self.post_message(self.LinkClicked(address))
