"""The file of the history: killed writers, several processes, damage, versions, and who may read it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm.contracts import ChatMessage, ContentPart, FinishReason, SamplingParams
from edgellm.history.database import Database
from edgellm.history.schema import APPLICATION_ID, STEPS, VERSION
from edgellm.history.store import HistoryStore, chats_file
from edgellm_models.errors import BadInputError, EdgeLLMError, OutputError, UnavailableError
from tests.support.history_world import ROOT, SOURCES, answer, ask, finished, store_in, texts

DATA = ROOT / "tests" / "data"


def worker(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.history_world", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )


def a_chat(folder: Path) -> tuple[HistoryStore, str]:
    store = store_in(folder)
    chat = store.create_chat()
    answer(store, ask(store, chat.id, "What is the capital of France?"), "Paris. " * 2000)
    return store, chat.id


def test_a_killed_writer_loses_at_most_a_second(tmp_path: Path) -> None:
    process = worker("stream", str(tmp_path))
    assert process.stdout is not None
    added: list[tuple[float, int]] = []
    begin = None
    while begin is None or time.monotonic() - begin < 1.7:
        moment, number = process.stdout.readline().split()
        added.append((float(moment), int(number)))
        begin = begin or time.monotonic()
    killed = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = store_in(tmp_path)
    assert store.notices == ()
    (chat,) = store.list_chats()
    question, partial = store.branch(chat.id)
    assert question.message.content == "Count."
    assert partial.partial and partial.finish_reason is None
    text = str(partial.message.content)
    numbers = [int(word) for word in text.split()]
    assert numbers == list(range(len(numbers)))
    promised = [number for moment, number in added if moment < killed - 1.0]
    assert promised and numbers[-1] >= promised[-1]
    # The chat goes on, and what broke off is found.
    ask(store, chat.id, "Go on.", partial.id)
    assert store.conversation(chat.id)[1] == ChatMessage("assistant", text)
    assert [hit.message_id for hit in store.search("12")] == [partial.id]


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    workers = [worker("many", str(tmp_path), name, "25") for name in ("one", "two", "three")]
    own, chat_id = a_chat(tmp_path)
    for process in workers:
        assert process.wait(timeout=60) == 0
    for name in ("one", "two", "three"):
        (chat,) = (chat for chat in own.list_chats() if chat.title == name)
        expected = [text for number in range(25) for text in (f"{name} {number}", f"answer {number}")]
        assert texts(own, chat.id) == expected
    assert texts(own, chat_id)[0].startswith("What is")
    assert len(own.search("answer")) == 50


def test_a_lock_that_stays_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellm.history import database

    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    store, chat_id = a_chat(tmp_path)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked by another process"):
        ask(store, chat_id, "now?")
    writer = store.begin_answer(chat_id, parent_id=None, model="", sampling=SamplingParams())
    writer.add("kept in memory")
    other.execute("ROLLBACK")
    assert writer.finish(finished()).message.content == "kept in memory"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_only_the_owner_may_read(tmp_path: Path) -> None:
    folder = chats_file(tmp_path).parent
    folder.mkdir(mode=0o755)
    chats_file(tmp_path).touch(mode=0o644)
    store, _ = a_chat(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes) >= {"chats.db", "chats.db-wal"} and set(modes.values()) == {0o600}
    assert store.notices == ()


@pytest.mark.parametrize("where", ["header", "page", "cut", "text", "empty pages"])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, where: str) -> None:
    store, _ = a_chat(tmp_path)
    path = store.path
    store.close()
    data = bytearray(path.read_bytes())
    size = len(data)
    if where == "header":
        data[:16] = b"no database here"
    elif where == "page":
        data[4096 : 4096 + 2000] = b"\xff" * 2000
    elif where == "cut":
        del data[size // 2 :]
    elif where == "text":
        data[:] = b"hello " * 1000
    else:
        data[4096:] = bytes(size - 4096)
    path.write_bytes(bytes(data))
    store = store_in(tmp_path)
    (notice,) = store.notices
    assert notice.kind == "history_damaged"
    (aside,) = (
        p for p in path.parent.iterdir() if ".damaged-" in p.name and not p.name.endswith(("-wal", "-shm"))
    )
    assert str(aside) in notice.detail
    assert aside.read_bytes()[100:] == bytes(data)[100:]
    assert store.list_chats() == []
    a_chat(tmp_path)
    assert store_in(tmp_path).notices == ()


def test_no_changed_byte_of_the_file_is_a_traceback(tmp_path: Path) -> None:
    """Whatever a disk does to the file: a notice or one clear error, and the file is not deleted."""
    store, _ = a_chat(tmp_path / "good")
    path = store.path
    store.close()
    good = path.read_bytes()
    for number in range(60):
        folder = tmp_path / str(number)
        target = chats_file(folder)
        target.parent.mkdir(parents=True)
        data = bytearray(good)
        at = number * 7919 % len(good) if number > 20 else number * 5
        data[at] ^= 0x5A
        target.write_bytes(bytes(data))
        try:
            changed = store_in(folder)
            for chat in changed.list_chats():
                changed.branch(chat.id)
            changed.search("capital")
            changed.close()
        except EdgeLLMError as error:
            assert str(target) in str(error)
        assert any(p.stat().st_size == len(good) for p in target.parent.iterdir())


def test_damage_that_shows_later_is_set_aside_at_the_next_start(tmp_path: Path) -> None:
    store, chat_id = a_chat(tmp_path)
    store.close()
    path = store.path
    (path.with_name("chats.db.suspect")).touch()
    assert store_in(tmp_path).notices == ()  # looked at closely, and sound
    assert not path.with_name("chats.db.suspect").exists()
    db = Database(path)
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(BadInputError, match="set aside"), db.reading():
        raise error
    assert path.with_name("chats.db.suspect").exists()
    assert store_in(tmp_path).branch(chat_id)


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file where the folder goes")
    with pytest.raises(OutputError, match="chat history"):
        store_in(tmp_path)


# --- versions ---


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_files_of_every_released_version_open_with_all_they_hold(tmp_path: Path, version: int) -> None:
    path = chats_file(tmp_path)
    path.parent.mkdir(mode=0o700)
    old = sqlite3.connect(path)
    old.executescript((DATA / f"history_v{version}.sql").read_text())
    old.close()
    store = store_in(tmp_path)
    assert [notice.kind for notice in store.notices] == (["history_migrated"] if version < VERSION else [])
    (chat,) = store.list_chats()
    assert (chat.system, chat.params) == ("Be brief.", {"temperature": 0.5})
    question, cut, second, partial = store.branch(chat.id)
    whole = store.siblings(cut.id)[0]
    assert whole.message == ChatMessage("assistant", "Paris.")
    assert (whole.finish_reason, whole.num_siblings) == (FinishReason.STOP, 2)
    assert whole.usage is not None and whole.usage.cached_tokens == 10
    assert whole.timings is not None and whole.timings.decode_s == 0.3
    assert whole.draft is not None and whole.draft.accepted == 2
    assert [notice.kind for notice in whole.notices] == ["trimmed"]
    assert whole.sampling["stop"] == ["END"]
    assert cut.finish_reason is FinishReason.CANCELLED
    assert second.message.content == (ContentPart("text", "And of Norway?"),)
    assert partial.partial and partial.message.content == "Os"
    assert [hit.message_id for hit in store.search("capital france")][-1] == question.id
    answer(store, second, "Oslo.")


def versions(path: Path) -> tuple[int, set[str]]:
    db = sqlite3.connect(path)
    names = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    version = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return version, names


NEXT = (*STEPS, ("ALTER TABLE chat ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'", "CREATE TABLE tag (x)"))


def test_a_later_version_is_reached_with_a_copy_left_behind(tmp_path: Path) -> None:
    store, chat_id = a_chat(tmp_path)
    store.close()
    newer = Database(store.path, steps=NEXT)
    (notice,) = newer.notices
    copy = store.path.with_name("chats.db.v1.bak")
    assert notice.kind == "history_migrated" and str(copy) in notice.detail
    with newer.reading() as db:
        assert db.execute("SELECT colour FROM chat").fetchone()[0] == "blue"
        assert db.execute("SELECT count(*) FROM message").fetchone()[0] == 2
    assert versions(store.path)[0] == len(NEXT) and "tag" in versions(store.path)[1]
    assert versions(copy)[0] == VERSION and "tag" not in versions(copy)[1]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    newer.close()
    newer = Database(store.path, steps=NEXT)
    assert newer.notices == ()
    # Today's edgellm does not touch what a later one wrote.
    newer.close()
    before = store.path.read_bytes()
    with pytest.raises(BadInputError, match=f"version {len(NEXT)}, this one knows up to {VERSION}"):
        store_in(tmp_path)
    assert store.path.read_bytes() == before
    copy.rename(store.path)
    assert texts(store_in(tmp_path), chat_id)[0].startswith("What")


def test_a_step_that_fails_changes_nothing(tmp_path: Path) -> None:
    store, chat_id = a_chat(tmp_path)
    store.close()
    broken = (*NEXT, ("CREATE TABLE fine (x)", "ALTER TABLE nothing ADD COLUMN y"))
    with pytest.raises(OutputError, match="nothing"):
        Database(store.path, steps=broken)
    assert versions(store.path)[0] == VERSION
    assert not versions(store.path)[1] & {"tag", "fine"}
    assert texts(store_in(tmp_path), chat_id)[0].startswith("What")


def test_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    path = chats_file(tmp_path)
    path.parent.mkdir()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.commit()
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(BadInputError, match="no chat history of edgellm"):
        store_in(tmp_path)
    assert path.read_bytes() == before and versions(path) == (0, {"theirs"})
    assert int.from_bytes(b"EDGE", "big") == APPLICATION_ID
