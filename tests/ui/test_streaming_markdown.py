"""Streamed Markdown equals Markdown rendered at once, and what is out of sight costs nothing."""

from __future__ import annotations

import asyncio
import random

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

from edgellm_tui.app import EdgeChat
from edgellm_tui.terminal_text import TerminalText, grapheme_starts, safe_line, safe_text
from edgellm_tui.widgets.folding import Fold
from edgellm_tui.widgets.streaming_markdown import SEGMENT_CHARACTERS, StreamingMarkdown, chat_parser
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_screen, replies, send, shown, until
from tests.ui.test_chat_looks import ANSWER

CORPUS = {
    "mixed": ANSWER * 4,
    "one open fence": "```python\n" + "def f(x):\n    return x + 1\n\n" * 60,
    "loose list": "".join(f"{n}. item {n}\n\n   with a second paragraph\n" for n in range(1, 40)),
    "tight list": "".join(f"- item {n}\n  - below it\n  - and once more\n" for n in range(30)),
    "all numbered one": "Counted:\n\n" + "1. another item\n" * 60,
    "paragraphs": "Some words go on.\nAnd on.\n\n" * 120,
    "setext and rules": "Title\n=====\n\ntext\n\nOther\n---\n\n***\n\nmore text here\n" * 30,
    "quotes and html": "> quoted\nlazy\n\n<div>\n\nnot html\n\n</div>\n\n- a\n- b\n\n\n- c\n" * 15,
    "line ends": "one\r\n\r\ntwo\u2028three\x0cfour\x85five\r\n\r\n" * 60,
}


class Both(App[None]):
    """One document streamed, one rendered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.streamed = StreamingMarkdown()
        self.at_once = Markdown(parser_factory=chat_parser)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.streamed
            yield self.at_once


def blocks(root: StreamingMarkdown | Markdown) -> list[tuple[str, str]]:
    """The tree of blocks in document order, as kind and text."""
    found = []
    for block in root.walk_children():
        kind = type(block).__name__
        if kind == "MarkdownBullet":
            found.append((kind, block.symbol.strip()))
        # A list may go on in the next segment as a list of its own.
        elif isinstance(block, MarkdownBlock) and kind not in ("MarkdownBulletList", "MarkdownOrderedList"):
            found.append((kind, getattr(block, "code", "") or block._content.plain))
    return found


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("seed", [0, 1])
def test_streamed_equals_rendered_at_once(name: str, seed: int) -> None:
    """H04: whatever the pieces, the final picture is that of the whole text."""
    text, chance = CORPUS[name], random.Random(seed)

    async def scenario() -> None:
        app = Both()
        async with app.run_test(size=(100, 30)) as pilot:
            await app.at_once.update(safe_text(text).strip("\n"))
            position = 0
            while position < len(text):
                step = chance.randint(1, 240)
                await app.streamed.append(text[position : position + step])
                position += step
            await app.streamed.finish()
            await pilot.pause()
            assert blocks(app.streamed) == blocks(app.at_once)
            if name != "one open fence":
                assert len(app.streamed.closed) >= len(text) // (2 * SEGMENT_CHARACTERS)

    asyncio.run(scenario())


def test_text_out_of_sight_has_no_widgets_and_comes_back() -> None:
    """H04: a long answer keeps only the blocks near the view; scrolling back shows the old text again."""

    async def scenario() -> None:
        pieces = [f"Paragraph {n} with some words.\n\n" for n in range(600)]
        app = EdgeChat(FakeBackend(Script(pieces=pieces, burst=20, tokens_per_s=4000)))
        async with app.run_test(size=(80, 24)) as pilot:
            await send(pilot, app, "Go")
            await pilot.pause(0.3)
            reply = replies(app)[0]
            assert "Paragraph 599" in shown(app)
            assert len(list(reply.walk_children(MarkdownBlock))) < 250
            height = reply.outer_size.height
            assert height > 1200
            await pilot.press("ctrl+home")
            await until(pilot, lambda: "Paragraph 0 with" in shown(app), "the beginning comes back")
            await until(pilot, lambda: "Paragraph 5 with" in shown(app), "all of the view")
            assert reply.outer_size.height == height
            await pilot.press("ctrl+end")
            await until(pilot, lambda: "Paragraph 599" in shown(app), "the end comes back")

    asyncio.run(scenario())


def test_a_new_width_measures_folded_text_again() -> None:
    async def scenario() -> None:
        pieces = ["word " * 60 + "\n\n"] * 80
        app = EdgeChat(FakeBackend(Script(pieces=pieces)))
        async with app.run_test(size=(100, 24)) as pilot:
            await send(pilot, app, "Go")
            await pilot.pause(0.3)
            assert any(fold.folded for fold in chat_screen(app).query(Fold))
            wide = replies(app)[0].outer_size.height
            await pilot.resize_terminal(50, 24)
            await until(pilot, lambda: replies(app)[0].outer_size.height > 1.7 * wide, "taller when narrow")
            await pilot.resize_terminal(100, 24)
            await until(pilot, lambda: replies(app)[0].outer_size.height == wide, "as before when wide")

    asyncio.run(scenario())


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
