"""Saves one answer while it streams: text is noted at once and written by a thread, twice a second."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.contracts import (
    DraftCounts,
    Finished,
    FinishReason,
    Notice,
    RequestTimings,
    SamplingParams,
    StoredMessage,
    Usage,
)
from edgellm.history import search as searching
from edgellm.history.database import Database
from edgellm.history.rows import as_json, clean, end_values, notices_json, sampling_json
from edgellm.history.statements import insert_message, message_of
from edgellm_models.errors import EdgeLLMError, OutputError

WRITE_EVERY_S = 0.5
"""Half of what may be lost."""


class StoredAnswerWriter:
    """See contracts.AnswerWriter.

    The first text is written at once, later text every WRITE_EVERY_S, by a thread, so that neither an event
    loop nor an engine ever waits for a disk. A disk that refuses is asked again each time, and its error is
    raised by ``finish`` and ``fail``.
    """

    def __init__(
        self,
        database: Database,
        chat_id: str,
        parent_id: str | None,
        model: str,
        sampling: SamplingParams,
    ) -> None:
        self._database = database
        self._chat_id, self._parent_id = chat_id, parent_id
        self._model, self._sampling = clean(model), sampling
        self._message_id = uuid.uuid4().hex
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._notices: list[Notice] = []
        self._wake = threading.Condition()
        self._has_new = self._ended = False
        self._exists = False
        """The message is in the tree. Only the thread, and after its end the caller, changes that."""
        self._thread: threading.Thread | None = None

    @property
    def message_id(self) -> str:
        return self._message_id

    def add(self, text: str, reasoning: str = "") -> None:
        if not (text or reasoning):
            return
        with self._wake:
            if text:
                self._text.append(text)
            if reasoning:
                self._reasoning.append(reasoning)
            self._note()

    def add_notice(self, notice: Notice) -> None:
        with self._wake:
            self._notices.append(notice)

    def finish(self, finished: Finished, *, tool_calls: Sequence[Mapping[str, Any]] = ()) -> StoredMessage:
        """See contracts.AnswerWriter. An answer without any text is in the tree too, with its reason."""
        self._end()
        extra = as_json({"tool_calls": [dict(call) for call in tool_calls]} if tool_calls else {})
        end = {
            **end_values(finished, self._notices),
            "extra": extra,
            "sampling": sampling_json(self._sampling, finished.seed),
        }
        with self._database.writing() as db:
            self._write(end)
            db.execute(
                "UPDATE chat SET model = ?, updated = ? WHERE id = ?",
                (self._model, time.time(), self._chat_id),
            )
            if self._database.has_fts:
                searching.index_new(db, limit=32)
            return message_of(db, self._message_id)

    def fail(self, error: str) -> StoredMessage | None:
        if self._text or self._reasoning:
            unknown = RequestTimings(0.0, 0.0, 0.0)
            return self.finish(
                Finished(FinishReason.ERROR, Usage(0, 0, 0), unknown, DraftCounts(), seed=0, error=error)
            )
        self._end()
        return None  # without a text there is no message yet: the head is still its question

    # --- the thread ---

    def _note(self) -> None:
        """There is something new; under the lock."""
        if self._ended:
            raise ValueError("this answer has ended")
        if self._thread is None:
            self._thread = threading.Thread(target=self._save, name="history-writer", daemon=True)
            self._thread.start()
        if not self._has_new:
            self._has_new = True
            self._wake.notify()

    def _save(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._has_new or self._ended)
                if self._ended:
                    return  # finish writes the rest
                self._has_new = False
            try:
                with self._database.writing(durable=False):
                    self._write({"partial": 1, "notices": notices_json(self._notices)})
                self._exists = True
            except EdgeLLMError:
                # A full disk may have room in a moment. In the end it is told by finish, which writes it all.
                with self._wake:
                    self._has_new = True
            with self._wake:
                self._wake.wait_for(lambda: self._ended, WRITE_EVERY_S)

    def _end(self) -> None:
        with self._wake:
            if self._ended:
                raise ValueError("this answer has ended already")
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _write(self, values: Mapping[str, Any]) -> None:
        """Writes all text so far with these columns, inside of a transaction."""
        with self._wake:
            for parts in (self._text, self._reasoning):
                parts[:] = ["".join(parts)]  # joined once, not anew at every write
            row = {"text": clean(self._text[0]), "reasoning": clean(self._reasoning[0]), **values}
        with self._database.reading() as db:
            if not self._exists:
                row = {
                    "role": "assistant",
                    "model": self._model,
                    "sampling": sampling_json(self._sampling),
                    **row,
                }
                insert_message(db, self._message_id, self._chat_id, self._parent_id, row)
                return
            sets = ", ".join(f"{name} = ?" for name in row)
            done = db.execute(f"UPDATE message SET {sets} WHERE id = ?", (*row.values(), self._message_id))
            if not done.rowcount:
                raise OutputError("this answer is not saved: its chat was removed meanwhile")
