"""The few SQL statements that the store and its answer writers share, inside of a caller's transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from edgellm.contracts import StoredChat, StoredMessage
from edgellm.history.rows import CHAT_COLUMNS, MESSAGE_COLUMNS, stored_chat, stored_message
from edgellm_models.errors import NotFoundError


def insert_message(
    db: sqlite3.Connection, message_id: str, chat_id: str, parent_id: str | None, values: Mapping[str, Any]
) -> None:
    """Adds a message under its parent and makes it the head. NotFoundError for a parent that is none."""
    check_parent(db, chat_id, parent_id)
    now = time.time()
    row = {"id": message_id, "chat_id": chat_id, "parent_id": parent_id, "created": now, **values}
    db.execute(
        f"INSERT INTO message ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())
    )
    db.execute("UPDATE chat SET updated = ? WHERE id = ?", (now, chat_id))
    show(db, chat_id, message_id)


def show(db: sqlite3.Connection, chat_id: str, message_id: str | None) -> None:
    db.execute("UPDATE chat SET head_id = ?, clock = clock + 1 WHERE id = ?", (message_id, chat_id))
    if message_id is not None:
        db.execute(
            "UPDATE message SET seen = (SELECT clock FROM chat WHERE id = ?) WHERE id = ?",
            (chat_id, message_id),
        )


def chat_of(db: sqlite3.Connection, chat_id: str) -> StoredChat:
    row = db.execute(f"SELECT {CHAT_COLUMNS} FROM chat WHERE id = ?", (chat_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"there is no chat {chat_id}")
    return stored_chat(row)


def row_of(db: sqlite3.Connection, message_id: str) -> sqlite3.Row:
    row = db.execute(f"SELECT {MESSAGE_COLUMNS} FROM message m WHERE m.id = ?", (message_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"there is no message {message_id}")
    found: sqlite3.Row = row
    return found


def message_of(db: sqlite3.Connection, message_id: str) -> StoredMessage:
    return stored_message(row_of(db, message_id))


def check_parent(db: sqlite3.Connection, chat_id: str, parent_id: str | None) -> None:
    if parent_id is not None and row_of(db, parent_id)["chat_id"] != chat_id:
        raise NotFoundError(f"there is no message {parent_id} in the chat {chat_id}")
