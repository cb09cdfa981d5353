"""No control sequence of a model or file reaches a terminal as such; the text around it does."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.cli.terminal_text import TerminalText, terminal_text
from edgellm_tui.terminal_text import safe_text

DIRECTIONS = [*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"]
ALIKE = {
    "": "",
    "plain é 你好 😊 \u200d \u00a0 עברית نص\n\t": "plain é 你好 😊 \u200d \u00a0 עברית نص\n\t",
    "a\r\nb": "a\nb",
    "a\x1b[31mb\x07\x00\x7f": "a\u241b[31mb\u2407\u2400\u2421",
    "\ufeffa\ud800\udfff": "\\ufeffa\ufffd\ufffd",
    **{f"a{char}b": f"a\\u{ord(char):04x}b" for char in DIRECTIONS},
}
"""What the commands and the screen, which may not import each other, show for a text."""


@pytest.mark.parametrize("shown", [terminal_text, safe_text], ids=["commands", "screen"])
@pytest.mark.parametrize("text", ALIKE, ids=ascii)
def test_commands_and_screen_show_the_same(shown: Callable[[str], str], text: str) -> None:
    """A text that reads otherwise than it is (file names, code in an answer) is seen to do so."""
    assert shown(text) == ALIKE[text]


@pytest.mark.parametrize("shown", [terminal_text, safe_text], ids=["commands", "screen"])
def test_no_character_that_moves_or_reorders_text_is_left(shown: Callable[[str], str]) -> None:
    """Every character that Unicode calls a control, a surrogate or a formatting of direction."""
    for code in range(0x110000):
        char = chr(code)
        reorders = unicodedata.bidirectional(char) in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
        if char not in "\n\t" and (unicodedata.category(char) in ("Cc", "Cs") or reorders):
            assert char not in shown(char)


def is_safe(text: str) -> bool:
    return not any((ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F for c in text)


def test_sequences_become_visible() -> None:
    assert terminal_text("a\x1b[31mred\x1b[0m") == "a\u241b[31mred\u241b[0m"
    assert terminal_text("\x1b]0;title\x07x") == "\u241b]0;title\u2407x"
    assert terminal_text("\x9b2J\x90q\x9c") == "\\x9b2J\\x90q\\x9c"
    assert terminal_text("a\r\nb\rc\x08\x7f\x00") == "a\nb\u240dc\u2408\u2421\u2400"


def test_ordinary_text_stays() -> None:
    text = "Zeile\n\tTab é 你好 😊 \u200d \u00a0 עברית"
    assert terminal_text(text) == text


@given(st.lists(st.text(st.characters(max_codepoint=0xFF), max_size=5), max_size=8))
def test_pieces_are_as_the_whole(pieces: list[str]) -> None:
    stream = TerminalText()
    shown = "".join(stream.push(piece) for piece in pieces) + stream.finish()
    assert shown == terminal_text("".join(pieces))
    assert is_safe(shown)
