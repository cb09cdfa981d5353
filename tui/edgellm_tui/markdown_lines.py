"""Rows of Markdown laid out for a width: wrapped lines, tables as wide as there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from textual.content import Content

from edgellm_tui.markdown_rows import EMPTY, Item, Row, Table
from edgellm_tui.terminal_text import grapheme_starts

COLUMN_GAP = " │ "
NARROWEST_COLUMN = 5
"""Where a table's columns would be narrower than this, its rows are shown one below the other."""

LINE_STYLE = "$foreground 35%"


@dataclass(frozen=True)
class Line:
    """One line of the screen."""

    text: Content
    row: int
    """The logical line that it belongs to: what is selected and copied goes by these."""
    start: int
    """Where its text stands in that line, in characters."""
    margin: int
    """Characters at its beginning that are not of that line: repeated indentation, the bar of a quotation."""
    kind: str


def layout(items: Iterable[Item], width: int, first_row: int) -> tuple[list[Line], list[str]]:
    """The lines of ``items`` in ``width`` cells, and their logical lines, counted from ``first_row``."""
    lines: list[Line] = []
    rows: list[str] = []
    for item in items:
        for row in _table_rows(item, width) if isinstance(item, Table) else (item,):
            lines += _row_lines(row, width, first_row + len(rows))
            rows.append(row.first.plain + row.text.plain)
    return lines, rows


def _row_lines(row: Row, width: int, number: int) -> list[Line]:
    first, rest = _narrowed(row.first, width), _narrowed(row.rest, width)
    if row.kind == "rule":
        rule = Content.styled("─" * max(1, width - first.cell_length), LINE_STYLE)
        return [Line(first + rule, number, 0, 0, "text")]
    room = max(1, width - max(first.cell_length, rest.cell_length))
    if row.kind == "code":
        room = max(1, room - 2)
        parts = _folded(row.text, room) if row.text.cell_length > room else [row.text]
        first, rest = first + " ", rest + " "
    else:
        parts = row.text.wrap(room) if row.text.cell_length > room else [row.text]
    lines: list[Line] = []
    at, plain = 0, row.text.plain
    for part in parts:
        # Wrapping drops the blanks at line ends.
        at = max(at, plain.find(part.plain, at))
        if not lines:
            skipped = len(first) - len(row.first)
            lines.append(Line(first + part, number, 0, skipped if row.kind == "code" else 0, row.kind))
        else:
            lines.append(Line(rest + part, number, len(row.first) + at, len(rest), row.kind))
        at += len(part)
    return lines


def _folded(text: Content, width: int) -> list[Content]:
    """Code breaks wherever the line is full, but never inside of what a person sees as one character."""
    plain, breaks, used = text.plain, [], 0
    starts = grapheme_starts(plain)
    for begin, end in pairwise(starts):
        cells = cell_len(plain[begin:end])
        if used + cells > width and begin:
            breaks.append(begin)
            used = 0
        used += cells
    return text.divide(breaks)


def _narrowed(margin: Content, width: int) -> Content:
    """Deep nesting in a narrow window leaves the text at least half of it."""
    return margin if margin.cell_length <= width // 2 else margin.truncate(width // 2)


# --- tables ---


def _table_rows(table: Table, width: int) -> list[Row]:
    room = width - max(table.first.cell_length, table.rest.cell_length)
    # Parts that were drawn stay as they are, whatever comes later: a wide cell moves only those after it.
    widths = column_widths([*(table.begun.rows if table.begun else ()), *table.rows], room)
    texts = _grid(table, widths) if widths is not None else _records(table)
    return [Row(text, table.rest if i else table.first, table.rest, "table") for i, text in enumerate(texts)]


def column_widths(rows: Sequence[Sequence[Content]], room: int) -> list[int] | None:
    """Cells of each column so that the table fits into ``room``; None where it cannot be read any more."""
    columns = max((len(row) for row in rows), default=0)
    wanted = [max((row[c].cell_length for row in rows if c < len(row)), default=0) for c in range(columns)]
    room -= len(COLUMN_GAP) * (columns - 1)
    widths = [max(1, width) for width in wanted]
    if sum(widths) <= room:
        return widths
    # What is narrow stays as it is; the wide columns share what is left.
    left, rest = room, sorted(range(columns), key=lambda c: widths[c])
    while rest:
        share = left // len(rest)
        column = rest[0]
        if widths[column] > share:
            if share < NARROWEST_COLUMN:
                return None
            for place, c in enumerate(rest):
                widths[c] = share + (place < left % len(rest))
            return widths
        left -= widths[column]
        rest.pop(0)
    return widths


def _grid(table: Table, widths: Sequence[int]) -> list[Content]:
    gap = Content.styled(COLUMN_GAP, LINE_STYLE)
    texts: list[Content] = []
    wraps = any(cell.cell_length > w for row in table.rows for cell, w in zip(row, widths, strict=False))
    for number, row in enumerate(table.rows):
        cells = [row[c] if c < len(row) else EMPTY for c in range(len(widths))]
        heads = number == 0 and table.begun is None
        if heads:
            cells = [cell.stylize("bold") for cell in cells]
        parts = [cell.wrap(width) for cell, width in zip(cells, widths, strict=True)]
        for level in range(max((len(part) for part in parts), default=0)):
            line = [
                _set(part[level] if level < len(part) else EMPTY, width, right)
                for part, width, right in zip(parts, widths, _right(table, len(widths)), strict=True)
            ]
            texts.append(gap.join(line))
        if heads or (wraps and number < len(table.rows) - 1):
            mark = "─" if heads else "╌"
            cross = "─┼─" if heads else "╌┼╌"
            texts.append(Content.styled(cross.join(mark * width for width in widths), LINE_STYLE))
    return texts


def _right(table: Table, columns: int) -> list[bool]:
    return [*table.right, *[False] * columns][:columns]


def _set(text: Content, width: int, right: bool) -> Content:
    text = text.rstrip()
    space = max(0, width - text.cell_length)
    return text.pad_left(space) if right else text.pad_right(space)


def _records(table: Table) -> list[Content]:
    """Each row as lines of its own: the heading of a column and what stands in it."""
    whole = (table.begun or table).rows
    heading = whole[0] if whole else ()
    texts: list[Content] = []
    for row in table.rows if table.begun is not None else table.rows[1:]:
        if texts or table.begun is not None:
            texts.append(EMPTY)
        for column, cell in enumerate(row):
            name = heading[column] if column < len(heading) else EMPTY
            texts.append(Content.assemble(name.stylize("bold"), ": " if name.plain else "", cell))
    if texts or table.begun is not None:
        return texts
    return [Content("  ").join(cell.stylize("bold") for cell in heading)]
