"""Rows of the history's tables to the dataclasses of contracts and back; bad values become defaults."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from edgellm.contracts import (
    ChatMessage,
    ContentPart,
    DraftCounts,
    Finished,
    FinishReason,
    Notice,
    RequestTimings,
    SamplingParams,
    StoredChat,
    StoredMessage,
    Usage,
)

CHAT_COLUMNS = (
    "chat.id, title, chat.created, updated, system, chat.model, params, pinned, head_id, deleted, "
    "(SELECT count(*) FROM message WHERE message.chat_id = chat.id) AS num_messages"
)
MESSAGE_COLUMNS = (
    "m.*, (SELECT count(*) FROM message s WHERE s.chat_id = m.chat_id AND s.parent_id IS m.parent_id "
    "AND s.number <= m.number) AS sibling, (SELECT count(*) FROM message s WHERE s.chat_id = m.chat_id "
    "AND s.parent_id IS m.parent_id) AS num_siblings"
)
"""Of a table called ``m``."""


def stored_chat(row: sqlite3.Row) -> StoredChat:
    return StoredChat(
        id=row["id"],
        title=row["title"],
        created=row["created"],
        updated=row["updated"],
        system=row["system"],
        model=row["model"],
        params=_object(row["params"]),
        pinned=bool(row["pinned"]),
        head_id=row["head_id"],
        num_messages=row["num_messages"],
        deleted=row["deleted"],
    )


def stored_message(row: sqlite3.Row) -> StoredMessage:
    counts = [row[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
    return StoredMessage(
        id=row["id"],
        chat_id=row["chat_id"],
        parent_id=row["parent_id"],
        message=_chat_message(row),
        created=row["created"],
        partial=bool(row["partial"]),
        finish_reason=_reason(row["finish_reason"]),
        model=row["model"],
        sampling=_object(row["sampling"]),
        usage=None if None in counts else Usage(*counts),
        timings=_built(RequestTimings, row["timings"]),
        draft=_built(DraftCounts, row["draft"]),
        notices=tuple(
            Notice(str(found[0]), str(found[1]))
            for found in _list(row["notices"])
            if isinstance(found, list) and len(found) == 2
        ),
        error=row["error"],
        sibling=row["sibling"],
        num_siblings=row["num_siblings"],
    )


def message_values(message: ChatMessage) -> dict[str, Any]:
    """The columns that say what a message is."""
    extra: dict[str, Any] = {}
    text = message.content or ""
    if not isinstance(text, str):
        extra["parts"] = [[part.type, clean(part.text)] for part in text]
        text = "\n".join(part.text for part in text if part.text)
    if message.tool_calls:
        extra["tool_calls"] = [dict(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            extra[name] = getattr(message, name)
    return {
        "role": clean(message.role),
        "text": clean(text),
        "reasoning": clean(message.reasoning or ""),
        "extra": as_json(extra),
    }


def end_values(finished: Finished, notices: Sequence[Notice]) -> dict[str, Any]:
    """The columns that say how an answer ended."""
    return {
        "partial": 0,
        "finish_reason": finished.reason.value,
        "prompt_tokens": finished.usage.prompt_tokens,
        "cached_tokens": finished.usage.cached_tokens,
        "completion_tokens": finished.usage.completion_tokens,
        "timings": as_json(asdict(finished.timings)),
        "draft": as_json(asdict(finished.draft)),
        "notices": notices_json(notices),
        "error": None if finished.error is None else clean(finished.error),
    }


def notices_json(notices: Sequence[Notice]) -> str:
    return as_json([[notice.kind, notice.detail] for notice in notices])


def sampling_json(sampling: SamplingParams, seed: int | None = None) -> str:
    values = asdict(sampling)
    if seed is not None:
        values["seed"] = seed
    return as_json(values)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)


def clean(text: str) -> str:
    """What a database can hold: halves of surrogate pairs, which JSON of a server may bring, become U+FFFD.
    Control characters stay as they are; whoever shows the text sees to them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _chat_message(row: sqlite3.Row) -> ChatMessage:
    extra = _object(row["extra"])
    parts = extra.get("parts")
    content: str | tuple[ContentPart, ...] = row["text"]
    if isinstance(parts, list) and all(isinstance(part, list) and len(part) == 2 for part in parts):
        content = tuple(ContentPart(str(kind), str(text)) for kind, text in parts)
    calls = extra.get("tool_calls")
    names = {name: extra[name] for name in ("tool_call_id", "name") if isinstance(extra.get(name), str)}
    return ChatMessage(
        role=row["role"],
        content=content,
        reasoning=row["reasoning"] or None,
        tool_calls=tuple(call for call in calls if isinstance(call, dict)) if isinstance(calls, list) else (),
        **names,
    )


def _reason(text: str | None) -> FinishReason | None:
    try:
        return None if text is None else FinishReason(text)
    except ValueError:
        return FinishReason.STOP  # a reason of a later version: it ended, and without an error


def _object(text: str | None) -> Mapping[str, Any]:
    found = _parsed(text)
    return found if isinstance(found, dict) else {}


def _list(text: str | None) -> list[Any]:
    found = _parsed(text)
    return found if isinstance(found, list) else []


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _built(kind: type[Any], text: str | None) -> Any:
    """A dataclass from those of the stored numbers that have a field of their name."""
    found = _parsed(text)
    if not isinstance(found, dict):
        return None
    names = {field.name for field in fields(kind)}
    numbers = {
        name: value
        for name, value in found.items()
        if name in names and isinstance(value, int | float) and not isinstance(value, bool)
    }
    try:
        return kind(**numbers)
    except TypeError:
        return None
