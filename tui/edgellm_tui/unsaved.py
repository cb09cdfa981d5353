"""Chats that live as long as the screen: a ChatStore in memory, for --no-save and where no store opens."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from edgellm.contracts import (
    ChatMessage,
    Finished,
    FinishReason,
    SamplingParams,
    SearchHit,
    StoredChat,
    StoredMessage,
)
from edgellm_models.errors import BadInputError, NotFoundError, Notice

TITLE_CHARACTERS = 60


def text_of(message: ChatMessage) -> str:
    """The text of a message, its parts joined."""
    if isinstance(message.content, tuple):
        return "".join(part.text for part in message.content)
    return message.content or ""


class MemoryStore:
    """A contracts.ChatStore that keeps everything in this process. For one thread."""

    def __init__(self) -> None:
        self._chats: dict[str, StoredChat] = {}
        self._messages: dict[str, StoredMessage] = {}
        self._left_at: dict[str | None, str] = {}
        """Per parent, the child through which its branch was shown last."""

    @property
    def notices(self) -> tuple[Notice, ...]:
        return ()

    # --- chats ---

    def create_chat(
        self, *, title: str = "", system: str = "", model: str = "", params: Mapping[str, Any] | None = None
    ) -> StoredChat:
        now = time.time()
        chat = StoredChat(uuid.uuid4().hex, title, now, now, system, model, dict(params or {}))
        self._chats[chat.id] = chat
        return chat

    def get_chat(self, chat_id: str) -> StoredChat:
        if chat_id not in self._chats:
            raise NotFoundError(f"there is no chat {chat_id}")
        chat = self._chats[chat_id]
        return replace(chat, num_messages=sum(m.chat_id == chat_id for m in self._messages.values()))

    def find_chat(self, prefix: str, *, deleted: bool = False) -> StoredChat:
        found = [
            c for c in self._chats if c.startswith(prefix) and (self._chats[c].deleted is None) != deleted
        ]
        if not found:
            raise NotFoundError(f"no chat's id begins with {prefix}")
        if len(found) > 1:
            raise BadInputError(f"the ids of {len(found)} chats begin with {prefix}")
        return self.get_chat(found[0])

    def list_chats(self, *, limit: int = 100, offset: int = 0, deleted: bool = False) -> Sequence[StoredChat]:
        chats = [self.get_chat(c) for c in self._chats if (self._chats[c].deleted is None) != deleted]
        chats.sort(key=lambda chat: (not chat.pinned, -chat.updated))
        return chats[offset : offset + limit]

    def update_chat(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
    ) -> StoredChat:
        given = {"title": title, "system": system, "model": model, "params": params, "pinned": pinned}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._chats[chat_id] = replace(self.get_chat(chat_id), **changes)
        return self.get_chat(chat_id)

    def delete_chat(self, chat_id: str) -> None:
        self._chats[chat_id] = replace(self.get_chat(chat_id), deleted=time.time())

    def restore_chat(self, chat_id: str) -> None:
        self._chats[chat_id] = replace(self.get_chat(chat_id), deleted=None)

    def purge_chat(self, chat_id: str) -> None:
        self.get_chat(chat_id)
        del self._chats[chat_id]
        self._messages = {m.id: m for m in self._messages.values() if m.chat_id != chat_id}

    # --- messages ---

    def _message(self, message_id: str) -> StoredMessage:
        if message_id not in self._messages:
            raise NotFoundError(f"there is no message {message_id}")
        return self._messages[message_id]

    def _with_place(self, message: StoredMessage) -> StoredMessage:
        family = self._family(message)
        place = [m.id for m in family].index(message.id) + 1
        return replace(message, sibling=place, num_siblings=len(family))

    def _family(self, message: StoredMessage) -> list[StoredMessage]:
        return [
            m
            for m in self._messages.values()
            if m.chat_id == message.chat_id and m.parent_id == message.parent_id
        ]

    def branch(self, chat_id: str, message_id: str | None = None) -> Sequence[StoredMessage]:
        at = message_id or self.get_chat(chat_id).head_id
        path: list[StoredMessage] = []
        while at is not None:
            message = self._message(at)
            path.append(self._with_place(message))
            at = message.parent_id
        return path[::-1]

    def conversation(self, chat_id: str, message_id: str | None = None) -> list[ChatMessage]:
        system = self.get_chat(chat_id).system
        messages = [ChatMessage("system", system)] if system else []
        return messages + [m.message for m in self.branch(chat_id, message_id) if text_of(m.message)]

    def siblings(self, message_id: str) -> Sequence[StoredMessage]:
        return [self._with_place(m) for m in self._family(self._message(message_id))]

    def tree(self, chat_id: str) -> Sequence[StoredMessage]:
        return [self._with_place(m) for m in self._messages.values() if m.chat_id == chat_id]

    def add_message(self, chat_id: str, message: ChatMessage, *, parent_id: str | None) -> StoredMessage:
        chat = self.get_chat(chat_id)
        stored = StoredMessage(uuid.uuid4().hex, chat_id, parent_id, message, time.time())
        self._messages[stored.id] = stored
        self._set_head(chat_id, stored.id)
        if not chat.title and message.role == "user":
            title = " ".join(text_of(message).split())
            short = title if len(title) <= TITLE_CHARACTERS else f"{title[: TITLE_CHARACTERS - 1]}…"
            self._chats[chat_id] = replace(self._chats[chat_id], title=short)
        return self._with_place(stored)

    def begin_answer(
        self, chat_id: str, *, parent_id: str | None, model: str, sampling: SamplingParams
    ) -> _MemoryWriter:
        self.get_chat(chat_id)
        return _MemoryWriter(self, chat_id, parent_id, model, sampling)

    def _set_head(self, chat_id: str, message_id: str | None) -> None:
        self._chats[chat_id] = replace(self._chats[chat_id], head_id=message_id, updated=time.time())
        while message_id is not None:
            message = self._messages[message_id]
            self._left_at[message.parent_id or f"root of {chat_id}"] = message_id
            message_id = message.parent_id

    def select(self, message_id: str) -> StoredChat:
        message = self._message(message_id)
        at = message.id
        while at in self._left_at:
            at = self._left_at[at]
        self._set_head(message.chat_id, at)
        return self.get_chat(message.chat_id)

    def set_head(self, chat_id: str, message_id: str | None) -> StoredChat:
        self.get_chat(chat_id)
        if message_id is not None:
            self._message(message_id)
        self._set_head(chat_id, message_id)
        return self.get_chat(chat_id)

    # --- finding and handing out ---

    def search(self, text: str, *, limit: int = 50) -> Sequence[SearchHit]:
        words = text.lower().replace('"', " ").split()
        if not words:
            return []
        hits: list[SearchHit] = []
        for chat in self.list_chats(limit=len(self._chats)):
            places: list[tuple[str | None, str, str]] = [(None, "title", chat.title)]
            places += [(m.id, m.message.role, text_of(m.message)) for m in self.tree(chat.id)]
            for message_id, role, whole in places:
                if all(word in whole.lower() for word in words):
                    hits.append(SearchHit(chat, message_id, role, *_excerpt(whole, words)))
                    break
        return hits[:limit]

    def export(self, chat_id: str, form: str) -> str:
        chat = self.get_chat(chat_id)
        if form == "markdown":
            parts = [f"# {chat.title or 'Untitled'}"]
            if chat.system:
                parts.append(f"**System:** {chat.system}")
            for message in self.branch(chat_id):
                name = {"user": "You", "assistant": message.model or "Assistant"}.get(message.message.role)
                parts.append(f"## {name or message.message.role}\n\n{text_of(message.message)}")
            return "\n\n".join(parts) + "\n"
        if form != "json":
            raise BadInputError(f"a chat is exported as markdown or json, not {form}")
        messages = []
        for message in self.tree(chat_id):
            data = asdict(message)
            data["finish_reason"] = message.finish_reason.value if message.finish_reason else None
            messages.append(data)
        return json.dumps({"chat": asdict(chat), "messages": messages}, ensure_ascii=False, indent=2) + "\n"

    def close(self) -> None:
        pass


def _excerpt(text: str, words: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    line = " ".join(text.split())
    start = max(0, line.lower().find(words[0]) - 30)
    piece = line[start : start + 120]
    marks = []
    for word in words:
        at = piece.lower().find(word)
        if at >= 0:
            marks.append((at, at + len(word)))
    return piece, tuple(sorted(marks))


class _MemoryWriter:
    """A contracts.AnswerWriter."""

    def __init__(
        self, store: MemoryStore, chat_id: str, parent_id: str | None, model: str, sampling: SamplingParams
    ) -> None:
        self._store = store
        said = {name: value for name, value in asdict(sampling).items() if value not in (None, (), {})}
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._message = StoredMessage(
            uuid.uuid4().hex,
            chat_id,
            parent_id,
            ChatMessage("assistant", ""),
            time.time(),
            partial=True,
            model=model,
            sampling=said,
        )

    @property
    def message_id(self) -> str:
        return self._message.id

    def _write(self) -> StoredMessage:
        reasoning = "".join(self._reasoning) or None
        message = replace(self._message.message, content="".join(self._text), reasoning=reasoning)
        self._message = replace(self._message, message=message)
        new = self._message.id not in self._store._messages
        self._store._messages[self._message.id] = self._message
        if new:
            self._store._set_head(self._message.chat_id, self._message.id)
        return self._store._with_place(self._message)

    def add(self, text: str, reasoning: str = "") -> None:
        first = not self._text and not self._reasoning
        self._text.append(text)
        self._reasoning.append(reasoning)
        if first:
            self._write()

    def add_notice(self, notice: Notice) -> None:
        self._message = replace(self._message, notices=(*self._message.notices, notice))

    def finish(self, finished: Finished, *, tool_calls: Sequence[Mapping[str, Any]] = ()) -> StoredMessage:
        self._message = replace(
            self._message,
            message=replace(self._message.message, tool_calls=tuple(tool_calls)),
            partial=False,
            finish_reason=finished.reason,
            usage=finished.usage,
            timings=finished.timings,
            draft=finished.draft,
            sampling={**self._message.sampling, "seed": finished.seed},
            error=finished.error,
        )
        return self._write()

    def fail(self, error: str) -> StoredMessage | None:
        if self._message.id not in self._store._messages:
            return None
        self._message = replace(self._message, partial=False, finish_reason=FinishReason.ERROR, error=error)
        return self._write()
