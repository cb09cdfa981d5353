"""Text of quality measurements: what calibration sees, and prose, code and chat that it does not."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.bench.natural_text import natural_chat

if TYPE_CHECKING:
    from edgellm_models.tokenizer.chat_template import ChatTemplates

Encode = Callable[[str], Sequence[int]]


def _prose(half: int) -> list[str]:
    """Every second topic of Python's language reference."""
    from pydoc_data.topics import topics

    return [text.strip() for _, text in sorted(topics.items())[half::2]]


def _code(half: int) -> list[str]:
    """Every second module of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.glob("*.py") if 8_000 < path.stat().st_size < 60_000)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths[half::2]]


def _chat(half: int) -> list[tuple[str, str]]:
    """Questions with answers; those of half 1 have answers that occur nowhere in the prose of half 0."""
    seen = " ".join(" ".join(_prose(0)).split())
    messages = natural_chat(10_000)
    pairs = [(q[1], a[1]) for q, a in zip(messages[::2], messages[1::2], strict=True)]
    return [pair for pair in pairs if (pair[1][:200] in seen) == (half == 0)]


def calibration_text(encode: Encode, tokens: int) -> str:
    """About ``tokens`` tokens: prose, code and chat in turn, a third of the text each where there is so much.

    Plain text, so that llama-imatrix and edgellm read the same.
    """
    chat = [f"User: {question}\n\nAssistant: {answer}" for question, answer in _chat(0)]
    turns = zip_longest(_pages(_prose(0)), _pages(_code(0)), _pages(chat))
    pages = [page for turn in turns for page in turn if page is not None]
    text, counted = [], 0
    for page in pages:
        ids = encode(page)
        if counted + len(ids) > tokens:
            page = page[: len(page) * (tokens - counted) // len(ids)]
        text.append(page)
        counted += len(ids)
        if counted >= tokens:
            break
    return "\n\n".join(text) + "\n"


def prose_text(encode: Encode, tokens: int) -> str:
    """About ``tokens`` tokens of the same prose alone."""
    text = "\n\n".join(_prose(0))
    ids = encode(text)
    return text[: len(text) * tokens // max(tokens, len(ids))] + "\n"


def held_out_windows(
    encode: Encode, templates: ChatTemplates | None, scored: int, window: int, unscored: int
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Windows of token ids that together score at least ``scored`` tokens, and the kind of each.

    Kinds in turn while each has text left. Chat goes through the model's own template.
    """
    streams = {"prose": _joined(encode, _prose(1)), "code": _joined(encode, _code(1))}
    chat = []
    for question, answer in _chat(1):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if templates is None:
            chat.append(f"User: {question}\n\nAssistant: {answer}\n\n")
        else:
            chat.append(templates.render(messages, add_generation_prompt=False))
    streams["chat"] = tuple(encode("".join(chat)))
    windows: list[tuple[int, ...]] = []
    kinds: list[str] = []
    place = 0
    while len(windows) * (window - unscored) < scored:
        before = len(windows)
        for kind, ids in streams.items():
            part = ids[place : place + window]
            if len(part) == window and len(windows) * (window - unscored) < scored:
                windows.append(tuple(part))
                kinds.append(kind)
        place += window
        if len(windows) == before:
            raise SystemExit(f"there is text for {len(windows)} windows of {window} tokens only")
    return windows, kinds


def _pages(texts: Sequence[str], size: int = 4000) -> list[str]:
    joined = "\n\n".join(texts)
    return [joined[start : start + size] for start in range(0, len(joined), size)]


def _joined(encode: Encode, texts: Sequence[str]) -> tuple[int, ...]:
    """Ids of the first few hundred thousand characters: enough for any run, encoded in a second."""
    return tuple(encode("\n\n".join(texts)[:400_000]))
