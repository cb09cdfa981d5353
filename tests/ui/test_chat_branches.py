"""Regenerate, edit, branch and reopen: every version is kept, in memory and in the SQLite store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from textual import events

from edgellm.contracts import ChatMessage, ChatStore, FinishReason, SamplingParams
from edgellm.history.store import HistoryStore
from edgellm_models.errors import Notice, OutputError
from edgellm_tui.app import EdgeChat
from edgellm_tui.screens.history import HistoryScreen
from edgellm_tui.settings import ChatSettings
from edgellm_tui.unsaved import MemoryStore, text_of
from edgellm_tui.widgets.status_line import TopBar
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import burst, chat_screen, prompt, replies, send, shown, status, until

HELD = Script(pieces=["The ", "capital "], hold_after=2)
LONG_WAIT = 30.0


@pytest.fixture(params=["memory", "sqlite"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ChatStore]:
    if request.param == "memory":
        return MemoryStore
    return lambda: HistoryStore(tmp_path / "history" / "chats.db")


def talk(app: EdgeChat) -> list[str]:
    """Questions and answers as they are mounted."""
    return [getattr(widget, "text", "") for widget in chat_screen(app)._transcript.messages()]


def test_regenerate_edit_and_go_through_versions(make_store: Callable[[], ChatStore]) -> None:
    async def scenario() -> None:
        backend = FakeBackend(*(Script(pieces=[text]) for text in ("one", "two", "three", "four")))
        store = make_store()
        app = EdgeChat(backend, store=store)
        async with app.run_test(size=(90, 30)) as pilot:
            await send(pilot, app, "first?")
            await pilot.press("ctrl+r")
            await until(
                pilot, lambda: talk(app) == ["first?", "two"] and not chat_screen(app).generating, "again"
            )
            assert [m.content for m in backend.calls[1][1]] == ["first?"]
            assert "‹ 2/2 ›" in shown(app)
            await send(pilot, app, "second?")
            assert [m.content for m in backend.calls[2][1]] == ["first?", "two", "second?"]
            await pilot.press("ctrl+e")
            assert prompt(app).text == "second?"
            await send(pilot, app, "another?")
            assert talk(app) == ["first?", "two", "another?", "four"]
            assert [m.content for m in backend.calls[3][1]] == ["first?", "two", "another?"]

            await pilot.press("alt+left")  # acts on the last fork: the edited question
            await until(
                pilot, lambda: talk(app) == ["first?", "two", "second?", "three"], "the question before"
            )
            await pilot.press("alt+left")
            assert "first version" in status(app).hint
            await pilot.press("alt+up", "alt+left")  # the fork above: the regenerated answer
            await until(pilot, lambda: talk(app) == ["first?", "one"], "the other branch")
            await pilot.press("alt+right")
            await until(pilot, lambda: talk(app) == ["first?", "two", "second?", "three"], "as it was left")
            chat = chat_screen(app)._conversation.chat_id
            assert chat is not None
            assert len(store.tree(chat)) == 7  # nothing is ever taken away
            await pilot.press("alt+down", "alt+right")
            await until(pilot, lambda: talk(app)[-1] == "four", "newest again")

    asyncio.run(scenario())


def test_a_stopped_answer_is_saved_and_the_chat_reopens(make_store: Callable[[], ChatStore]) -> None:
    async def scenario() -> None:
        store = make_store()
        notice = Notice("context_trimmed", "dropped the oldest turn")
        backend = FakeBackend(Script(pieces=["whole"], notices=[notice]), HELD)
        app = EdgeChat(backend, store=store)
        async with app.run_test(size=(90, 30)) as pilot:
            await send(pilot, app, "one?")
            await send(pilot, app, "two?", wait=False)
            await until(pilot, lambda: "capital" in shown(app), "partial text")
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")
            chat = store.list_chats()[0]
            saved = store.branch(chat.id)
            assert [text_of(m.message) for m in saved] == ["one?", "whole", "two?", "The capital "]
            assert saved[-1].finish_reason is FinishReason.CANCELLED
            assert chat.title == "one?" and chat.model == "smollm2-135m"
            await pilot.press("ctrl+n")
            assert talk(app) == []
            await pilot.press("ctrl+s")
            await until(
                pilot, lambda: isinstance(app.screen, HistoryScreen) and "one?" in shown(app), "listed"
            )
            await pilot.press("enter")
            await until(pilot, lambda: not app.screen.is_modal and len(talk(app)) == 4, "opened")
            await until(pilot, lambda: "stopped" in shown(app), "how it ended")
            assert "dropped the oldest turn" in shown(app)
            assert chat_screen(app).query_one(TopBar).title == "one?"
            await send(pilot, app, "three?", wait=False)
            await until(pilot, lambda: len(backend.calls) == 3, "asked")
            assert backend.calls[2][0] == chat.id
            assert len(backend.calls[2][1]) == 5

    asyncio.run(scenario())


def test_text_is_in_the_store_while_it_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = HistoryStore(tmp_path / "chats.db")
        app = EdgeChat(FakeBackend(HELD), store=store)
        async with app.run_test() as pilot:
            await send(pilot, app, "Go", wait=False)

            def saved() -> list[str]:
                return [text_of(m.message) for m in store.branch(store.list_chats()[0].id)]

            await until(pilot, lambda: replies(app) and "capital" in shown(app), "partial text")
            await until(pilot, lambda: saved() == ["Go", "The capital "], "on the disk", timeout_s=LONG_WAIT)
            assert store.branch(store.list_chats()[0].id)[-1].partial
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_escape_in_one_breath_with_enter_asks_nothing_and_keeps_the_question() -> None:
    """H07: the Esc that comes with the Enter is not lost, whichever widget is faster."""

    async def scenario() -> None:
        backend = FakeBackend(HELD, Script(pieces=["fine"]))
        app = EdgeChat(backend)
        async with app.run_test(size=(90, 30)) as pilot:
            burst(app, "Hi\r")
            escape = events.Key("escape", "\x1b")
            escape.set_sender(app)
            app._driver.send_message(escape)  # type: ignore[union-attr]
            await until(pilot, lambda: "■ stopped" in shown(app), "stopped", timeout_s=LONG_WAIT)
            assert not chat_screen(app).generating
            asked = len(backend.calls)
            assert asked <= 1
            backend.scripts = [Script(pieces=["fine"])]
            await pilot.press("ctrl+r")
            await until(pilot, lambda: "fine" in shown(app), "asked again")
            assert [m.content for m in backend.calls[-1][1]][:1] == ["Hi"]

    asyncio.run(scenario())


def test_escape_ends_editing_and_the_question_stays() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=["yes"])))
        async with app.run_test() as pilot:
            await send(pilot, app, "first?")
            await pilot.press("ctrl+e", "x", "escape")
            assert prompt(app).text == ""
            await send(pilot, app, "second?")
            assert talk(app) == ["first?", "yes", "second?", "yes"]

    asyncio.run(scenario())


def test_a_question_that_failed_is_not_asked_twice() -> None:
    async def scenario() -> None:
        backend = FakeBackend(Script(pieces=[], error="lost"), Script(pieces=["fine"]))
        store = MemoryStore()
        app = EdgeChat(backend, store=store)
        async with app.run_test() as pilot:
            await send(pilot, app, "Hi")
            await until(pilot, lambda: "lost" in shown(app), "error")
            await pilot.press("enter")
            await until(pilot, lambda: "fine" in shown(app), "answer")
            assert talk(app) == ["Hi", "fine"]
            assert len(store.tree(store.list_chats()[0].id)) == 2

    asyncio.run(scenario())


def test_regenerating_with_a_fixed_choice_says_that_nothing_will_change() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(), settings=ChatSettings(sampling=SamplingParams(temperature=0.0)))
        async with app.run_test() as pilot:
            await pilot.press("ctrl+r")
            assert "no question" in status(app).hint
            await send(pilot, app, "Hi")
            await pilot.press("ctrl+r")
            await until(pilot, lambda: "temperature 0" in status(app).hint, "said")
            await until(pilot, lambda: not chat_screen(app).generating, "the answer ends")

    asyncio.run(scenario())


def test_a_store_that_refuses_costs_neither_the_question_nor_the_screen() -> None:
    class Full(MemoryStore):
        def add_message(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            raise OutputError("the disk is full")

    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend, store=Full())
        async with app.run_test() as pilot:
            await send(pilot, app, "precious words")
            await until(pilot, lambda: "the disk is full" in shown(app), "said")
            assert prompt(app).text == "precious words"
            assert backend.calls == []

    asyncio.run(scenario())


def test_a_long_chat_mounts_its_end_and_the_rest_when_asked() -> None:
    async def scenario() -> None:
        from edgellm.contracts import ChatMessage

        store = MemoryStore()
        chat = store.create_chat(title="long")
        parent = None
        for n in range(80):
            role = "user" if n % 2 == 0 else "assistant"
            parent = store.add_message(chat.id, ChatMessage(role, f"message {n}"), parent_id=parent).id
        app = EdgeChat(FakeBackend(), store=store, chat_id=chat.id)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "message 79" in shown(app), "the end")
            assert len(talk(app)) == 24
            await pilot.press("ctrl+home")
            await until(pilot, lambda: len(talk(app)) == 48, "more")
            assert talk(app)[0] == "message 32"

    asyncio.run(scenario())


class KeepingBackend(FakeBackend):
    """Notes what it is to take up and to put by."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts)
        self.kept: list[tuple[str, str, int]] = []

    async def take_up(self, conversation_id: str, tokens: int) -> Sequence[Notice]:
        self.kept.append(("take up", conversation_id, tokens))
        return [Notice("kv_refused", "the saved KV of this chat is not used: it is of another model")]

    async def put_by(
        self, conversation_id: str, messages: Sequence[ChatMessage], tokens: int
    ) -> Sequence[Notice]:
        assert not self.closed
        self.kept.append(("put by", conversation_id, tokens))
        return []


def test_the_engine_keeps_what_it_computed_of_saved_chats(tmp_path: Path) -> None:
    """Once for each chat that it answered in: when that is left, and at the end; never of unsaved ones."""

    async def scenario(store: HistoryStore | None) -> list[tuple[str, str, int]]:
        backend = KeepingBackend(Script())
        app = EdgeChat(backend, store=store)
        async with app.run_test() as pilot:
            await send(pilot, app, "One")
            await pilot.press("ctrl+n")
            await until(pilot, lambda: not replies(app), "a new chat")
            await pilot.press("ctrl+s", "enter")
            await until(pilot, lambda: replies(app), "the first one again")
            if store is not None:
                await until(pilot, lambda: "of another model" in shown(app), "told")
        return backend.kept

    kept = asyncio.run(scenario(HistoryStore(tmp_path / "chats.db")))
    assert [what for what, _, _ in kept] == ["put by", "take up"]
    assert len({chat for _, chat, _ in kept}) == 1 and all(tokens > 0 for _, _, tokens in kept)
    assert asyncio.run(scenario(None)) == []


def test_an_answered_chat_is_put_by_before_the_engine_ends(tmp_path: Path) -> None:
    async def scenario() -> list[tuple[str, str, int]]:
        backend = KeepingBackend(Script())
        app = EdgeChat(backend, store=HistoryStore(tmp_path / "chats.db"))
        async with app.run_test() as pilot:
            await send(pilot, app, "One")
            await pilot.press("ctrl+q")
        assert app.return_code == 0 and backend.closed
        return backend.kept

    [(what, _, tokens)] = asyncio.run(scenario())
    assert what == "put by" and tokens > 0
