"""Splits what a model thinks from what it says: text between <think> and </think> at an answer's start."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def thinks(template: str) -> bool:
    """Whether a chat template belongs to a model that writes its reasoning between these tags."""
    return OPEN in template or CLOSE in template


def begins_inside(prompt: str) -> bool:
    """The generation prompt has opened the reasoning already, so that the answer begins in it."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Follows one answer's text. Only what may still become a tag is held back.

    A block counts only at the answer's start, behind white space at most: later tags are the text of an
    answer about them. The white space around the block belongs to neither part.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._trim = inside

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that became certain."""
        reasoning, content = "", ""
        self._held += text
        while self._held:
            if self._state == "start":
                rest = self._held.lstrip()
                if rest.startswith(OPEN):
                    self._held, self._state, self._trim = rest[len(OPEN) :], "reasoning", True
                elif OPEN.startswith(rest):  # white space, or the beginning of the tag
                    break
                else:
                    self._state = "plain"
            elif self._state == "reasoning":
                place = self._held.find(CLOSE)
                if place < 0:
                    keep = held_length(self._held, CLOSE)
                    # White space before the closing tag is not shown; only the tag says whether it is that.
                    body = self._held[: len(self._held) - keep].rstrip()
                    reasoning += self._trimmed(body)
                    self._held = self._held[len(body) :]
                    break
                reasoning += self._trimmed(self._held[:place].rstrip())
                self._held, self._state, self._trim = self._held[place + len(CLOSE) :], "content", True
            else:
                content += self._trimmed(self._held) if self._state == "content" else self._held
                self._held = ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held for a tag that never came."""
        held, self._held = self._held, ""
        return (self._trimmed(held.rstrip()), "") if self.is_reasoning else ("", held)

    def _trimmed(self, text: str) -> str:
        """The text without the white space that follows a tag."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def held_length(text: str, tag: str) -> int:
    """Length of the longest end of the text with which the tag may begin."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return length
    return 0
