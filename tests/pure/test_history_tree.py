"""Chats as trees: edits, other answers and branches, against a plain model of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.contracts import ChatMessage, ContentPart, FinishReason, Notice, SamplingParams
from edgellm_models.errors import BadInputError, NotFoundError
from tests.support.history_world import answer, ask, finished, store_in, texts


class TreeModel:
    """Parents by id and the heads that there were, in order: all that a branch is decided by."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.texts: dict[str, str] = {}
        self.heads: list[str | None] = [None]

    def add(self, message_id: str, parent: str | None, text: str) -> None:
        self.parents[message_id], self.texts[message_id] = parent, text
        self.heads.append(message_id)

    def line(self, message_id: str | None) -> list[str]:
        found = []
        while message_id is not None:
            found.append(message_id)
            message_id = self.parents[message_id]
        return found[::-1]

    def last_below(self, message_id: str) -> str:
        return next(head for head in reversed(self.heads) if head and message_id in self.line(head))

    def children(self, parent: str | None) -> list[str]:
        return [each for each, found in self.parents.items() if found == parent]


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "edit", "regenerate", "select", "set_head"]), st.integers(0, 10_000)),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_every_sequence_of_edits_answers_and_branches_is_as_the_model_says(
    steps: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = store_in(Path(folder))
        chat, model = store.create_chat(), TreeModel()
        roles: dict[str, str] = {}

        def ask_under(parent: str | None) -> None:
            question = ask(store, chat.id, f"q{len(roles)}", parent)
            model.add(question.id, parent, f"q{len(roles)}")
            roles[question.id] = "user"
            answer_to(question.id)

        def answer_to(parent: str) -> None:
            text = f"a{len(roles)}"
            writer = store.begin_answer(chat.id, parent_id=parent, model="m", sampling=SamplingParams())
            writer.add(text)
            writer.finish(finished())
            model.add(writer.message_id, parent, text)
            roles[writer.message_id] = "assistant"

        for kind, number in steps:
            all_ids = list(roles)
            if kind == "ask" or not all_ids:
                ask_under(
                    model.heads[-1]
                    if model.heads[-1] is None or roles[model.heads[-1]] != "user"
                    else model.parents[model.heads[-1]]
                )
                continue
            chosen = all_ids[number % len(all_ids)]
            if kind == "edit":
                questions = [each for each in all_ids if roles[each] == "user"]
                ask_under(model.parents[questions[number % len(questions)]])
            elif kind == "regenerate":
                questions = [each for each in all_ids if roles[each] == "user"]
                answer_to(questions[number % len(questions)])
            elif kind == "select":
                assert store.select(chosen).head_id == model.last_below(chosen)
                model.heads.append(model.last_below(chosen))
            else:
                end = None if number % 5 == 0 else chosen
                store.set_head(chat.id, end)
                model.heads.append(end)
            head = model.heads[-1]
            branch = store.branch(chat.id)
            assert [each.id for each in branch] == model.line(head)
            assert [each.message.content for each in branch] == [model.texts[i] for i in model.line(head)]
            for each in branch:
                family = model.children(each.parent_id)
                assert (each.sibling, each.num_siblings) == (family.index(each.id) + 1, len(family))
                assert [found.id for found in store.siblings(each.id)] == family
        tree = store.tree(chat.id)
        assert {each.id: each.parent_id for each in tree} == model.parents
        assert store.get_chat(chat.id).num_messages == len(tree)
        store.close()


def test_an_edit_leaves_the_old_question_and_its_answers_where_they_were(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat()
    first = ask(store, chat.id, "Capital of France?")
    answer(store, first, "Paris.")
    second = ask(store, chat.id, "Capital of Norway?", first.parent_id)
    answer(store, second, "Oslo.")
    assert texts(store, chat.id) == ["Capital of Norway?", "Oslo."]
    store.select(first.id)
    assert texts(store, chat.id) == ["Capital of France?", "Paris."]


def test_what_an_answer_was_made_with_comes_back(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat(system="Be brief.")
    question = ask(store, chat.id, "Why?")
    sampling = SamplingParams(temperature=0.5, stop=("END",), logit_bias={3: -100.0})
    writer = store.begin_answer(chat.id, parent_id=question.id, model="tiny", sampling=sampling)
    writer.add("", "let me see")
    writer.add("Because.")
    writer.add_notice(Notice("trimmed", "2 messages are left out"))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    stored = writer.finish(finished(), tool_calls=[call])
    assert store.branch(chat.id)[-1] == stored
    assert stored.message == ChatMessage("assistant", "Because.", reasoning="let me see", tool_calls=(call,))
    assert stored.notices == (Notice("trimmed", "2 messages are left out"),)
    end = finished()
    assert (stored.usage, stored.timings, stored.draft) == (end.usage, end.timings, end.draft)
    assert (stored.finish_reason, stored.partial, stored.model) == (FinishReason.STOP, False, "tiny")
    assert stored.sampling["temperature"] == 0.5 and stored.sampling["seed"] == 7
    assert store.get_chat(chat.id).model == "tiny"
    assert store.conversation(chat.id)[:2] == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Why?"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a\0b",
        "\x1b[31mred\x1b]0;x\x07",
        "需要 😊 👨\u200d👩\u200d👧 é\u0301",
        "x" * 300_000,
        "'; DROP TABLE chat; --",
        "\u202eright to left",
        "a\r\nb\rc",
    ],
    ids=range(9),
)
def test_texts_are_kept_as_they_are(tmp_path: Path, text: str) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat()
    question = ask(store, chat.id, text)
    answer(store, question, text)
    assert [each.message.content for each in store_in(tmp_path).branch(chat.id)] == [text, text]
    parts = (ContentPart("text", text), ContentPart("text", "b"))
    store.add_message(chat.id, ChatMessage("tool", parts, tool_call_id="c", name="n"), parent_id=question.id)
    assert store.branch(chat.id)[-1].message == ChatMessage("tool", parts, tool_call_id="c", name="n")


def test_half_a_surrogate_pair_becomes_a_replacement(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat(title="\ud800")
    question = ask(store, chat.id, "a\ud83db")
    answer(store, question, "\udc00")
    assert texts(store, chat.id) == ["a\ufffdb", "\ufffd"]


def test_an_answer_without_text(tmp_path: Path) -> None:
    """Stopped or failed before its first token: the question stays, and roles still take turns."""
    store = store_in(tmp_path)
    chat = store.create_chat()
    first = answer(store, ask(store, chat.id, "one"), "1")
    question = ask(store, chat.id, "two", first.id)
    begin = {"parent_id": question.id, "model": "m", "sampling": SamplingParams()}
    assert store.begin_answer(chat.id, **begin).fail("no memory") is None
    assert store.get_chat(chat.id).head_id == question.id
    stopped = store.begin_answer(chat.id, **begin).finish(finished(FinishReason.CANCELLED))
    assert stopped.message.content == "" and store.get_chat(chat.id).head_id == stopped.id
    ask(store, chat.id, "three", stopped.id)
    roles = [(m.role, m.content) for m in store.conversation(chat.id)]
    assert roles == [("user", "one"), ("assistant", "1"), ("user", "three")]


def test_a_failed_answer_keeps_its_text_and_the_error(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat()
    question = ask(store, chat.id, "go")
    writer = store.begin_answer(chat.id, parent_id=question.id, model="m", sampling=SamplingParams())
    writer.add("half ")
    stored = writer.fail("NaN logits")
    assert stored is not None
    assert (stored.message.content, stored.finish_reason, stored.error) == (
        "half ",
        FinishReason.ERROR,
        "NaN logits",
    )


def test_titles_come_from_the_first_question_until_somebody_gives_one(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chat = store.create_chat()
    ask(store, chat.id, "\n  What   is\tthis?\nmore")
    assert store.get_chat(chat.id).title == "What is this?"
    store.update_chat(chat.id, title="Renamed", pinned=True, params={"a": 1})
    ask(store, chat.id, "Another")
    found = store.get_chat(chat.id)
    assert (found.title, found.pinned, found.params) == ("Renamed", True, {"a": 1})
    long = store.create_chat()
    ask(store, long.id, "word " * 50)
    assert store.get_chat(long.id).title == "word " * 14 + "word…"


def test_lists_are_by_use_and_deleting_is_soft_until_it_is_not(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chats = [store.create_chat(title=str(number)) for number in range(4)]
    ask(store, chats[1].id, "again")
    store.update_chat(chats[0].id, pinned=True)
    assert [chat.title for chat in store.list_chats()] == ["0", "1", "3", "2"]
    assert [chat.title for chat in store.list_chats(limit=2, offset=1)] == ["1", "3"]
    store.delete_chat(chats[1].id)
    assert [chat.title for chat in store.list_chats()] == ["0", "3", "2"]
    assert [chat.title for chat in store.list_chats(deleted=True)] == ["1"]
    with pytest.raises(NotFoundError):
        store.find_chat(chats[1].id)
    assert store.find_chat(chats[1].id[:8], deleted=True).id == chats[1].id
    store.restore_chat(chats[1].id)
    assert texts(store, chats[1].id) == ["again"]
    store.purge_chat(chats[1].id)
    for gone in (store.get_chat, store.branch, store.tree, store.delete_chat, store.purge_chat):
        with pytest.raises(NotFoundError):
            gone(chats[1].id)


def test_deleted_chats_go_after_30_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    store = store_in(tmp_path)
    old, young = store.create_chat(title="old"), store.create_chat(title="young")
    now = time.time()
    for chat, days in ((old, 31), (young, 29)):
        monkeypatch.setattr(time, "time", lambda days=days: now - days * 86400)
        store.delete_chat(chat.id)
    monkeypatch.setattr(time, "time", lambda: now)
    assert [chat.title for chat in store_in(tmp_path).list_chats(deleted=True)] == ["young"]


def test_ids_are_found_by_their_beginning(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    chats = [store.create_chat() for _ in range(20)]
    for chat in chats:
        assert store.find_chat(chat.id[:31].upper()).id == chat.id
    shared = {chat.id[0] for chat in chats if sum(other.id[0] == chat.id[0] for other in chats) > 1}
    with pytest.raises(BadInputError, match="several chats"):
        store.find_chat(shared.pop())  # 20 ids, 16 digits
    for prefix in ("", "xyz", "%", "g"):
        with pytest.raises(NotFoundError):
            store.find_chat(prefix)


def test_messages_of_another_chat_are_no_parents(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    one, two = store.create_chat(), store.create_chat()
    question = ask(store, one.id, "here")
    calls: list[Any] = [
        lambda: ask(store, two.id, "there", question.id),
        lambda: store.set_head(two.id, question.id),
        lambda: store.begin_answer(two.id, parent_id=question.id, model="", sampling=SamplingParams()),
        lambda: store.branch(two.id, question.id),
        lambda: ask(store, "nothing", "x"),
        lambda: store.select("nothing"),
    ]
    for call in calls:
        with pytest.raises(NotFoundError):
            call()
    assert store.tree(two.id) == []
