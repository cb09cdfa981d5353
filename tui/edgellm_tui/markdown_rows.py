"""Markdown as rows of styled text: what each line says and what stands before it, for any width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

BULLETS = ("• ", "◦ ", "▪ ")
CODE_STYLE = "$secondary"
LINK_STYLE = "underline $primary"
MARK_STYLE = "$primary"
LABEL_STYLE = "$foreground 55%"
QUOTE_MARK = "▎ "
HEADINGS = {"h1": "bold underline $primary", "h2": "bold $primary"}
"""Other headings are bold."""

CHUNK_LINES = (40, 120)
"""Code is coloured in chunks: one ends at the first empty line from the former on, at the latter anyway."""

TABLE_ROWS = 60
"""A long table comes in parts of so many rows, whose columns are at least as wide as those of the first."""

EMPTY = Content("")


@dataclass(frozen=True)
class Row:
    """One line as it was written; how many lines of the screen it takes depends on the width."""

    text: Content
    first: Content = EMPTY
    """What stands before it: a bullet, the bar of a quotation, indentation."""
    rest: Content = EMPTY
    """What stands before its second and further lines on the screen."""
    kind: str = "text"
    """text, code (its background goes over the whole width, it breaks anywhere) or rule."""


@dataclass(frozen=True)
class Table:
    """Cells in rows, the heading first."""

    rows: tuple[tuple[Content, ...], ...]
    right: tuple[bool, ...]
    """Columns that end at their right edge."""
    first: Content = EMPTY
    rest: Content = EMPTY
    begun: Table | None = None
    """The first part of the table that this one goes on with, without a heading of its own."""


Item = Row | Table


def chat_parser() -> MarkdownIt:
    """Markdown as chats mean it: line breaks stay; HTML, bare addresses and link definitions are text.

    Nothing that a model wrote may vanish: HTML and definitions would, for they are not shown.
    """
    parser = MarkdownIt("gfm-like", {"html": False, "linkify": False}).disable("reference")
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def end_of(tokens: Sequence[Token], begin: int) -> int:
    """Index of the last token of the block that opens at ``begin``."""
    if tokens[begin].nesting != 1:
        return begin
    level = tokens[begin].level
    return next(i for i in range(begin + 1, len(tokens)) if tokens[i].level == level)


def inline(token: Token) -> Content:
    """The text of a paragraph, a heading or a cell with its styles; breaks in it are line ends."""
    parts: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[str | Style, int]] = []
    length = 0
    simple = {"strong_open": "bold", "em_open": "italic", "s_open": "strike"}
    for child in token.children or ():
        piece = ""
        if child.type == "text":
            piece = re.sub(r"\s+", " ", child.content)
        elif child.type == "hardbreak":
            piece = "\n"
        elif child.type == "code_inline":
            piece = child.content.replace("\t", " ")
            spans.append(Span(length, length + len(piece), CODE_STYLE))
        elif child.type in simple:
            opened.append((simple[child.type], length))
        elif child.type == "link_open":
            opened.append((link_to(str(child.attrs.get("href", ""))), length))
        elif child.type == "image":
            piece = f"[image: {child.content or child.attrs.get('src', '')}]"
            address = link_to(str(child.attrs.get("src", "")))
            spans += [Span(length, length + len(piece), style) for style in (address, LINK_STYLE)]
        elif child.nesting == -1 and opened:
            style, begin = opened.pop()
            spans.append(Span(begin, length, style))
            if isinstance(style, Style):
                spans.append(Span(begin, length, LINK_STYLE))
        else:
            piece = child.content
        parts.append(piece)
        length += len(piece)
    return Content("".join(parts), spans)


def link_to(address: str) -> Style:
    """What a click on a link does."""
    return Style.from_meta({"@click": f"link({address!r})"})


class Gutter:
    """What stands before the rows of a block: nothing, or marks of the lists and quotations it lies in."""

    def __init__(self, outer: Gutter | None = None, mark: Content = EMPTY, rest: Content = EMPTY) -> None:
        self._outer = outer
        self._mark: Content | None = mark
        self._rest = rest

    def take(self) -> tuple[Content, Content]:
        """For the next row: before its first line and before its further ones."""
        first, rest = self._outer.take() if self._outer is not None else (EMPTY, EMPTY)
        mark, self._mark = self._mark, None
        return first + (self._rest if mark is None else mark), rest + self._rest


def code_rows(text: Content, gutter: Gutter) -> Iterable[Row]:
    """Rows of code, without the ones above and below it."""
    for line in text.split("\n", allow_blank=True):
        first, rest = gutter.take()
        yield Row(line, first, rest, "code")


def highlighted(code: str, language: str) -> Content:
    """Code in the colours of its language, at most ``CHUNK_LINES`` at a time so that a long block stays
    cheap while it grows."""
    from textual.highlight import highlight

    if not code:
        return EMPTY
    shown = code.expandtabs(4)
    content = highlight(shown, language=language or "text")
    # It joins the lines anew: one empty line at the end more or less.
    missing = len(shown) - len(content.plain)
    return content + "\n" * missing if missing > 0 else content[: len(shown)]


def chunks(code: str) -> list[str]:
    """The parts that are coloured on their own, by what is written alone: without their last line end."""
    parts: list[str] = []
    lines: list[str] = []
    least, most = CHUNK_LINES
    for line in code.split("\n"):
        lines.append(line)
        if (len(lines) >= least and not line.strip()) or len(lines) >= most:
            parts.append("\n".join(lines))
            lines = []
    return [*parts, "\n".join(lines)] if lines else parts


def label_row(language: str, gutter: Gutter) -> Row:
    """The row above code: its language, small."""
    first, rest = gutter.take()
    return Row(Content.styled(language, LABEL_STYLE) if language else EMPTY, first, rest, "code")


def language_of(info: str) -> str:
    """The language that a fence names."""
    return info.split()[0][:30] if info.split() else ""


def render(
    tokens: Sequence[Token], gutter: Gutter | None = None, *, number: int | None = None, spaced: bool = True
) -> list[Item]:
    """The rows of some blocks, with an empty one between each two, or not ``spaced`` between paragraphs only.

    ``number``: of the first item, where the first block is a numbered list that goes on.
    """
    gutter = gutter or Gutter()
    items: list[Item] = []
    at, before = 0, ""
    while at < len(tokens):
        end, token = end_of(tokens, at), tokens[at]
        if before and (spaced or before == token.type == "paragraph_open"):
            items.append(Row(EMPTY, *gutter.take()))
        items += _block(tokens[at : end + 1], gutter, number if at == 0 else None)
        at, before = end + 1, token.type
    return items


def _block(tokens: Sequence[Token], gutter: Gutter, number: int | None) -> list[Item]:
    token = tokens[0]
    if token.type in ("paragraph_open", "heading_open"):
        text = inline(tokens[1])
        if token.type == "heading_open":
            text = text.stylize(HEADINGS.get(token.tag, "bold"))
        return text_rows(text, gutter)
    if token.type in ("fence", "code_block"):
        language = language_of(token.info)
        rows: list[Item] = [label_row(language, gutter)]
        code = token.content.removesuffix("\n")
        for part in chunks(code) if token.content else ():
            rows += code_rows(highlighted(part, language), gutter)
        return [*rows, label_row("", gutter)]
    if token.type == "hr":
        return [Row(EMPTY, *gutter.take(), "rule")]
    if token.type == "blockquote_open":
        bar = Content.styled(QUOTE_MARK, MARK_STYLE)
        return render(tokens[1:-1], Gutter(gutter, bar, bar))
    if token.type in ("bullet_list_open", "ordered_list_open"):
        return _list(tokens, gutter, number)
    if token.type == "table_open":
        return list(_table(tokens, gutter))
    return text_rows(Content(token.content), gutter)


def text_rows(text: Content, gutter: Gutter) -> list[Item]:
    """One row for each line of ``text``."""
    return [Row(line, *gutter.take()) for line in text.split("\n", allow_blank=True)]


def list_number(token: Token) -> int:
    """Of the first item of a numbered list."""
    return int(token.attrs.get("start", 1))


def _list(tokens: Sequence[Token], gutter: Gutter, number: int | None) -> list[Item]:
    items: list[Item] = []
    ordered = tokens[0].type == "ordered_list_open"
    count = list_number(tokens[0]) if number is None else number
    depth = tokens[0].level // 2
    at = 1
    while at < len(tokens) - 1:
        end = end_of(tokens, at)
        mark = f"{count}. " if ordered else BULLETS[depth % len(BULLETS)]
        inner = Gutter(gutter, Content.styled(mark, MARK_STYLE), Content(" " * len(mark)))
        # Inside an item what belongs together stays together.
        rows = render(tokens[at + 1 : end], inner, spaced=False)
        items += rows or [Row(EMPTY, *inner.take())]
        at, count = end + 1, count + 1
    return items


def going_on(items: Sequence[Item], begun: Table) -> list[Item]:
    """``items`` of a source that began with the heading of ``begun`` once more, for its further rows."""
    again = items[0]
    assert isinstance(again, Table) and again.begun is None
    rest = [replace(i, begun=begun) if isinstance(i, Table) and i.begun is again else i for i in items[1:]]
    return [replace(again, rows=again.rows[1:], first=again.rest, begun=begun), *rest]


def _table(tokens: Sequence[Token], gutter: Gutter) -> Iterable[Table]:
    rows: list[tuple[Content, ...]] = []
    right: list[bool] = []
    for at, token in enumerate(tokens):
        if token.type == "tr_open":
            cells = tokens[at : end_of(tokens, at)]
            rows.append(tuple(inline(cell) for cell in cells if cell.type == "inline"))
        elif token.type == "th_open":
            right.append("right" in str(token.attrs.get("style", "")))
    first, rest = gutter.take()
    begun = Table(tuple(rows[: TABLE_ROWS + 1]), tuple(right), first, rest)
    yield begun
    for at in range(TABLE_ROWS + 1, len(rows), TABLE_ROWS):
        yield Table(tuple(rows[at : at + TABLE_ROWS]), tuple(right), rest, rest, begun)
