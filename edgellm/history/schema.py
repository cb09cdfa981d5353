"""The tables of the history, version by version, and how a file of an earlier version becomes one of this."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgellm_models.errors import BadInputError, Notice

APPLICATION_ID = 0x45444745
"""``EDGE``, in the file's header: what has tables and another number is not ours."""

STEPS: tuple[tuple[str, ...], ...] = (
    # Version 1. A message's ``number`` is its order of creation and its row in the search index. ``seen`` is
    # the chat's clock when the message last became the end of the shown branch: so the newest ``seen`` below
    # a message says where its branch was left. ``indexed`` is 0 until the search index has the message, which
    # a Python without FTS5 leaves to the next one that has it.
    (
        """CREATE TABLE chat (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL DEFAULT '',
            created REAL NOT NULL,
            updated REAL NOT NULL,
            system TEXT NOT NULL DEFAULT '',
            model TEXT NOT NULL DEFAULT '',
            params TEXT NOT NULL DEFAULT '{}',
            pinned INTEGER NOT NULL DEFAULT 0,
            head_id TEXT,
            clock INTEGER NOT NULL DEFAULT 0,
            deleted REAL
        )""",
        """CREATE TABLE message (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            chat_id TEXT NOT NULL REFERENCES chat(id) ON DELETE CASCADE,
            parent_id TEXT REFERENCES message(id) ON DELETE CASCADE,
            role TEXT NOT NULL,
            text TEXT NOT NULL DEFAULT '',
            reasoning TEXT NOT NULL DEFAULT '',
            extra TEXT NOT NULL DEFAULT '{}',
            created REAL NOT NULL,
            partial INTEGER NOT NULL DEFAULT 0,
            finish_reason TEXT,
            model TEXT NOT NULL DEFAULT '',
            sampling TEXT NOT NULL DEFAULT '{}',
            prompt_tokens INTEGER,
            cached_tokens INTEGER,
            completion_tokens INTEGER,
            timings TEXT,
            draft TEXT,
            notices TEXT NOT NULL DEFAULT '[]',
            error TEXT,
            seen INTEGER NOT NULL DEFAULT 0,
            indexed INTEGER NOT NULL DEFAULT 0
        )""",
        "CREATE INDEX message_by_parent ON message(chat_id, parent_id, number)",
        "CREATE INDEX message_children ON message(parent_id)",
        "CREATE INDEX message_unindexed ON message(number) WHERE indexed = 0",
        "CREATE INDEX chat_by_use ON chat(pinned, updated)",
    ),
)
"""What makes version n + 1 of a file of version n. A step that was released is never changed."""

VERSION = len(STEPS)


def migrate(
    connection: sqlite3.Connection, path: Path, steps: Sequence[Sequence[str]] = STEPS
) -> tuple[Notice, ...]:
    """Brings an open file to the newest version: all steps in one transaction, or none.

    Before the first step a copy is left as ``NAME.v<version>.bak``, unless the file is new. ``connection`` is
    in autocommit. Errors: ``check``.
    """
    if check(connection, path, len(steps)) == len(steps):
        return ()
    connection.execute("BEGIN IMMEDIATE")  # another process may be at the same
    try:
        version = check(connection, path, len(steps))
        is_new = _is_new(connection)
        if version == len(steps):
            connection.execute("ROLLBACK")
            return ()
        notices: tuple[Notice, ...] = ()
        if not is_new:
            copy = _back_up(path, version)
            detail = (
                f"the chat history was brought from version {version} to {len(steps)}; {copy} is as it was"
            )
            notices = (Notice("history_migrated", detail),)
        for step in steps[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
        return notices
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def check(connection: sqlite3.Connection, path: Path, newest: int = VERSION) -> int:
    """The version of a file, 0 of a new one; only reads. BadInputError when a newer edgellm or another
    program wrote it."""
    version = _version(connection)
    if not _is_new(connection) and not _is_ours(connection):
        raise BadInputError(
            f"{path} is a database, but no chat history of edgellm; move it, or set EDGELLM_HOME"
        )
    if version > newest:
        raise BadInputError(
            f"{path} was written by a newer edgellm: it has version {version}, this one knows up to "
            f"{newest}; update edgellm, or set EDGELLM_HOME to begin another history"
        )
    return version


def _is_new(connection: sqlite3.Connection) -> bool:
    return (
        _version(connection) == 0
        and connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _is_ours(connection: sqlite3.Connection) -> bool:
    return int(connection.execute("PRAGMA application_id").fetchone()[0]) == APPLICATION_ID


def _back_up(path: Path, version: int) -> Path:
    """A copy as it is, by a connection that only reads: the other one holds the lock against writers."""
    target = path.with_name(f"{path.name}.v{version}.bak")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for its owner only
    os.close(handle)
    try:
        source = sqlite3.connect(path, isolation_level=None)
        copy = sqlite3.connect(temporary)
        try:
            source.backup(copy)
        finally:
            copy.close()
            source.close()
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return target
