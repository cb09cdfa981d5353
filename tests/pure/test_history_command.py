"""``edgellm history`` on a store with a few chats: lists, JSON, ids by their beginning, removal and back."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.cli.main import run
from edgellm.cli.saved_chats import kv_files
from edgellm.history.store import HistoryStore
from edgellm.locations import Locations
from tests.support.history_world import answer, ask, store_in

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def store() -> HistoryStore:
    store = store_in(Locations.from_environment().data)
    evil = store.create_chat(title="\x1b]0;owned\x07 two\nlines")
    answer(store, ask(store, evil.id, "\x1b[31mred"), "cap\x9bital")
    chat = store.create_chat(system="Be brief.")
    first = ask(store, chat.id, "Capital of France?")
    answer(store, first, "Paris.")
    answer(store, first, "It is Paris.")
    return store


@pytest.fixture
def history(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert run(["history", *arguments]) == code
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return found.out, found.err

    return call


def test_list_and_search_are_one_safe_line_each(store: HistoryStore, history: Command) -> None:
    capital, evil = store.list_chats()
    out, errors = history("list")
    first, second = out.splitlines()
    assert first.startswith(capital.id[:8]) and first.endswith("  3  Capital of France?")
    assert "␛]0;owned␇ two lines" in second and errors == ""
    out, errors = history("list", "-n", "1")
    assert out.count("\n") == 1 and "more than 1" in errors
    assert [chat["id"] for chat in json.loads(history("list", "--json")[0])["chats"]] == [capital.id, evil.id]
    hits = json.loads(history("search", "capital", "fran", "--json")[0])["hits"]
    assert {hit["chat_id"] for hit in hits} == {capital.id}
    out, _ = history("search", "31m")
    assert "\x1b" not in out and evil.id[:8] in out
    assert history("search", "nowhere") == ("", "nothing was found\n")


def test_show_and_export(store: HistoryStore, history: Command, tmp_path: Path) -> None:
    chat = store.list_chats()[0]
    out, errors = history("show", chat.id[:7])
    assert out.endswith(
        "\nsystem:\nBe brief.\n\nuser:\nCapital of France?\n\nassistant (tiny) 2/2:\nIt is Paris.\n"
    )
    assert "1 message of other branches" in errors
    assert len(json.loads(history("show", "last", "--json")[0])["messages"]) == 3
    assert "Paris.\n" in history("export", "last")[0]
    for name, beginning in (
        ("chat.md", "# Capital of France?"),
        ("chat.json", '{\n  "format": "edgellm-chat"'),
    ):
        target = tmp_path / name
        history("export", chat.id, "-o", str(target))
        assert target.read_text(encoding="utf-8").startswith(beginning)
        assert os.name != "posix" or stat.S_IMODE(target.stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 2
    assert "cannot write" in history("export", "last", "-o", str(tmp_path / "no" / "x.md"), code=73)[1]


def test_removing_is_soft_and_purging_is_not(store: HistoryStore, history: Command) -> None:
    chat, other = store.list_chats()
    kv = kv_files().prepare(chat.id)
    kv.write_bytes(b"kv")
    out, errors = history("rm", chat.id[:8])
    assert out.startswith(f"removed {chat.id[:8]}") and "--restore" in errors
    assert not kv.exists()
    assert [found["id"] for found in json.loads(history("list", "--deleted", "--json")[0])["chats"]] == [
        chat.id
    ]
    history("show", chat.id[:8], code=66)
    assert json.loads(history("rm", "--restore", "--json", chat.id[:8])[0]) == {"restored": [chat.id]}
    assert "add -y" in history("rm", "--purge", chat.id[:8], code=2)[1]
    history("rm", chat.id[:8])
    history("rm", "--purge", "-y", chat.id[:8], other.id[:8])
    assert history("list") == ("", "no saved chats; edgellm chat begins one\n")
    assert store.list_chats(deleted=True) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show",), 2, "ID"),
        (("show", "zz"), 66, "no id of a chat"),
        (("export", "last"), 66, "no saved chats"),
        (("rm", "--purge", "--restore", "aaaa"), 2, "do not go together"),
        (("export", "--json", "--markdown", "last"), 2, "two forms"),
        (("search", "\udce9"), 65, "not valid UTF-8"),
    ],
)
def test_mistakes_are_one_line(history: Command, arguments: tuple[str, ...], code: int, words: str) -> None:
    out, errors = history(*arguments, code=code)
    assert out == "" and errors.count("\n") == 1 and words in errors
