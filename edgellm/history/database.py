"""The SQLite file behind the history: opened, checked, locked, set aside when damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgellm.history.schema import STEPS, check, migrate
from edgellm_models.errors import BadInputError, EdgeLLMError, Notice, OutputError, UnavailableError

BUSY_TIMEOUT_S = 5.0
"""How long a write waits for another process's."""
CHECKED_BYTES = 32 << 20
"""Files up to this size are checked whole when they are opened (about 0.1 s at most); larger ones when
something was wrong with them before."""

STALE_INDEX = "message_fts_is_stale"
"""A table with this name says that the index holds what was purged by a Python that could not touch it."""

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Database:
    """One connection that any thread may use, one at a time.

    The file is 0600 in a folder of its own of 0700, in WAL mode: readers of other processes see whole
    transactions and wait for nobody; after a ``kill -9`` every committed one is there.
    """

    def __init__(self, path: Path, *, steps: Sequence[Sequence[str]] = STEPS, use_fts: bool = True) -> None:
        """Opens or makes the file. A damaged one is moved away, whole, with a notice, and a new one begun.
        Without ``use_fts`` it does as where SQLite has no FTS5.

        OutputError when it cannot be made or written, UnavailableError when it stays locked, BadInputError
        when another program or a newer edgellm wrote it; then it is left as it is.
        """
        self.path = path
        self.notices: tuple[Notice, ...] = ()
        self._lock = threading.RLock()
        self._steps = steps
        with self._in_our_words():
            _make_private(path)
            try:
                self._connection = self._open()
            except _Damaged as damage:
                self.notices += (_set_aside(path, damage),)
                _make_private(path)
                try:
                    self._connection = self._open()
                except _Damaged as again:
                    raise OutputError(f"the chat history {path} cannot be used: {again}") from None
        self.has_fts = self._find_fts(use_fts)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that belong together."""
        with self._lock, self._in_our_words():
            yield self._connection

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it or nothing. Without ``durable`` a power cut may take the last seconds
        (a killed process never does); the next durable one covers it too."""
        with self._lock, self._in_our_words():
            connection = self._connection
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def forget_deleted(self) -> None:
        """Takes out of the write-ahead log what was deleted; what other processes still read stays until
        then."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _open(self) -> sqlite3.Connection:
        suspect = _marker(self.path)
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        try:
            check(connection, self.path, len(self._steps))  # before anything of a foreign file changes
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if suspect.exists() or self.path.stat().st_size <= CHECKED_BYTES:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise _Damaged(str(found))
                suspect.unlink(missing_ok=True)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")  # what is purged is overwritten
            self.notices += migrate(connection, self.path, self._steps)
        except sqlite3.Error as error:
            connection.close()
            if _code(error) in _DAMAGE:
                raise _Damaged(str(error)) from None
            raise
        except BaseException:
            connection.close()
            raise
        if mode != "wal":
            detail = (
                f"the file system of {self.path} allows no write-ahead log: saving a chat waits for other "
                "processes that read or write one"
            )
            self.notices += (Notice("history_no_wal", detail),)
        return connection

    def _find_fts(self, wanted: bool) -> bool:
        """Whether this SQLite has FTS5; its table is made here, since a version without it has none."""
        try:
            if wanted:
                with self._lock, self._in_our_words(but=sqlite3.OperationalError):
                    self._make_index()
                return True
        except sqlite3.OperationalError as error:
            if "fts5" not in str(error):
                raise self._translated(error) from None
        detail = "this Python's SQLite has no FTS5: searching the history reads every chat, and takes longer"
        self.notices += (Notice("history_no_index", detail),)
        return False

    def _make_index(self) -> None:
        db = self._connection
        tables = "SELECT name FROM sqlite_master WHERE name IN ('message_fts', ?)"
        found = {row["name"] for row in db.execute(tables, (STALE_INDEX,))}
        if found == {"message_fts"}:
            db.execute("SELECT rowid FROM message_fts LIMIT 1")  # fails where the module is missing
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            if STALE_INDEX in found:
                db.execute("DROP TABLE IF EXISTS message_fts")
                db.execute(f"DROP TABLE IF EXISTS {STALE_INDEX}")
            db.execute(
                "CREATE VIRTUAL TABLE IF NOT EXISTS message_fts USING fts5(text, reasoning, "
                "content='message', content_rowid='number', "
                "tokenize=\"unicode61 remove_diacritics 2\", prefix='2 3')"
            )
            db.execute("UPDATE message SET indexed = 0 WHERE indexed")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _in_our_words(self, but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if but and isinstance(error, but):
                raise
            raise self._translated(error) from error
        except OSError as error:
            why = error.strerror or error
            raise OutputError(f"the chat history {self.path} cannot be written: {why}") from error

    def _translated(self, error: sqlite3.Error) -> EdgeLLMError:
        code = _code(error)
        if code in _BUSY:
            return UnavailableError(
                f"the chat history {self.path} was locked by another process for {BUSY_TIMEOUT_S:.0f} s"
            )
        if code in _DAMAGE:
            with contextlib.suppress(OSError):  # the next one that opens it looks closer
                _marker(self.path).touch(mode=0o600)
            return BadInputError(
                f"the chat history {self.path} is damaged ({error}); at the next start it is set aside and a "
                "new one begun"
            )
        return OutputError(f"the chat history {self.path} cannot be used: {error}")


class _Damaged(Exception):
    """The file is no database or not a sound one; the text says why."""


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}.suspect")


def _make_private(path: Path) -> None:
    """The folder as 0700 and the file as 0600; SQLite gives its log the file's mode.

    NOTE: an existing file is never opened here: closing it would drop the locks that SQLite holds on it
    elsewhere in this process.
    """
    folder = path.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if os.name == "posix" and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            path.chmod(0o600)


def _set_aside(path: Path, why: _Damaged) -> Notice:
    """Moves the file and its log away, under a name that was free."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    path.rename(target)
    for suffix in ("-wal", "-shm"):  # beside it under its name: sqlite3's .recover then reads them too
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    _marker(path).unlink(missing_ok=True)
    return Notice(
        "history_damaged",
        f"the chat history was damaged ({str(why)[:100]}): it was set aside as {target} and a new one begun; "
        f"`sqlite3 {target} .recover` may show what it still holds",
    )
