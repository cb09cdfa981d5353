"""Chats for the tests of the history: a store in a folder, answers in one call, and a writer to be killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from edgellm.contracts import (
    ChatMessage,
    DraftCounts,
    Finished,
    FinishReason,
    RequestTimings,
    SamplingParams,
    StoredMessage,
    Usage,
)
from edgellm.history.store import HistoryStore, chats_file

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "models"))


def store_in(folder: Path, *, use_fts: bool = True) -> HistoryStore:
    return HistoryStore(chats_file(folder), use_fts=use_fts)


def finished(reason: FinishReason = FinishReason.STOP, error: str | None = None) -> Finished:
    timings = RequestTimings(0.5, 0.25, 2.0, 20, 5)
    return Finished(reason, Usage(30, 10, 5), timings, DraftCounts(4, 3, 2), seed=7, error=error)


def ask(store: HistoryStore, chat_id: str, text: str, parent_id: str | None = None) -> StoredMessage:
    return store.add_message(chat_id, ChatMessage("user", text), parent_id=parent_id)


def answer(store: HistoryStore, question: StoredMessage, text: str) -> StoredMessage:
    writer = store.begin_answer(
        question.chat_id, parent_id=question.id, model="tiny", sampling=SamplingParams()
    )
    writer.add(text)
    return writer.finish(finished())


def texts(store: HistoryStore, chat_id: str) -> list[str]:
    return [str(stored.message.content) for stored in store.branch(chat_id)]


def stream_until_killed(folder: Path) -> None:
    """Writes an answer, 100 pieces a second, and prints each piece behind the time before it was added."""
    store = store_in(folder)
    chat = store.create_chat()
    question = ask(store, chat.id, "Count.")
    writer = store.begin_answer(chat.id, parent_id=question.id, model="tiny", sampling=SamplingParams())
    number = 0
    while True:
        piece = f"{number} "
        writer.add(piece)
        sys.stdout.write(f"{time.monotonic()} {number}\n")
        sys.stdout.flush()
        number += 1
        time.sleep(0.01)


def write_many(folder: Path, name: str, count: int) -> None:
    """A chat with many messages, while other processes do the same."""
    store = store_in(folder)
    chat = store.create_chat(title=name)
    parent = None
    for number in range(count):
        question = ask(store, chat.id, f"{name} {number}", parent)
        parent = answer(store, question, f"answer {number}").id


if __name__ == "__main__":
    if sys.argv[1] == "stream":
        stream_until_killed(Path(sys.argv[2]))
    else:
        write_many(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
