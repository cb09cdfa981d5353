"""Text that is safe to show on a terminal, and the borders of what a person calls one character."""

from __future__ import annotations

import re
import unicodedata

_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)} | {0x7F: 0x2421}
# Bidirectional overrides and isolates reorder what stands around them, so a text can read otherwise than it
# is.
_HIDDEN = (*range(0x80, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_SHOWN: dict[int, int | str] = {
    **_CONTROL_PICTURES,
    **{code: f"\\u{code:04x}" for code in _HIDDEN},
    # Line ends that str.splitlines knows and Markdown does not.
    0x85: "\n",
    0x2028: "\n",
    0x2029: "\n",
    **{code: 0xFFFD for code in range(0xD800, 0xE000)},
}
_LINE_ENDS = re.compile(r"\r\n?")


class TerminalText:
    """Makes a stream of pieces safe: the joined results equal the safe form of the joined pieces.

    Control characters come out as visible pictures (ESC as ``␛``), C1 codes and bidirectional overrides as
    ``\\u009b``, every line end as ``\\n``. Tab and newline stay.
    """

    def __init__(self) -> None:
        self._carriage_return = False

    def feed(self, piece: str) -> str:
        """The safe form of ``piece``; a carriage return at its end waits for what follows it."""
        if self._carriage_return:
            piece = "\r" + piece
        self._carriage_return = piece.endswith("\r")
        if self._carriage_return:
            piece = piece[:-1]
        return _LINE_ENDS.sub("\n", piece).translate(_SHOWN)

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._carriage_return = self._carriage_return, False
        return "\n" if held else ""


def safe_text(text: str) -> str:
    """The safe form of a whole text (see TerminalText)."""
    stream = TerminalText()
    return stream.feed(text) + stream.flush()


def safe_line(text: str) -> str:
    """The safe form of a text that must stay on one line."""
    return " ".join(safe_text(text).split())


def _extends(character: str) -> bool:
    code = ord(character)
    return (
        unicodedata.category(character) in ("Mn", "Me", "Mc")
        or 0xFE00 <= code <= 0xFE0F  # variation selectors
        or 0x1F3FB <= code <= 0x1F3FF  # skin tones
        or 0xE0020 <= code <= 0xE007F  # tags in flags of regions
        or code == 0x200D
    )


def _is_regional(character: str) -> bool:
    return 0x1F1E6 <= ord(character) <= 0x1F1FF


def grapheme_starts(line: str) -> list[int]:
    """Indices at which a user-perceived character begins, and the length of the line at the end.

    A simplified form of Unicode Standard Annex 29: combining marks, variation selectors, skin tones and
    zero width
    joiner sequences belong to what they follow; regional indicators pair up. Hangul jamo are not joined.
    """
    starts: list[int] = []
    regional_run = 0
    for index, character in enumerate(line):
        joined = index > 0 and (_extends(character) or line[index - 1] == "\u200d")
        if _is_regional(character):
            joined = joined or regional_run % 2 == 1
            regional_run += 1
        else:
            regional_run = 0
        if not joined:
            starts.append(index)
    return [*starts, len(line)]
