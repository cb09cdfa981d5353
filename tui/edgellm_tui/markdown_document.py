"""A Markdown text that only grows: what cannot change any more is set, only its last block is read again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it.token import Token

from edgellm_tui.markdown_rows import (
    CHUNK_LINES,
    EMPTY,
    Gutter,
    Item,
    Row,
    Table,
    chat_parser,
    code_rows,
    end_of,
    going_on,
    highlighted,
    label_row,
    language_of,
    list_number,
    render,
)

HALF_A_MARK = re.compile(r"[ ]{0,3}(?:[-=*_+#>`~]+|\d{1,9}[.)]?)?[ ]*\Z")
"""A last line that may yet become a mark (of a list, a heading, a fence): it waits for what follows."""


@dataclass
class _Fence:
    """A block of code that is not closed yet."""

    close: re.Pattern[str]
    marker: str
    indent: int
    """Spaces before the opening line, which are taken from every other line too."""
    language: str
    lines: list[str]
    """Of the chunk that is not settled, each without its line end."""


class MarkdownDocument:
    """The rows of a growing text: ``settled`` is only appended to, ``open`` is made anew with every piece."""

    def __init__(self) -> None:
        self.settled: list[Item] = []
        self.open: list[Item] = []
        self._parser = chat_parser()
        self._source = ""
        self._fence: _Fence | None = None
        self._begun = False
        """Something was settled, so that the next block needs an empty row above it."""
        self._goes_on = False
        """The source begins with a further item of a list whose earlier ones are settled."""
        self._number: int | None = None
        """Of that item, in a numbered list."""
        self._table: Table | None = None
        """The first part of a table whose earlier rows are settled: the source has its heading once more."""

    def feed(self, text: str) -> None:
        """Adds text whose only line ends are newlines."""
        if not self._begun and not self._source:
            text = text.lstrip("\n")  # Blank lines before the first words would only move the answer down.
        self._source += text
        self._read(final=False)

    def finish(self) -> None:
        """No more text comes."""
        self._read(final=True)
        self.settled += self.open
        self.open = []
        self._source, self._fence = "", None
        self._begun = bool(self.settled)
        self._end_of_block()

    def _read(self, *, final: bool) -> None:
        while True:
            if self._fence is not None and not self._read_code(self._fence, final=final):
                return
            if not self._read_blocks(final=final):
                return

    def _read_blocks(self, *, final: bool) -> bool:
        """Settles all but the last block; True where that is code that is not closed yet."""
        source = self._source
        if not final:
            begin = source.rfind("\n") + 1
            if HALF_A_MARK.match(source, begin):
                source = source[:begin]
        tokens = self._parser.parse(source)
        starts = [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        if not starts:
            self.open = []
            return False
        last = starts[-1]
        # What stands above the last block cannot change any more, nor can all but the last item of a list.
        if last > 0:
            self._settle(self._rendered(tokens[:last]), above=not self._goes_on)
            self._end_of_block()
        begins = tokens[last].map
        assert begins is not None
        line = begins[0]
        block = tokens[last:]
        if block[0].type.endswith("_list_open"):
            line = self._settle_items(block, line)
            block = [block[0], *block[self._items(block)[-1] :]]
        lines = self._source.split("\n")
        if block[0].type == "table_open":
            self.open = self._table_rows(block, lines[line:])
            return False
        self._source = "\n".join(lines[line:])
        if block[0].type == "fence" and self._is_open(block[0].markup, lines[line:], begins[1] - begins[0]):
            self._open_fence(block[0].markup, block[0].info)
            return True
        rows = render(block, number=self._number)
        self.open = [*self._space(above=not self._goes_on), *rows]
        return False

    def _rendered(self, tokens: list[Token]) -> list[Item]:
        items = render(tokens, number=self._number)
        return items if self._table is None else going_on(items, self._table)

    def _end_of_block(self) -> None:
        self._goes_on, self._number, self._table = False, None, None

    def _table_rows(self, block: list[Token], lines: list[str]) -> list[Item]:
        """Settles all but the last part of a table; what is open of it."""
        *parts, last = self._rendered(block)
        if parts:
            first = parts[0]
            assert isinstance(first, Table) and isinstance(last, Table)
            self._settle(parts, above=not self._goes_on)
            self._goes_on, self._table = True, last.begun
            begins = block[0].map
            assert begins is not None
            # A row is a line; the last one may go on.
            behind = begins[1] - begins[0] - len(last.rows)
            lines = [*lines[:2], *lines[behind:]]
        self._source = "\n".join(lines)
        return [*self._space(above=not self._goes_on), last]

    def _settle_items(self, block: list[Token], line: int) -> int:
        items = self._items(block)
        if len(items) < 2:
            return line
        first = list_number(block[0]) if self._number is None else self._number
        done = [block[0], *block[1 : items[-1]], block[-1]]
        self._settle(render(done, number=first), above=not self._goes_on)
        self._goes_on = True
        self._number = first + len(items) - 1
        begins = block[items[-1]].map
        assert begins is not None
        return begins[0]

    @staticmethod
    def _items(block: list[Token]) -> list[int]:
        found, at = [], 1
        while at < len(block) - 1:
            found.append(at)
            at = end_of(block, at) + 1
        return found

    @staticmethod
    def _is_open(markup: str, lines: list[str], length: int) -> bool:
        """The fence that these lines begin with is whole and has no closing line among its ``length``."""
        closing = _closing(markup)
        return len(lines) > 1 and not any(closing.match(line) for line in lines[1:length])

    def _open_fence(self, markup: str, info: str) -> None:
        indent = len(self._source) - len(self._source.lstrip(" "))
        self._fence = _Fence(_closing(markup), markup[0], indent, language_of(info), [])
        label = label_row(self._fence.language, Gutter())
        self._settle([label], above=not self._goes_on)
        self._end_of_block()
        _, _, self._source = self._source.partition("\n")

    def _read_code(self, fence: _Fence, *, final: bool) -> bool:
        """True once the fence is closed; the source is then what follows it."""
        *whole, last = self._source.split("\n")
        least, most = CHUNK_LINES
        for place, line in enumerate(whole):
            if fence.close.match(line):
                self._close_fence(fence)
                self._source = "\n".join([*whole[place + 1 :], last])
                return True
            fence.lines.append(line)
            if (len(fence.lines) >= least and not line.strip()) or len(fence.lines) >= most:
                self._settle_code(fence)
        self._source = last
        if final and fence.close.match(last):
            self._close_fence(fence)
            self._source = ""
            return True
        shown = list(fence.lines)
        # The beginning of the closing line is no code.
        if last and (final or set(last.strip(" ")) != {fence.marker}):
            shown.append(last)
        self.open = self._code(shown, fence)
        self.open.append(label_row("", Gutter()))
        return False

    def _settle_code(self, fence: _Fence) -> None:
        self.settled += self._code(fence.lines, fence)
        fence.lines = []

    def _close_fence(self, fence: _Fence) -> None:
        self._settle_code(fence)
        self.settled.append(label_row("", Gutter()))
        self._fence, self.open = None, []

    @staticmethod
    def _code(lines: list[str], fence: _Fence) -> list[Item]:
        if not lines:
            return []
        less = [_without_indent(line, fence.indent) for line in lines]
        return list(code_rows(highlighted("\n".join(less), fence.language), Gutter()))

    def _space(self, *, above: bool) -> list[Item]:
        return [Row(EMPTY)] if above and self._begun else []

    def _settle(self, rows: list[Item], *, above: bool) -> None:
        self.settled += [*self._space(above=above), *rows]
        self._begun = True


def _closing(markup: str) -> re.Pattern[str]:
    return re.compile(rf" {{0,3}}{re.escape(markup[0])}{{{len(markup)},}}[ \t]*\Z")


def _without_indent(line: str, indent: int) -> str:
    if not indent:
        return line
    text = line.lstrip(" \t")
    lead = line[: len(line) - len(text)].expandtabs(4)
    return lead[min(indent, len(lead)) :] + text
