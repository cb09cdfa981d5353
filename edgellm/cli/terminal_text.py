"""Makes text safe for a terminal: what a model or file says can never move the cursor, set titles or hide
itself.
"""

from __future__ import annotations

_KEPT = {0x0A, 0x09}
# Marks, embeddings, overrides and isolates of direction reorder what stands around them, so that a text can
# read otherwise than it is; the last is an invisible space.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_PICTURES: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in _KEPT},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in _DIRECTIONS},
    **{code: "\ufffd" for code in range(0xD800, 0xE000)},
}
"""C0 controls and DEL become their pictures (ESC is shown as U+241B), C1 controls and
controls of direction a hexadecimal escape, half a surrogate pair U+FFFD. What follows such a control, the
body of an escape sequence, is then ordinary text."""


def terminal_text(text: str) -> str:
    """A whole text for a terminal: line feeds and tabs stay, CR LF becomes LF, other controls become
    visible.
    """
    return text.replace("\r\n", "\n").translate(_PICTURES)


class TerminalText:
    """``terminal_text`` for a stream: the pieces, joined, are what the whole would be."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """A piece made safe; a last CR waits for what follows it."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return terminal_text(text[: len(text) - len(self._held)])

    def finish(self) -> str:
        held, self._held = self._held, ""
        return terminal_text(held)
