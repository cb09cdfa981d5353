"""Streamed Markdown equals Markdown rendered at once, and what is out of sight costs nothing."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.content import Span
from textual.geometry import Offset
from textual.selection import Selection
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from edgellm_tui.app import EdgeChat
from edgellm_tui.markdown_document import MarkdownDocument
from edgellm_tui.markdown_lines import layout
from edgellm_tui.markdown_rows import CHUNK_LINES, Item, Row, Table, chat_parser
from edgellm_tui.terminal_text import TerminalText, grapheme_starts, safe_line, safe_text
from edgellm_tui.widgets.folding import Fold
from edgellm_tui.widgets.streaming_markdown import MAX_STRIPS, StreamingMarkdown
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_screen, replies, send, shown, until
from tests.ui.test_chat_looks import ANSWER

CORPUS = {
    "mixed": ANSWER * 4,
    "deep": "1. one\n\n   ```py\n   x = 1\n   ```\n   - two\n     > three\n\n     four\n" * 12,
    "indented fence": ("  ~~~~ js\n  a\n b\n\tc\n    d\n  ~~~\n  ~~~~\n\ntext\n" * 9),
    "one open fence": "```python\n" + "def f(x):\n    return x + 1\n\n" * 60,
    "loose list": "".join(f"{n}. item {n}\n\n   with a second paragraph\n" for n in range(1, 40)),
    "tight list": "".join(f"- item {n}\n  - below it\n  - and once more\n" for n in range(30)),
    "all numbered one": "Counted:\n\n" + "1. another item\n" * 60,
    "long tables": (
        "| n | what | how much |\n|---|---|--:|\n"
        + "".join(f"| {n} | words of {n} | {n * n} |\n" for n in range(150))
        + "| a cell that is far longer than any other one in its column | **b** | c |\n\ntext\n\n"
    )
    * 2,
    "paragraphs": "Some words go on.\nAnd on.\n\n" * 120,
    "setext and rules": "Title\n=====\n\ntext\n\nOther\n---\n\n***\n\nmore text here\n" * 30,
    "quotes and html": "> quoted\nlazy\n\n<div>\n\nnot html\n\n</div>\n\n- a\n- b\n\n\n- c\n" * 15,
    "line ends": "one\r\n\r\ntwo\u2028three\x0cfour\x85five\r\n\r\n" * 60,
}


def document(text: str, pieces: list[int]) -> MarkdownDocument:
    """``text`` read in pieces of these lengths."""
    read, position = MarkdownDocument(), 0
    for length in pieces:
        read.feed(text[position : position + length])
        position += length
    read.feed(text[position:])
    read.finish()
    return read


def picture(read: MarkdownDocument, width: int = 60) -> list[tuple[str, list[Span], str]]:
    """Every line of the screen with its styles."""
    return [(line.text.plain, list(line.text.spans), line.kind) for line in layout(read.settled, width, 0)[0]]


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("seed", range(4))
def test_streamed_equals_read_at_once(name: str, seed: int) -> None:
    """H04: whatever the pieces, the final picture is that of the whole text."""
    text, chance = safe_text(CORPUS[name]), random.Random(seed)
    longest = (9, 40, 240, 2000)[seed]
    pieces = [chance.randint(1, longest) for _ in range(2 * len(text) // longest)]
    assert picture(document(text, pieces)) == picture(document(text, []))


def rows_of(items: Sequence[Item]) -> int:
    return sum(len(item.rows) if isinstance(item, Table) else 1 for item in items)


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_settled_stays_and_the_rest_is_short(name: str) -> None:
    """H04: a piece costs what the last block costs, and no line that was drawn as final changes later."""
    text, read = safe_text(CORPUS[name]), MarkdownDocument()
    longest = 0
    for position in range(0, len(text), 23):
        before = list(read.settled)
        read.feed(text[position : position + 23])
        assert all(old is new for old, new in zip(before, read.settled, strict=False))
        longest = max(longest, rows_of(read.open))
    assert longest <= CHUNK_LINES[1] + 3
    assert rows_of(read.settled) > 20


def test_a_long_table_is_one_table_to_whoever_reads_it() -> None:
    """H04: its parts share their columns and its heading, in a grid as in records."""
    rows = [(f"{n}", "some words " * (n % 5 == 0) + f"row {n}") for n in range(200)]
    text = "| number | what |\n|--:|---|\n" + "".join(f"| {n} | {what} |\n" for n, what in rows)
    read = document(text, [17] * (len(text) // 17))
    parts = [item for item in read.settled if isinstance(item, Table)]
    assert len(parts) == 4 and rows_of(parts) == 201
    lines = [line.text.plain for line in layout(read.settled, 60, 0)[0]]
    assert len({line.index("│") for line in lines if "│" in line}) == 1 and len(lines) == 202
    assert [line.strip() for line in lines].count("number │ what") == 1
    records = [line.text.plain for line in layout(read.settled, 10, 0)[0]]
    assert sum("number:" in line for line in records) == 200
    assert sum(not line.strip() for line in records) == 199


class AtOnce(App[None]):
    """Textual's own Markdown widget, which has nothing in common with ours but the parser."""

    def __init__(self) -> None:
        super().__init__()
        self.markdown = Markdown(parser_factory=chat_parser)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.markdown


@pytest.mark.parametrize("name", CORPUS)
def test_rows_say_what_the_markdown_widget_says(name: str) -> None:
    text = safe_text(CORPUS[name])[:600]
    read = document(text, [])
    words: list[str] = []
    numbers: list[str] = []
    for item in read.settled:
        if isinstance(item, Table):
            words += [cell.plain for row in item.rows for cell in row]
        elif item.kind == "text":
            words.append(item.text.plain)
            numbers += re.findall(r"\d+(?=\. $)", item.first.plain)
        elif item.kind == "code":
            words.append(item.text.plain)

    async def scenario() -> None:
        app = AtOnce()
        expected: list[str] = []
        counted: list[str] = []
        async with app.run_test(size=(100, 30)):
            await app.markdown.update(text.strip("\n"))
            for block in app.markdown.walk_children():
                if type(block).__name__ == "MarkdownBullet":
                    counted += re.findall(r"\d+", block.symbol)
                elif isinstance(block, MarkdownFence):
                    expected += [*block._token.info.split()[:1], *block.code.expandtabs(4).split("\n")]
                elif type(block).__name__ == "MarkdownTableContent":
                    expected += [cell.plain for row in [block.headers, *block.rows] for cell in row]
                elif isinstance(block, MarkdownBlock):
                    expected += block._content.plain.split("\n")
        assert [word for word in words if word.strip()] == [word for word in expected if word.strip()]
        assert numbers == counted

    asyncio.run(scenario())


@pytest.mark.parametrize("width", [1, 2, 7, 20, 41, 100])
def test_no_line_is_wider_than_the_screen_and_nothing_is_lost(width: int) -> None:
    """H11: whole characters in every line, whatever the width."""
    odd = (
        ANSWER + "\n\n> - deep **你好⏺️👨‍👩‍👧é** `" + "x" * 150 + "` end\n\n```\n" + "e\u0301你" * 60
        + "\n```\n\n| a | b | c |\n|--|--|--|\n" + "| 你好你好 | some longer words here | 3 |\n" * 3
    )  # fmt: skip
    read = document(odd, [])
    lines, rows = layout(read.settled, width, 0)
    assert all(line.text.cell_length <= max(width, 6) for line in lines)
    said = {item.text.plain for item in read.settled if isinstance(item, Row) and item.kind != "rule"}
    for row, text in enumerate(rows):
        shown = "".join(line.text.plain[line.margin :] for line in lines if line.row == row)
        if any(text.endswith(row_text) for row_text in said if row_text) and width >= 20:
            assert "".join(shown.split()) == "".join(text.split())


def test_link_definitions_and_html_are_shown_as_written() -> None:
    text = "See [one] and <b>two</b>.\n\n[one]: https://example.org\n"
    words = "\n".join(item.text.plain for item in document(text, []).settled if isinstance(item, Row))
    assert words == "See [one] and <b>two</b>.\n\n[one]: https://example.org"


def test_half_a_mark_waits_for_what_follows() -> None:
    """H04: neither a fence that is being opened or closed nor the first dash of a list is shown as text."""
    read, seen = MarkdownDocument(), set()
    for character in "Go:\n- one\n- two\n\n```py\nx = 1\n```\nend":
        read.feed(character)
        seen |= {item.text.plain for item in [*read.settled, *read.open] if isinstance(item, Row)}
    assert not seen & {"-", "`", "``", "```", "Go:-"}
    assert {"one", "two", "x = 1", "py"} <= seen


def test_a_long_answer_is_one_widget_and_comes_back() -> None:
    """H04: however long an answer is, it stays one widget that keeps a few screens full of drawn lines."""

    async def scenario() -> None:
        pieces = [f"Paragraph {n} with some words.\n\n" for n in range(600)]
        app = EdgeChat(FakeBackend(Script(pieces=pieces, burst=20, tokens_per_s=4000)))
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Go")
            await pilot.pause(0.3)
            reply = replies(app)[0]
            assert "Paragraph 599" in shown(app)
            assert len(list(reply.walk_children())) <= 3
            height = reply.outer_size.height
            assert height >= 1200
            await pilot.press("ctrl+home")
            await until(pilot, lambda: "Paragraph 0 with" in shown(app), "the beginning comes back")
            await until(pilot, lambda: "Paragraph 5 with" in shown(app), "all of the view")
            assert reply.outer_size.height == height
            body = reply.query_one(StreamingMarkdown)
            assert "Paragraph 500" in "".join(body.render_line(y).text for y in range(1199))
            assert len(body._strips) <= MAX_STRIPS
            await pilot.press("ctrl+end")
            await until(pilot, lambda: "Paragraph 599" in shown(app), "the end comes back")

    asyncio.run(scenario())


def test_a_new_width_measures_folded_text_again() -> None:
    async def scenario() -> None:
        pieces = ["word " * 60 + "\n\n"] * 80
        app = EdgeChat(FakeBackend(*[Script(pieces=pieces)] * 2))
        async with app.run_test(size=(100, 24)) as pilot:
            await send(pilot, app, "Go")
            await send(pilot, app, "Go on")
            await until(pilot, lambda: any(fold.folded for fold in chat_screen(app).query(Fold)), "folded")
            wide = replies(app)[0].outer_size.height
            await pilot.resize_terminal(50, 24)
            await until(pilot, lambda: replies(app)[0].outer_size.height > 1.7 * wide, "taller when narrow")
            await pilot.resize_terminal(100, 24)
            await until(pilot, lambda: replies(app)[0].outer_size.height == wide, "as before when wide")

    asyncio.run(scenario())


def test_selected_text_is_what_was_written() -> None:
    """What is copied has no line ends where lines were wrapped, and no bars of quotations before these."""
    text = "One " + "word " * 40 + "end.\n\n- a list\n\n```py\nx = 1\n```\n"

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=[text])))
        async with app.run_test(size=(50, 30)) as pilot:
            await send(pilot, app, "Go")
            body = replies(app)[0].query_one(StreamingMarkdown)
            plain = {s.style.bgcolor for y in range(len(body._lines)) for s in body.render_line(y) if s.style}
            # From the second line of the wrapped paragraph to the code.
            second = body._lines[1]
            begin, end = Offset(second.start, second.row), Offset(5, body._lines[-2].row)
            app.screen.selections = {body: Selection(begin, end)}
            await pilot.pause()
            copied = app.screen.get_selected_text() or ""
            assert copied == text[second.start :].split("\n")[0] + "\n\n• a list\n\npy\nx = 1"
            drawn = [body.render_line(y) for y in range(len(body._lines))]
            marked = " ".join(s.text for strip in drawn for s in strip if s.style.bgcolor not in plain)
            assert marked.split() == copied.split()

    asyncio.run(scenario())


def test_a_click_on_a_link_copies_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's link is never opened by itself."""
    copied: list[str] = []

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["See [the page](https://example.org/a?b=1).\n"])))
        async with app.run_test(size=(60, 20)) as pilot:
            await send(pilot, app, "Go")

            async def copy(text: str) -> None:
                copied.append(text)

            monkeypatch.setattr(chat_screen(app), "copy", copy)
            await pilot.click(StreamingMarkdown, offset=(6, 0))
            await until(pilot, lambda: copied, "the address")

    asyncio.run(scenario())
    assert copied == ["https://example.org/a?b=1"]


@pytest.mark.parametrize("seed", range(20))
def test_safe_text_is_the_same_in_any_pieces(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = "ab \t\n\r\x1b\x07\x00\x7f\x9b\x85\u2028\u202e\u2066é😊你"
    text = "".join(chance.choice(alphabet) for _ in range(200))
    stream, out, position = TerminalText(), "", 0
    while position < len(text):
        step = chance.randint(1, 5)
        out += stream.feed(text[position : position + step])
        position += step
    out += stream.flush()
    assert out == safe_text(text)
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in out if c not in "\n\t")
    assert not set(out) & set("\u202e\u2066\u2028")


def test_safe_text_shows_what_it_replaces_and_leaves_the_rest() -> None:
    assert safe_text("a\r\nb\rc\x1b[0m\x9b\u202e\ud800") == "a\nb\nc␛[0m\\u009b\\u202e\ufffd"
    plain = "Grüße, 你好 👨‍👩‍👧 \t[bold] نص"
    assert safe_text(plain) == plain
    assert safe_line("a\n b\x07\t c") == "a b␇ c"


@pytest.mark.parametrize(
    ("text", "count"),
    [("abc", 3), ("e\u0301", 1), ("👨‍👩‍👧é", 2), ("🇩🇪🇫🇷🇮", 3), ("⏺️", 1), ("", 0), ("\u0301a", 2), ("नि", 1)],
)
def test_graphemes(text: str, count: int) -> None:
    """H11: what counts as one character."""
    starts = grapheme_starts(text)
    assert starts[-1] == len(text)
    assert len(starts) - 1 == count
