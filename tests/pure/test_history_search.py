"""Searching saved chats by the index and without one, and what is given away of a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.contracts import FinishReason, Notice, SamplingParams
from edgellm.history.search import excerpt_of, terms_of
from edgellm.history.store import HistoryStore
from edgellm_models.errors import BadInputError
from tests.support.history_world import answer, ask, finished, store_in


@pytest.fixture(params=["index", "reading"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HistoryStore:
    return store_in(tmp_path, use_fts=request.param == "index")


def found(store: HistoryStore, text: str) -> set[str]:
    with_titles = store.search(text)
    return {
        store.branch(hit.chat.id, hit.message_id)[-1].message.content for hit in with_titles if hit.message_id
    }  # type: ignore[misc]


def test_words_beginnings_phrases_and_scripts_without_spaces(store: HistoryStore) -> None:
    chat = store.create_chat(title="x")
    messages = [
        "The quick brown fox",
        "A brown, quick dog",
        "Käsespätzle à la crème",
        "法国的首都是巴黎",
        "50% off_now",
    ]
    for message in messages:
        answer(store, ask(store, chat.id, message), "ok")
    fox, dog, cheese, paris, percent = messages
    for text, expected in {
        "quick brown": {fox, dog},
        "QUICK bro": {fox, dog},
        '"quick brown"': {fox},
        '"quick brown': {fox},
        "quick cat": set(),
        "kasespatzle creme": {cheese},
        "首都": {paris},
        "巴黎 法国": {paris},
        "50%": {percent},
        "%": {percent},
        "off_now": {percent},
        "": set(),
        '""': set(),
        "   ": set(),
        "AND": set(),
        "quick OR": set(),
        "text:quick": set(),
        "quick*": set() if not store._database.has_fts else {fox, dog},
    }.items():
        assert found(store, text) == expected, text


def test_titles_are_found_and_deleted_chats_are_not(store: HistoryStore) -> None:
    one, two = store.create_chat(title="Paris trip"), store.create_chat()
    ask(store, two.id, "a trip to Oslo")
    assert [(hit.role, hit.message_id is None) for hit in store.search("paris")] == [("title", True)]
    assert {hit.chat.id for hit in store.search("trip")} == {one.id, two.id}
    store.delete_chat(two.id)
    assert [hit.chat.id for hit in store.search("trip")] == [one.id]
    store.restore_chat(two.id)
    assert {hit.chat.id for hit in store.search("trip")} == {one.id, two.id}
    store.purge_chat(two.id)
    assert [hit.chat.id for hit in store.search("trip")] == [one.id]


def test_an_edited_question_and_thinking_are_found(store: HistoryStore) -> None:
    chat = store.create_chat(title="t")
    first = ask(store, chat.id, "zebra")
    ask(store, chat.id, "giraffe", first.parent_id)
    writer = store.begin_answer(chat.id, parent_id=first.id, model="", sampling=SamplingParams())
    writer.add("No.", reasoning="Perhaps an okapi?")
    writer.finish(finished())
    assert found(store, "zebra") == {"zebra"} and found(store, "giraffe") == {"giraffe"}
    (hit,) = store.search("okapi")
    assert hit.excerpt == "Perhaps an okapi?" and hit.marks == ((11, 16),)


@settings(max_examples=80, deadline=None)
@given(text=st.one_of(st.text(max_size=40), st.text("quickbrown 50%", max_size=12)))
def test_no_query_is_an_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-query"
    exists = folder.exists()
    folder.mkdir(exist_ok=True)
    store = store_in(folder)
    if not exists:
        ask(store, store.create_chat().id, "The quick brown fox; 50%")
    by_index = {(hit.chat.id, hit.message_id) for hit in store.search(text)}
    store.close()
    plain = store_in(folder, use_fts=False)
    by_reading = {(hit.chat.id, hit.message_id) for hit in plain.search(text)}
    plain.close()
    if all(word.isascii() and word.isalnum() for word in text.split()):
        assert by_index <= by_reading  # which also finds what stands inside of words


def test_without_fts5_it_is_said_and_what_was_purged_leaves_the_index_later(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat, other = store.create_chat(title="a"), store.create_chat(title="b")
    answer(store, ask(store, chat.id, "secretword one"), "x")
    answer(store, ask(store, other.id, "kept two"), "y")
    store.close()
    plain = store_in(tmp_path, use_fts=False)
    assert [notice.kind for notice in plain.notices] == ["history_no_index"]
    answer(plain, ask(plain, other.id, "written without"), "z")
    plain.purge_chat(chat.id)
    plain.close()
    store = store_in(tmp_path)
    assert store.notices == ()
    assert store.search("secretword") == []
    assert found(store, "kept") == {"kept two"} and found(store, "without") == {"written without"}
    store.close()
    assert b"secretword" not in b"".join(p.read_bytes() for p in store.path.parent.iterdir())


def test_what_is_purged_is_nowhere_in_the_files(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(20):
        chat = store.create_chat(title="t")
        answer(store, ask(store, chat.id, f"secretword {number}"), "secretanswer " * 400)
    assert store.search("secretword")
    for chat in store.list_chats():
        store.purge_chat(chat.id)
    data = b"".join(path.read_bytes() for path in store.path.parent.iterdir())
    assert b"secret" not in data


def test_excerpts_mark_what_was_found() -> None:
    text = "word " * 100 + "Das KÄSE-Brot\nund der Käse\x1b[31m " + "more " * 100
    excerpt, marks = excerpt_of(text, terms_of("kase"))
    assert [excerpt[a:b] for a, b in marks] == ["KÄSE", "Käse"]
    assert "\n" not in excerpt and len(excerpt) < 170 and excerpt[0] == excerpt[-1] == "…"


def test_markdown_and_json(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat(title="Capitals", system="Be brief.")
    first = ask(store, chat.id, "Capital of France?")
    answer(store, first, "```py\nprint('Paris')\n```")
    writer = store.begin_answer(chat.id, parent_id=first.id, model="tiny", sampling=SamplingParams())
    writer.add("It is Par", reasoning="hm\nhm")
    writer.add_notice(Notice("k", "d"))
    writer.finish(finished(FinishReason.CANCELLED))
    text = store.export(chat.id, "markdown")
    assert text.startswith("# Capitals\n")
    assert text.endswith(
        "\n## System\n\nBe brief.\n\n## You\n\nCapital of France?\n\n## Answer (tiny)\n\n> hm\n> hm\n\n"
        "It is Par\n\n*(stopped)*\n"
    )
    data = json.loads(store.export(chat.id, "json"))
    assert (data["format"], data["version"], data["chat"]["system"]) == ("edgellm-chat", 1, "Be brief.")
    assert [m["content"] for m in data["messages"]] == [
        "Capital of France?", "```py\nprint('Paris')\n```", "It is Par"
    ]  # fmt: skip
    assert data["messages"][2]["parent_id"] == first.id
    assert data["messages"][2]["usage"]["completion_tokens"] == 5
    assert data["messages"][2]["finish_reason"] == "cancelled"
    with pytest.raises(BadInputError, match="html"):
        store.export(chat.id, "html")
