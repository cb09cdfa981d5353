"""Where a person is in a chat: places that a search found, long questions, commands beside an answer."""

from __future__ import annotations

import asyncio

import pytest

from edgellm.contracts import ChatMessage
from edgellm_tui.app import EdgeChat
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.screens.history import HistoryScreen
from edgellm_tui.screens.parameters import ParametersScreen
from edgellm_tui.unsaved import MemoryStore
from edgellm_tui.widgets.stats_panel import StatsPanel
from edgellm_tui.widgets.transcript import END_LINES, Transcript, UserMessage, shortened
from tests.support.fake_backend import FakeBackend, Script
from tests.ui.screen_support import chat_app, chat_screen, prompt, replies, send, shown, status, until

# --- found places ---


def long_chat() -> MemoryStore:
    """Sixty questions; before the 10th a fork, of which the other branch speaks of a heron."""
    store = MemoryStore()
    chat = store.create_chat(model="m", title="Birds")
    parent: str | None = None

    def say(role: str, text: str) -> None:
        nonlocal parent
        parent = store.add_message(chat.id, ChatMessage(role, text), parent_id=parent).id

    for number in range(9):
        say("user", f"Question {number}")
        say("assistant", f"Answer {number}")
    fork = parent
    say("user", "Which bird is that?")
    say("assistant", "A grey heron.")
    parent = fork
    for number in range(9, 60):
        say("user", f"Question {number}")
        say("assistant", f"Answer {number}, about the kingfisher" if number == 12 else f"Answer {number}")
    return store


@pytest.mark.parametrize(
    ("words", "seen", "not_seen"),
    [
        ("heron", "A grey heron.", "Question 59"),
        ("kingfisher", "Answer 12, about the kingfisher", "Question 59"),
    ],
)
def test_a_search_opens_the_chat_at_the_place_that_was_found(words: str, seen: str, not_seen: str) -> None:
    """On another branch, and far above what is mounted at first."""

    async def scenario() -> None:
        app = EdgeChat(FakeBackend(), store=long_chat())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("ctrl+f", *words)
            assert isinstance(app.screen, HistoryScreen)
            await until(pilot, lambda: "Birds" in shown(app) and words in shown(app), "found")
            await until(pilot, lambda: app.screen._rows and app.screen._rows[0].hit is not None, "listed")  # type: ignore[attr-defined]
            await pilot.press("enter")
            await until(pilot, lambda: seen in shown(app) and "Search in" not in shown(app), "the place")
            assert not_seen not in shown(app)
            await pilot.press("ctrl+end")
            if words == "kingfisher":
                await until(pilot, lambda: "Question 59" in shown(app), "the end is still there")

    asyncio.run(scenario())


def test_an_empty_list_of_chats_says_what_to_do() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("ctrl+s")
            await until(pilot, lambda: "each question begins one" in shown(app), "no chats")
            await pilot.press("escape")
            await send(pilot, app, "Paris?")
            await pilot.press("ctrl+s", *"xyz")
            await until(pilot, lambda: "fewer words find more" in shown(app), "nothing found")
            await pilot.press(*["backspace"] * 3)
            await until(pilot, lambda: "Enter open" in shown(app), "the keys again")

    asyncio.run(scenario())


# --- long questions ---


def test_what_is_left_out_of_a_long_question() -> None:
    assert shortened("a\nb") is None and shortened("x" * 4000) is None
    lines = [f"line {n}" for n in range(500)]
    head, left_out, tail = shortened("\n".join(lines)) or ("", "", "")
    assert head.split("\n") == lines[:END_LINES] and tail.split("\n") == lines[-END_LINES:]
    assert "490 more lines" in left_out
    head, left_out, tail = shortened("x" * 2_000_000) or ("", "", "")
    assert f"{2_000_000 - len(head) - len(tail):,} more characters" in left_out


def test_a_long_question_is_shown_by_its_ends_and_whole_when_it_is_clicked() -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = chat_app(backend)
        async with app.run_test(size=(80, 60)) as pilot:
            text = "\n".join(f"line {n} of what was pasted" for n in range(40))
            await send(pilot, app, text)
            assert backend.calls[0][1][-1].content == text
            page = shown(app)
            assert "line 0 of" in page and "line 39 of" in page and "line 20 of" not in page
            assert "30 more lines" in page
            await pilot.click(UserMessage)
            await until(pilot, lambda: "line 20 of" in shown(app), "whole")
            await pilot.click(UserMessage)
            await until(pilot, lambda: "line 20 of" not in shown(app), "its ends")
            await pilot.press("ctrl+e")
            assert prompt(app).text == text

    asyncio.run(scenario())


# --- beside an answer ---


def test_commands_that_need_not_wait_are_done_while_an_answer_is_written() -> None:
    async def scenario() -> None:
        app = chat_app(FakeBackend(Script(pieces=["one ", "two "], hold_after=2)))
        async with app.run_test(size=(80, 30)) as pilot:
            await send(pilot, app, "Hi", wait=False)
            await until(pilot, lambda: replies(app) and replies(app)[0].text == "one two ", "text")
            await send(pilot, app, "/stats", wait=False)
            assert chat_screen(app).query_one(StatsPanel).display and prompt(app).text == ""
            await send(pilot, app, "/set temperature 0.5", wait=False)
            assert "0.5" in status(app).hint
            await send(pilot, app, "/new", wait=False)  # this one would take the answer away
            assert prompt(app).text == "/new" and "Still answering" in status(app).hint
            assert chat_screen(app).generating
            await pilot.press("escape")
            await until(pilot, lambda: not chat_screen(app).generating, "stopped")

    asyncio.run(scenario())


def test_every_other_name_of_a_command_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    edited: list[str] = []
    monkeypatch.setattr(ChatScreen, "action_external_editor", lambda self: edited.append("yes"))

    async def scenario() -> None:
        backend = FakeBackend()
        app = chat_app(backend)
        async with app.run_test(size=(80, 30)) as pilot:
            await send(pilot, app, "/set temperature 0.5")
            await send(pilot, app, "/set top-k 7")
            await send(pilot, app, "/reset")
            assert chat_screen(app)._conversation.params == {} and "as the model" in status(app).hint
            await send(pilot, app, "Paris?")
            await send(pilot, app, "/retry")
            await until(pilot, lambda: len(backend.calls) == 2, "asked again")
            await send(pilot, app, "/regen")
            await until(pilot, lambda: len(backend.calls) == 3 and "3/3" in shown(app), "and again")
            for name, kind in (
                ("chats", HistoryScreen),
                ("history", HistoryScreen),
                ("search capital", HistoryScreen),
                ("parameters", ParametersScreen),
                ("help", HelpScreen),
            ):
                await send(pilot, app, f"/{name}", wait=False)
                await until(pilot, lambda kind=kind: isinstance(app.screen, kind), name)  # type: ignore[misc]
                if name.startswith("search"):
                    await until(pilot, lambda: "The capital of France" in shown(app), "found")
                await pilot.press("escape")
            await send(pilot, app, "/editor", wait=False)
            assert edited == ["yes"]
            await send(pilot, app, "/exit", wait=False)
        assert app.return_code == 0

    asyncio.run(scenario())


def test_ctrl_u_and_ctrl_k_take_the_whole_line_however_it_is_wrapped() -> None:
    async def scenario() -> None:
        app = chat_app(FakeBackend())
        async with app.run_test(size=(40, 12)) as pilot:
            words = "a line of words that is far longer than the window is wide"
            prompt(app).replace_text(f"first\n{words}")
            await pilot.press("ctrl+u")
            assert prompt(app).text == "first\n"
            await pilot.press("ctrl+u")  # at its beginning it is joined with the one above
            assert prompt(app).text == "first"
            prompt(app).replace_text(words)
            prompt(app).move_cursor((0, 2))
            await pilot.press("ctrl+k")
            assert prompt(app).text == "a "

    asyncio.run(scenario())


def test_the_panel_is_up_to_date_soon_after_an_answer() -> None:
    """A server's counters are asked in the background: the first that are known may be those of before."""

    async def scenario() -> None:
        backend = FakeBackend()
        app = chat_app(backend, stats_interval_s=0.01, panel=True)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: backend.stats_reads >= 3, "asked in the beginning")
            await send(pilot, app, "Hi")
            reads = backend.stats_reads
            await until(pilot, lambda: backend.stats_reads >= reads + 2, "asked again")
            assert chat_screen(app).query_one(Transcript).scroller.at_end

    asyncio.run(scenario())
