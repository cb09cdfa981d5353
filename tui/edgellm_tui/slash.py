"""Slash commands of the prompt: what is one, what is close to one, and what is a message after all."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from edgellm_tui.commands import SLASH, Command


@dataclass(frozen=True)
class SlashCommand:
    name: str
    argument: str

    @property
    def command(self) -> Command:
        return SLASH[self.name]


@dataclass(frozen=True)
class UnknownCommand:
    typed: str
    nearest: str | None


def parse_slash(text: str) -> SlashCommand | UnknownCommand | str:
    """A command, a near miss (which is not sent to the model), or the message to send.

    ``//`` at the start stands for a message that begins with one slash.
    """
    stripped = text.strip()
    if stripped.startswith("//"):
        return text.replace("//", "/", 1)
    if not stripped.startswith("/"):
        return text
    typed, _, argument = stripped[1:].partition(" ")
    if typed in SLASH:
        return SlashCommand(typed, argument.strip())
    near = difflib.get_close_matches(typed, SLASH, n=1, cutoff=0.5)
    return UnknownCommand(typed, near[0] if near else None)
