"""Finds stop strings in streamed text and holds back only what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one answer for its stop strings, across every border between pieces.

    The string that is complete first ends the answer; of several that end at the same character the longest
    does, so that no part of one is shown. What is returned over all calls does not depend on how the text was
    cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the answer."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to find."""
        return bool(self._stop)

    def push(self, text: str) -> str:
        """Adds text and returns what is certain: never a part of a stop string, nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return buffer[:start]
        keep = self._held_length(buffer)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """Start and text of the match that ends first, the longest of those."""
        best: tuple[int, int, str] | None = None  # (end, start, string): the smallest wins
        for string in self._stop:
            start = buffer.find(string)
            if start >= 0:
                candidate = (start + len(string), start, string)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of the buffer with which a stop string may begin."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(len(string) > length and string.startswith(end) for string in self._stop):
                return length
        return 0
