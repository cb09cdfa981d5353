"""A chat as Markdown for people, or as JSON with everything that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from edgellm.contracts import StoredChat, StoredMessage

FORMAT = "edgellm-chat"
VERSION = 1


def as_markdown(chat: StoredChat, branch: Sequence[StoredMessage]) -> str:
    """Title, what answered and when, the system prompt, then each message under a heading. Texts are as they
    were written: Markdown in them stays Markdown."""
    answered = next((m.model for m in reversed(branch) if m.model), chat.model)
    facts = [f"{_minute(chat.created)}", *([answered] if answered else []), f"chat {chat.id[:8]}"]
    lines = [f"# {chat.title or 'Untitled chat'}", "", " · ".join(facts), ""]
    if chat.system:
        lines += ["## System", "", chat.system.rstrip(), ""]
    for stored in branch:
        lines += [_heading(stored), ""]
        if stored.message.reasoning:
            quoted = "\n".join(f"> {line}".rstrip() for line in stored.message.reasoning.strip().splitlines())
            lines += [quoted, ""]
        if text := text_of(stored):
            lines += [text.rstrip(), ""]
        if end := ending(stored):
            lines += [f"*({end})*", ""]
    return "\n".join(lines).rstrip() + "\n"


def as_object(chat: StoredChat, tree: Sequence[StoredMessage]) -> dict[str, Any]:
    """Everything, for programs: the tree by parent ids, all branches."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "chat": asdict(chat),
        "messages": [message_object(stored) for stored in tree],
    }


def message_object(stored: StoredMessage) -> dict[str, Any]:
    found = asdict(stored)
    message = found.pop("message")
    end = {"finish_reason": stored.finish_reason.value if stored.finish_reason else None}
    return {**message, **found, **end}


def text_of(stored: StoredMessage) -> str:
    """A message's text, its parts on lines of their own."""
    content = stored.message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)


def ending(stored: StoredMessage) -> str:
    """Why an answer is not whole, in words; empty when it is."""
    if stored.partial:
        return "unfinished: its end was not saved"
    reason = stored.finish_reason.value if stored.finish_reason else ""
    words = {"length": "cut: its limit or the context was full", "cancelled": "stopped"}
    return f"failed: {stored.error or 'unknown'}" if reason == "error" else words.get(reason, "")


def _heading(stored: StoredMessage) -> str:
    names = {"user": "You", "assistant": "Answer", "system": "System", "tool": "Tool"}
    name = names.get(stored.message.role, stored.message.role)
    return f"## {name} ({stored.model})" if stored.model else f"## {name}"


def _minute(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
