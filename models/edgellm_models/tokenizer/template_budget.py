"""What one rendering of a chat template may use: CPU time, characters that it makes, items that it builds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jinja2.utils

from edgellm_models.errors import BadInputError

MAX_SECONDS = 5.0
"""CPU time of one rendering; a conversation of thousands of messages takes under one."""
MAX_OUTPUT_CHARS = 16_000_000
MAX_MADE_CHARS = 64_000_000
"""Characters of all strings that one rendering makes on the way, beside what the messages bring."""
MAX_UNFOLDED = 1_000_000
"""Items and characters of one list or dict that a template builds, shared parts counted each time."""


class TemplateLimitError(Exception):
    """A template took more than it may; never caught by the template itself."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, seconds: float = MAX_SECONDS, input_chars: int = 0) -> None:
        self._deadline = time.thread_time() + seconds
        self._seconds = seconds
        # A template may touch each message a few dozen times (strip, split, join ...).
        self._chars = MAX_MADE_CHARS + 32 * input_chars
        self._output = MAX_OUTPUT_CHARS + 2 * input_chars
        self._unfolded = MAX_UNFOLDED + 4 * input_chars

    def tick(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} seconds")

    def spend(self, chars: int) -> None:
        """Counts characters that are about to be made or were made."""
        self._chars -= chars
        if self._chars < 0:
            raise TemplateLimitError(f"it builds more than {MAX_MADE_CHARS} characters of text")
        self.tick()

    def emit(self, chars: int) -> None:
        self._output -= chars
        if self._output < 0:
            raise TemplateLimitError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
        self.spend(chars)

    def make_items(self, count: int) -> None:
        """Refuses a list that is about to be made and would be too long."""
        if count > self._unfolded:
            raise TemplateLimitError(f"it builds a value of more than {MAX_UNFOLDED} items")

    def unfolded(self, value: Any) -> int:
        """Items and characters of a value as printing it would visit them; stops at a limit."""
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                stack.extend(item)
            elif isinstance(item, jinja2.utils.Namespace):
                stack.append(item._Namespace__attrs)
            total += 1
            if total + len(stack) > self._unfolded:
                raise TemplateLimitError(f"it builds a value of more than {MAX_UNFOLDED} items")
        self.spend(total)
        return total


def input_size(value: Any) -> int:
    """Characters and items of what the caller gives; nested 100 deep at most."""

    def size(item: Any, depth: int) -> int:
        if depth > 100:
            raise BadInputError("the messages or tools are nested more than 100 deep")
        if isinstance(item, str):
            return 1 + len(item)
        if isinstance(item, Mapping):
            return 1 + sum(size(key, depth + 1) + size(entry, depth + 1) for key, entry in item.items())
        if isinstance(item, list | tuple):
            return 1 + sum(size(entry, depth + 1) for entry in item)
        return 1

    return size(value, 0)
