"""Natural text for measurements, the same wherever Python is the same: its language reference and sources.

Both come with every Python (PSF licence). Random tokens would not do: they make acceptance of drafts, entropy
and cache reuse unlike anything that people ask.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from edgellm_models.errors import NotFoundError

Kind = Literal["prose", "code", "chat"]
_FIRST = ("types", "naming", "objects", "exceptions", "import", "specialnames", "compound", "class", "with")
"""Topics with much running text, which come before the others."""
_MODULES = ("argparse", "heapq", "statistics", "textwrap", "tempfile", "threading", "csv", "shutil")
_QUESTIONS = (
    "What does {topic} mean in Python?",
    "Can you explain {topic} to me? I have only used C so far.",
    "How do I use {topic}, and what should I watch out for?",
    "I saw {topic} in a program and did not understand it. What is it for?",
)


@cache
def natural_text(kind: Kind) -> str:
    """Some hundred thousand characters of a kind. NotFoundError where a system leaves out parts of Python."""
    if kind == "code":
        return _code()
    topics = _topics()
    if kind == "prose":
        ordered = [name for name in _FIRST if name in topics] + sorted(set(topics) - set(_FIRST))
        return "\n\n".join(topics[name].strip() for name in ordered)
    return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in natural_chat(len(topics)))


def natural_chat(turns: int) -> list[tuple[str, str]]:
    """(role, text) of ``turns`` questions with their answers, user and assistant in turn."""
    messages = []
    for index, (name, text) in enumerate(sorted(_topics().items())[:turns]):
        paragraphs = [p.strip() for p in text.strip().split("\n\n") if len(p.strip()) > 80]
        if paragraphs:  # some topics are a table and no more
            topic = name.replace("-", " ")
            messages.append(("user", _QUESTIONS[index % len(_QUESTIONS)].format(topic=topic)))
            messages.append(("assistant", " ".join(" ".join(paragraphs[:2]).split())))
    return messages


def natural_ids(
    encode: Callable[[str], Sequence[int]], kind: Kind, count: int, number: int = 0
) -> tuple[int, ...]:
    """A prompt of exactly ``count`` tokens; prompts of other ``number`` begin elsewhere in the text, so that
    no cache knows them. ``encode`` may add BOS.
    """
    text = natural_text(kind)
    start = (number * 7919) % (len(text) // 2)
    start = text.find(" ", start) + 1 if number else 0  # a word's begin
    length = 8 * count + 64
    while True:
        ids = encode((text[start:] + "\n\n" + text[:start])[:length])
        if len(ids) > count or length > 64 * count + 64:
            break
        length *= 2
    while len(ids) < count:
        ids = [*ids, *encode(text)[1:]]
    return tuple(ids[:count])


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise NotFoundError(
            "this Python comes without pydoc_data, whose text is measured with; install the whole of it "
            "(Debian and Ubuntu: libpython3-stdlib)"
        ) from None
    found: dict[str, str] = topics
    return found


def _code() -> str:
    parts = []
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
            parts.append(Path(spec.origin).read_text(encoding="utf-8"))
    if not parts:
        raise NotFoundError("this Python comes without the sources of its library, which are measured with")
    return "\n\n".join(parts)
