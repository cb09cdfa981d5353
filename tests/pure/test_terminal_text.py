"""No control sequence of a model or file reaches a terminal as such; the text around it does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.cli.terminal_text import TerminalText, terminal_text


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
