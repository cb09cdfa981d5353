"""Searching saved chats: by the FTS5 index where it can answer, else by reading every message."""

from __future__ import annotations

import functools
import re
import sqlite3
import unicodedata
from dataclasses import dataclass

from edgellm.contracts import SearchHit
from edgellm.history.database import STALE_INDEX, Database
from edgellm.history.rows import CHAT_COLUMNS, stored_chat

AROUND = 48
"""Characters shown before and behind a find."""
MAX_EXCERPT = 160
MAX_TERMS = 32

_TERM = re.compile(r'"([^"]*)"|(\S+)')
# Scripts that are written without spaces: the index takes a whole clause of them for one word.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Term:
    """A word, which may be the beginning of one, or a phrase."""

    text: str
    is_phrase: bool

    @property
    def is_indexable(self) -> bool:
        """The index cuts it into whole words, as it did with the messages."""
        return any(c.isalnum() for c in self.text) and not _UNSPACED.search(self.text)

    @property
    def query(self) -> str:
        quoted = '"' + self.text.replace('"', '""').replace("\0", " ") + '"'
        return quoted if self.is_phrase else quoted + "*"


def terms_of(text: str) -> list[Term]:
    """Words and "phrases" of what somebody typed; an open quote lasts to the end."""
    if text.count('"') % 2:
        text += '"'
    found = [
        Term(m[1].strip(), True) if m[1] is not None else Term(m[2], False) for m in _TERM.finditer(text)
    ]
    return [term for term in found if term.text][:MAX_TERMS]


def search(database: Database, text: str, limit: int) -> list[SearchHit]:
    """See contracts.ChatStore.search: titles first, then messages, the best first."""
    terms = terms_of(text)
    if not terms or limit < 1:
        return []
    by_index = database.has_fts and all(term.is_indexable for term in terms)
    if by_index:
        with database.reading() as db:
            has_new = db.execute("SELECT 1 FROM message WHERE indexed = 0 AND partial = 0 LIMIT 1").fetchone()
        if has_new:
            with database.writing() as db:
                index_new(db)
    with database.reading() as db:
        titles = [
            row
            for row in db.execute(
                f"SELECT {CHAT_COLUMNS} FROM chat WHERE deleted IS NULL ORDER BY updated DESC"
            )
            if _has_all(row["title"], terms)
        ][:limit]
        rows = _by_index(db, terms, limit) if by_index else []
        # What streams still, or broke off with its writer, is in no index.
        rows += _by_reading(db, terms, limit, only_new=by_index)
        hits = [_hit(row, None, "title", row["title"], terms) for row in titles]
        for found in rows[: limit - len(hits)]:
            chat = db.execute(f"SELECT {CHAT_COLUMNS} FROM chat WHERE id = ?", (found["chat_id"],)).fetchone()
            shown = found["text"]
            if not _has_all(shown, terms) and _has_all(found["reasoning"], terms):
                shown = found["reasoning"]
            hits.append(_hit(chat, found["id"], found["role"], shown, terms))
    return hits


def index_new(db: sqlite3.Connection, limit: int = -1) -> None:
    """Puts whole messages that the index does not have into it, inside of a transaction."""
    rows = db.execute(
        "SELECT number, text, reasoning FROM message WHERE indexed = 0 AND partial = 0 LIMIT ?", (limit,)
    ).fetchall()
    for row in rows:
        db.execute("INSERT INTO message_fts (rowid, text, reasoning) VALUES (?, ?, ?)", tuple(row))
        db.execute("UPDATE message SET indexed = 1 WHERE number = ?", (row["number"],))


def forget(db: sqlite3.Connection, chat_id: str, *, has_fts: bool) -> None:
    """Takes a chat's messages out of the index, before they are deleted. Where this Python has no FTS5 the
    index is marked: the next one that has it makes it anew."""
    rows = db.execute(
        "SELECT number, text, reasoning FROM message WHERE chat_id = ? AND indexed = 1", (chat_id,)
    ).fetchall()
    if not rows:
        return
    if not has_fts:
        db.execute(f"CREATE TABLE IF NOT EXISTS {STALE_INDEX} (x)")
        return
    for row in rows:
        db.execute(
            "INSERT INTO message_fts (message_fts, rowid, text, reasoning) VALUES ('delete', ?, ?, ?)",
            tuple(row),
        )
    # Deleted words stay in older parts of the index until these are merged.
    db.execute("INSERT INTO message_fts (message_fts) VALUES ('optimize')")


def _by_index(db: sqlite3.Connection, terms: list[Term], limit: int) -> list[sqlite3.Row]:
    query = " AND ".join(term.query for term in terms)
    return db.execute(
        "SELECT m.id, m.chat_id, m.role, m.text, m.reasoning FROM message_fts "
        "JOIN message m ON m.number = message_fts.rowid JOIN chat ON chat.id = m.chat_id "
        "WHERE message_fts MATCH ? AND chat.deleted IS NULL ORDER BY message_fts.rank, m.number DESC LIMIT ?",
        (query, limit),
    ).fetchall()


def _by_reading(
    db: sqlite3.Connection, terms: list[Term], limit: int, *, only_new: bool
) -> list[sqlite3.Row]:
    found = []
    for row in db.execute(
        "SELECT m.id, m.chat_id, m.role, m.text, m.reasoning FROM message m JOIN chat ON chat.id = m.chat_id "
        f"WHERE chat.deleted IS NULL {'AND m.indexed = 0' if only_new else ''} ORDER BY m.number DESC"
    ):
        if _has_all(f"{row['text']}\n{row['reasoning']}", terms):
            found.append(row)
            if len(found) == limit:
                break
    return found


def _has_all(text: str, terms: list[Term]) -> bool:
    folded = _fold(text)
    return all(_fold(term.text) in folded for term in terms)


def _hit(chat: sqlite3.Row, message_id: str | None, role: str, text: str, terms: list[Term]) -> SearchHit:
    excerpt, marks = excerpt_of(text, terms)
    return SearchHit(stored_chat(chat), message_id, role, excerpt, marks)


def excerpt_of(text: str, terms: list[Term]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """One line around the first find, with the places of all finds in it."""
    at = _first(text, terms)
    start = max(0, at - AROUND)
    line = text[start : start + MAX_EXCERPT]
    if start:
        head, space, rest = line.partition(" ")
        line = rest if space and len(head) < AROUND else line
    line = "".join(" " if c.isspace() else c for c in line).strip()
    line = re.sub("  +", " ", line)
    prefix = "…" if start else ""
    suffix = "…" if start + MAX_EXCERPT < len(text) else ""
    line = prefix + line + suffix
    places = sorted({place for term in terms for place in _places(line, term.text)})
    return line, tuple(places)


def _first(text: str, terms: list[Term]) -> int:
    places = [place for term in terms for place in _places(text, term.text)[:1]]
    return min(places)[0] if places else 0


def _places(text: str, term: str) -> list[tuple[int, int]]:
    """Where a term is in a text, as (start, end) of the text's own characters."""
    wanted = _fold(term)
    folded = _fold(text)
    if not wanted:
        return []
    where = None
    if len(folded) != len(text) or not text.isascii():
        where = [i for i, c in enumerate(text) for _ in _fold_one(c)]
    places: list[tuple[int, int]] = []
    at = folded.find(wanted)
    while at >= 0 and len(places) < 100:
        end = at + len(wanted)
        places.append((at, end) if where is None else (where[at], where[end - 1] + 1))
        at = folded.find(wanted, end)
    return places


def _fold(text: str) -> str:
    return text.lower() if text.isascii() else "".join(map(_fold_one, text))


@functools.cache
def _fold_one(character: str) -> str:
    """Without case and diacritics, as the index folds words."""
    kept = (c for c in unicodedata.normalize("NFD", character) if not unicodedata.combining(c))
    return "".join(kept).casefold()
