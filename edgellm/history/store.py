"""The store of chats: a contracts.ChatStore over one SQLite file."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.contracts import ChatMessage, Notice, SamplingParams, SearchHit, StoredChat, StoredMessage
from edgellm.history import search as searching
from edgellm.history.answer_writer import StoredAnswerWriter
from edgellm.history.database import Database
from edgellm.history.export import as_markdown, as_object
from edgellm.history.rows import (
    CHAT_COLUMNS,
    MESSAGE_COLUMNS,
    as_json,
    clean,
    message_values,
    stored_chat,
    stored_message,
)
from edgellm.history.statements import chat_of, check_parent, insert_message, message_of, row_of, show
from edgellm_models.errors import BadInputError, NotFoundError

KEPT_DELETED_S = 30 * 24 * 3600.0
"""How long a deleted chat can be brought back."""
MAX_TITLE = 80
"""Characters of a title that is taken from the first question."""

_TO_ROOT = (
    "WITH RECURSIVE line(number, depth) AS (SELECT number, 0 FROM message WHERE id = ? AND chat_id = ? "
    "UNION SELECT p.number, depth + 1 FROM line JOIN message c ON c.number = line.number "
    "JOIN message p ON p.id = c.parent_id WHERE depth < 1000000) "
)
_BELOW = (
    "WITH RECURSIVE below(number) AS (SELECT number FROM message WHERE id = ? "
    "UNION SELECT c.number FROM below JOIN message p ON p.number = below.number "
    "JOIN message c ON c.parent_id = p.id) "
)


def chats_file(data_folder: Path) -> Path:
    """Where the history lies: in a folder of its own, which is its owner's alone."""
    return data_folder / "history" / "chats.db"


class HistoryStore:
    """See contracts.ChatStore."""

    def __init__(self, path: Path, *, use_fts: bool = True) -> None:
        """Opens or makes the file (errors and notices: database.py), and removes for good what was deleted
        30 days ago."""
        self._database = Database(path, use_fts=use_fts)
        self._remove("deleted < ?", time.time() - KEPT_DELETED_S)

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def notices(self) -> tuple[Notice, ...]:
        return self._database.notices

    def close(self) -> None:
        self._database.close()

    # --- chats ---

    def create_chat(
        self, *, title: str = "", system: str = "", model: str = "", params: Mapping[str, Any] | None = None
    ) -> StoredChat:
        chat_id, now = uuid.uuid4().hex, time.time()
        with self._database.writing() as db:
            db.execute(
                "INSERT INTO chat (id, title, created, updated, system, model, params) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (chat_id, clean(title), now, now, clean(system), clean(model), as_json(dict(params or {}))),
            )
            return chat_of(db, chat_id)

    def get_chat(self, chat_id: str) -> StoredChat:
        with self._database.reading() as db:
            return chat_of(db, chat_id)

    def find_chat(self, prefix: str, *, deleted: bool = False) -> StoredChat:
        """See contracts.ChatStore; ``deleted`` looks among the deleted ones."""
        wanted = prefix.strip().lower()
        if not wanted or not all(c in "0123456789abcdef" for c in wanted):
            raise NotFoundError(
                f"{prefix!r} is no id of a chat: those are hexadecimal; edgellm history list shows them"
            )
        with self._database.reading() as db:
            rows = db.execute(
                f"SELECT {CHAT_COLUMNS} FROM chat WHERE id >= ? AND id < ? AND (deleted IS NOT NULL) = ? "
                "ORDER BY updated DESC LIMIT 6",
                (wanted, wanted + "g", deleted),
            ).fetchall()
        if len(rows) > 1:
            ids = ", ".join(row["id"][: len(wanted) + 4] for row in rows[:5])
            raise BadInputError(f"several chats have an id that begins with {wanted}: {ids}; give more of it")
        if not rows:
            kind = "deleted chat" if deleted else "chat"
            raise NotFoundError(f"there is no {kind} whose id begins with {wanted}; see edgellm history list")
        return stored_chat(rows[0])

    def list_chats(self, *, limit: int = 100, offset: int = 0, deleted: bool = False) -> list[StoredChat]:
        order = "deleted DESC" if deleted else "pinned DESC, updated DESC"
        with self._database.reading() as db:
            rows = db.execute(
                f"SELECT {CHAT_COLUMNS} FROM chat WHERE (deleted IS NOT NULL) = ? "
                f"ORDER BY {order}, chat.rowid DESC LIMIT ? OFFSET ?",
                (deleted, limit, offset),
            ).fetchall()
        return [stored_chat(row) for row in rows]

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
        texts = {"title": title, "system": system, "model": model}
        changes: dict[str, Any] = {name: clean(text) for name, text in texts.items() if text is not None}
        if params is not None:
            changes["params"] = as_json(dict(params))
        if pinned is not None:
            changes["pinned"] = int(pinned)
        with self._database.writing() as db:
            if changes:
                sets = ", ".join(f"{name} = ?" for name in changes)
                db.execute(f"UPDATE chat SET {sets} WHERE id = ?", (*changes.values(), chat_id))
            return chat_of(db, chat_id)

    def delete_chat(self, chat_id: str) -> None:
        with self._database.writing() as db:
            chat_of(db, chat_id)
            db.execute("UPDATE chat SET deleted = coalesce(deleted, ?) WHERE id = ?", (time.time(), chat_id))

    def restore_chat(self, chat_id: str) -> None:
        with self._database.writing() as db:
            chat_of(db, chat_id)
            db.execute("UPDATE chat SET deleted = NULL WHERE id = ?", (chat_id,))

    def purge_chat(self, chat_id: str) -> None:
        self.get_chat(chat_id)
        self._remove("id = ?", chat_id)

    # --- messages ---

    def branch(self, chat_id: str, message_id: str | None = None) -> list[StoredMessage]:
        with self._database.reading() as db:
            end = message_id if message_id is not None else chat_of(db, chat_id).head_id
            if end is None:
                return []
            rows = db.execute(
                f"{_TO_ROOT} SELECT {MESSAGE_COLUMNS} FROM line JOIN message m ON m.number = line.number "
                "ORDER BY depth DESC",
                (end, chat_id),
            ).fetchall()
        if not rows:
            raise NotFoundError(f"there is no message {end} in the chat {chat_id}")
        return [stored_message(row) for row in rows]

    def conversation(self, chat_id: str, message_id: str | None = None) -> list[ChatMessage]:
        """See contracts.ChatStore. An answer without a text is left out together with its question, so that
        roles still take turns."""
        system = self.get_chat(chat_id).system
        found = [ChatMessage("system", system)] if system else []
        for stored in self.branch(chat_id, message_id):
            message = stored.message
            if message.role == "assistant" and not message.content and not message.tool_calls:
                if found and found[-1].role == "user":
                    found.pop()
                continue
            found.append(message)
        return found

    def siblings(self, message_id: str) -> list[StoredMessage]:
        with self._database.reading() as db:
            own = row_of(db, message_id)
            rows = db.execute(
                f"SELECT {MESSAGE_COLUMNS} FROM message m WHERE m.chat_id = ? AND m.parent_id IS ? "
                "ORDER BY m.number",
                (own["chat_id"], own["parent_id"]),
            ).fetchall()
        return [stored_message(row) for row in rows]

    def tree(self, chat_id: str) -> list[StoredMessage]:
        with self._database.reading() as db:
            chat_of(db, chat_id)
            rows = db.execute(
                f"SELECT {MESSAGE_COLUMNS} FROM message m WHERE m.chat_id = ? ORDER BY m.number", (chat_id,)
            ).fetchall()
        return [stored_message(row) for row in rows]

    def add_message(self, chat_id: str, message: ChatMessage, *, parent_id: str | None) -> StoredMessage:
        message_id, values = uuid.uuid4().hex, message_values(message)
        with self._database.writing() as db:
            chat = chat_of(db, chat_id)
            insert_message(db, message_id, chat_id, parent_id, values)
            if not chat.title and message.role == "user":
                db.execute("UPDATE chat SET title = ? WHERE id = ?", (title_of(values["text"]), chat_id))
            return message_of(db, message_id)

    def begin_answer(
        self, chat_id: str, *, parent_id: str | None, model: str, sampling: SamplingParams
    ) -> StoredAnswerWriter:
        with self._database.reading() as db:
            chat_of(db, chat_id)
            check_parent(db, chat_id, parent_id)
        return StoredAnswerWriter(self._database, chat_id, parent_id, model, sampling)

    def select(self, message_id: str) -> StoredChat:
        with self._database.writing() as db:
            chat_id = row_of(db, message_id)["chat_id"]
            last = db.execute(
                f"{_BELOW} SELECT m.id FROM below JOIN message m ON m.number = below.number "
                "ORDER BY m.seen DESC, m.number DESC LIMIT 1",
                (message_id,),
            ).fetchone()
            show(db, chat_id, last["id"])
            return chat_of(db, chat_id)

    def set_head(self, chat_id: str, message_id: str | None) -> StoredChat:
        with self._database.writing() as db:
            chat_of(db, chat_id)
            check_parent(db, chat_id, message_id)
            show(db, chat_id, message_id)
            return chat_of(db, chat_id)

    # --- finding and giving away ---

    def search(self, text: str, *, limit: int = 50) -> list[SearchHit]:
        return searching.search(self._database, text, limit)

    def export(self, chat_id: str, form: str) -> str:
        chat = self.get_chat(chat_id)
        if form == "markdown":
            return as_markdown(chat, self.branch(chat_id))
        if form == "json":
            found = as_object(chat, self.tree(chat_id))
            return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
        raise BadInputError(f"a chat is exported as markdown or json, not {form!r}")

    def _remove(self, condition: str, value: object) -> None:
        with self._database.reading() as db:
            ids = [row["id"] for row in db.execute(f"SELECT id FROM chat WHERE {condition}", (value,))]
        if not ids:
            return
        with self._database.writing() as db:
            for chat_id in ids:
                searching.forget(db, chat_id, has_fts=self._database.has_fts)
                db.execute("DELETE FROM chat WHERE id = ?", (chat_id,))
        self._database.forget_deleted()


def title_of(text: str) -> str:
    """The first line with something in it, cut at a word."""
    line = " ".join(next((line for line in text.splitlines() if line.strip()), "").split())
    if len(line) <= MAX_TITLE:
        return line
    cut = line[: MAX_TITLE - 1]
    at = cut.rfind(" ")
    return (cut[:at] if at > MAX_TITLE // 2 else cut) + "…"
