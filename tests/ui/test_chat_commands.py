"""Every slash command and every key of the table does what the help says."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input

from edgellm.contracts import MemoryPlan, ModelInfo, SamplingParams, SearchHit
from edgellm.history.store import HistoryStore
from edgellm_models.errors import PullProgress, TransferError
from edgellm_tui.app import EdgeChat
from edgellm_tui.commands import COMMANDS, SLASH, completions
from edgellm_tui.files import load_prompts
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.screens.history import HistoryScreen, by_chat, row_content
from edgellm_tui.screens.models import ModelsScreen
from edgellm_tui.screens.parameters import ParametersScreen
from edgellm_tui.settings import ChatSettings
from edgellm_tui.unsaved import MemoryStore
from edgellm_tui.widgets.stats_panel import StatsPanel
from edgellm_tui.widgets.status_line import TopBar
from tests.support.fake_backend import FAKE_MODEL, FakeBackend, Script
from tests.ui.screen_support import chat_app, chat_screen, prompt, replies, send, shown, status, until

CODE = "Look:\n\n```python\na = 1\n```\n\nand\n\n```\nb\n```\n"


def test_every_command_has_its_action_and_its_names_are_unique() -> None:
    for command in COMMANDS:
        assert callable(getattr(ChatScreen, f"action_{command.name}")), command.name
    slash = [name for command in COMMANDS for name in command.slash]
    assert len(slash) == len(set(slash)) == len(SLASH)
    keys = [key for command in COMMANDS for key in command.keys.split(",") if key]
    assert len(keys) == len(set(keys))
    promised = "help new model system set reset regen edit retry branch copy save export stats context think"
    promised += " compact clear quit"
    assert set(promised.split()) <= set(SLASH)


def test_copy_code_goes_backwards_through_the_blocks() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(Script(pieces=[CODE])))
        async with app.run_test() as pilot:
            await pilot.press("alt+c")
            assert "no code block" in status(app).hint
            await send(pilot, app, "Hi")
            await pilot.press("alt+c")
            assert app.clipboard == "b\n"
            await pilot.press("alt+c")
            assert app.clipboard == "a = 1\n"
            await send(pilot, app, "/code 1")
            assert app.clipboard == "a = 1\n" and "Block 1 of 2" in status(app).hint
            await send(pilot, app, "/code 3")
            assert "2 code blocks" in status(app).hint

    asyncio.run(scenario())


def test_set_system_and_the_next_question(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        app = EdgeChat(backend, store=(store := MemoryStore()))
        async with app.run_test(size=(100, 30)) as pilot:
            for command, said in (
                ("/set", "needs a name"),
                ("/set tmp 1", "did you mean temp"),
                ("/set temp hot", "must be a number"),
                ("/set top_p 7", "above 0 and at most 1"),
                ("/set temp 0.3", "Temperature: 0.3"),
            ):
                await send(pilot, app, command)
                assert said in status(app).hint, command
            await send(pilot, app, "/system Be brief.")
            await send(pilot, app, "Hi")
            assert backend.calls[0][2].temperature == 0.3
            assert [m.role for m in backend.calls[0][1]] == ["system", "user"]
            chat = store.list_chats()[0]
            assert chat.params == {"temperature": 0.3} and chat.system == "Be brief."
            await send(pilot, app, "/system")
            assert "system prompt: Be brief." in shown(app)
            await send(pilot, app, "/set temp")
            await send(pilot, app, "/system -")
            await send(pilot, app, "again")
            assert backend.calls[1][2].temperature == 1.0
            assert backend.calls[1][1][0].role == "user"

    asyncio.run(scenario())


def test_parameter_panel_shows_defaults_takes_values_and_refuses_wrong_ones() -> None:
    async def scenario() -> None:
        backend = FakeBackend()
        settings = ChatSettings(
            sampling=SamplingParams(temperature=0.2, top_k=40), sampling_origins={"temperature": "model"}
        )
        app = EdgeChat(backend, settings=settings)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("f3")
            assert isinstance(app.screen, ParametersScreen)
            await pilot.pause()
            assert "0.2 (model)" in shown(app) and "40" in shown(app)
            await pilot.press(*"9x", "enter")
            assert isinstance(app.screen, ParametersScreen)
            await pilot.pause()
            assert "must be a number" in shown(app)
            await pilot.press("backspace", "enter")
            assert isinstance(app.screen, ChatScreen)
            await send(pilot, app, "Hi")
            assert backend.calls[0][2] == SamplingParams(temperature=9.0, top_k=40)
            await pilot.press("f3", "ctrl+r", "enter")
            await send(pilot, app, "Hi")
            assert backend.calls[1][2] == settings.sampling
            await pilot.press("f3", "5", "escape")
            assert chat_screen(app)._conversation.params == {}

    asyncio.run(scenario())


def test_export_attach_and_context(tmp_path: Path) -> None:
    async def scenario() -> None:
        notes = tmp_path / "notes.txt"
        notes.write_text("```\nfenced\n```\n")
        backend = FakeBackend(count=123)
        app = chat_app(backend, save_folder=tmp_path)
        async with app.run_test(size=(100, 30)) as pilot:
            await send(pilot, app, "/export")
            assert "nothing to export" in status(app).hint
            await send(pilot, app, "/context")
            assert "empty" in status(app).hint
            await send(pilot, app, f"/attach {tmp_path / 'none.txt'}")
            assert "No such file" in status(app).hint
            (tmp_path / "pic.bin").write_bytes(b"\xff\xfe\x00")
            await send(pilot, app, f"/attach {tmp_path / 'pic.bin'}")
            assert "no UTF-8 text" in status(app).hint
            await send(pilot, app, f"/attach {notes}")
            assert "123 tokens" in status(app).hint
            await pilot.pause()
            assert "+ notes.txt (123 tokens)" in shown(app)
            await send(pilot, app, "What is it?")
            assert (
                backend.calls[0][1][0].content == "notes.txt:\n\n````\n```\nfenced\n```\n````\n\nWhat is it?"
            )
            await send(pilot, app, "/context")
            await pilot.pause()
            assert "context: 123 of 8,192 (2%) tokens" in shown(app)
            await send(pilot, app, "/export chat.json")
            assert json.loads((tmp_path / "chat.json").read_text())["messages"]
            await send(pilot, app, "/export chat.md")
            assert "What is it?" in (tmp_path / "chat.md").read_text()

    asyncio.run(scenario())


def test_branch_compact_rename_and_clear() -> None:
    async def scenario() -> None:
        backend = FakeBackend(Script(pieces=["yes"]))
        app = EdgeChat(backend, store=(store := MemoryStore()))
        async with app.run_test(size=(100, 30)) as pilot:
            for question in ("one", "two", "three"):
                await send(pilot, app, question)
            await send(pilot, app, "/branch 3")
            await send(pilot, app, "other")
            assert [m.content for m in backend.calls[-1][1]] == ["one", "yes", "other"]
            await pilot.press("alt+left")
            await until(pilot, lambda: "three" in shown(app), "the branch before")
            await send(pilot, app, "/rename Counting")
            await until(pilot, lambda: chat_screen(app).query_one(TopBar).title == "Counting", "title")
            await send(pilot, app, "/compact 1")
            await until(pilot, lambda: "2 oldest questions" in shown(app), "what was left out")
            await send(pilot, app, "and now?")
            assert [m.content for m in backend.calls[-1][1]] == ["three", "yes", "and now?"]
            await send(pilot, app, "/clear")
            await until(pilot, lambda: replies(app) == [], "empty")
            assert {chat.title for chat in store.list_chats()} == {"Counting", "Counting (continued)"}

    asyncio.run(scenario())


def test_history_finds_renames_deletes_and_brings_back() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        app = EdgeChat(FakeBackend(Script(pieces=["The Seine flows there."])), store=store)
        async with app.run_test(size=(100, 30)) as pilot:
            await send(pilot, app, "Paris?")
            await pilot.press("ctrl+n")
            await send(pilot, app, "Lyon?")
            await pilot.press("ctrl+f")
            assert isinstance(app.screen, HistoryScreen)
            screen = app.screen
            await pilot.press(*"seine")
            await until(pilot, lambda: "Seine flows" in shown(app), "the place found")
            await pilot.press(*(["backspace"] * 5), *"paris")
            await until(pilot, lambda: len(screen._rows) == 1, "one found")
            await pilot.press("ctrl+r", *" in May", "enter")
            await until(pilot, lambda: "Paris? in May" in {c.title for c in store.list_chats()}, "renamed")
            await pilot.press("ctrl+d")
            await until(pilot, lambda: len(store.list_chats()) == 1, "deleted")
            await pilot.press("ctrl+z")
            await until(pilot, lambda: len(store.list_chats()) == 2, "brought back")
            await until(pilot, lambda: len(screen._rows) == 1, "listed")
            await pilot.press("ctrl+t")
            await until(pilot, lambda: any(c.pinned for c in store.list_chats()), "pinned")
            await pilot.press("enter")
            await until(
                pilot, lambda: isinstance(app.screen, ChatScreen) and "Paris?" in shown(app), "opened"
            )

    asyncio.run(scenario())


def test_panel_theme_thinking_help_and_completion() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test(size=(90, 30)) as pilot:
            panel = chat_screen(app).query_one(StatsPanel)
            assert not panel.display
            await pilot.press("f2")
            assert panel.display and panel.has_class("-strip")
            await pilot.resize_terminal(120, 40)
            await until(pilot, lambda: not panel.has_class("-strip"), "beside the conversation")
            await send(pilot, app, "/theme light")
            assert app.theme == "edgellm-light"
            await send(pilot, app, "/theme nosuch")
            assert "no theme nosuch" in status(app).hint
            await send(pilot, app, "/think")
            assert "No answer here has thinking" in status(app).hint
            await send(pilot, app, "/think hard")
            assert "show or hide" in status(app).hint
            await send(pilot, app, "/think off")
            assert "does not think, if its chat template" in status(app).hint
            prompt(app).replace_text("/ed")
            await until(pilot, lambda: "/edit" in str(prompt(app).border_title), "offered")
            await pilot.press("tab")
            assert prompt(app).text == "/edit"
            await pilot.press("tab")
            assert prompt(app).text == "/edit "
            prompt(app).clear()
            await pilot.press("f1")
            assert isinstance(app.screen, HelpScreen)

    asyncio.run(scenario())
    assert completions("/re")[0].startswith("re") and completions("no") == []


def test_keys_can_be_other_ones() -> None:
    async def scenario() -> None:
        app = EdgeChat(FakeBackend(), settings=ChatSettings(keymap={"toggle_panel": "f7"}))
        async with app.run_test(size=(90, 30)) as pilot:
            await pilot.press("f7")
            assert chat_screen(app).query_one(StatsPanel).display
            await pilot.press("f1")
            await pilot.resize_terminal(100, 90)
            await until(pilot, lambda: "f7" in shown(app), "told by the help")

    asyncio.run(scenario())


def test_think_off_reaches_the_template_and_is_refused_where_it_has_no_such_switch() -> None:
    async def scenario(can_think: bool) -> None:
        backend = FakeBackend()
        app = chat_app(backend, can_think=can_think)
        async with app.run_test(size=(120, 30)) as pilot:
            await send(pilot, app, "/think off")
            assert ("no such switch" in status(app).hint) is not can_think
            await send(pilot, app, "Hello")
            assert backend.template_variables == ({"enable_thinking": False} if can_think else {})

    asyncio.run(scenario(True))
    asyncio.run(scenario(False))


def test_what_a_chat_tells_the_model_about_thinking_is_kept_with_it(tmp_path: Path) -> None:
    async def scenario(chat_id: str | None) -> str | None:
        backend = FakeBackend()
        store = HistoryStore(tmp_path / "chats.db")
        app = EdgeChat(backend, store=store, chat_id=chat_id, settings=ChatSettings(can_think=True))
        async with app.run_test(size=(120, 30)) as pilot:
            if chat_id is None:
                await send(pilot, app, "/think off")
                await send(pilot, app, "/set temperature 0.5")
            await send(pilot, app, "Hello")
            assert backend.template_variables == {"enable_thinking": False}
            first = chat_screen(app)._conversation.chat_id
            await pilot.press("ctrl+n")
            await send(pilot, app, "Hello")
            assert backend.template_variables == {}  # another chat
            return first

    chat_id = asyncio.run(scenario(None))
    asyncio.run(scenario(chat_id))


def test_a_search_shows_each_chat_once() -> None:
    """However often the words stand in a chat: one line for it, with its best place and how many more."""
    chat = MemoryStore().create_chat(model="m", title="Birds")
    hits = [SearchHit(chat, None, "title", "Birds", ((0, 5),))]
    hits += [
        SearchHit(chat, str(n), "user", f"{n} birds in a very long row of words", ((2, 7),)) for n in range(3)
    ]
    [row] = by_chat(hits)
    page = row_content(row, None, time.time(), 30).plain
    assert page.count("Birds") == 1 and "0 birds in a very" in page and "and 2 more" in page
    assert all(line.startswith("    ") and len(line) <= 30 for line in page.splitlines()[1:])


def test_prompts_of_earlier_sessions_come_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "prompts.jsonl"

    async def scenario(text: str | None) -> None:
        app = chat_app(FakeBackend(), prompts_file=path)
        async with app.run_test() as pilot:
            if text is not None:
                await send(pilot, app, text)
            else:
                await pilot.press("up")
                assert prompt(app).text == "你好\nthere"

    asyncio.run(scenario("你好\nthere"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    asyncio.run(scenario(None))
    path.write_bytes(b'\xff\n{"a": 1}\n"kept"\n')
    assert load_prompts(path) == ["kept"]
    path.write_text('"one\u2028question"\n"two\x85"\n', encoding="utf-8")
    assert load_prompts(path) == ["one\u2028question", "two\x85"]


class Library:
    """Two models here, one to fetch: the pull is cut once and then goes on."""

    def __init__(self) -> None:
        self.models = [
            FAKE_MODEL,
            replace(FAKE_MODEL, name="big-7b", file_bytes=4_000_000_000),
            replace(FAKE_MODEL, name="gemma3-270m", path="", quantization="Q4_K_M"),
        ]
        self.pulls: list[str] = []
        self.removed: list[str] = []

    def list(self) -> Sequence[ModelInfo]:
        return self.models

    def pull(self, name: str) -> Iterator[PullProgress]:
        self.pulls.append(name)
        first = len(self.pulls) == 1
        for done in range(0 if first else 50, 60 if first else 101, 10):
            yield PullProgress(done * 1000, 100_000, "hub", "fetching")
        if first:
            raise TransferError("the connection was lost at 60 kB")
        self.models[-1] = replace(self.models[-1], path="/models/gemma.gguf")

    def remove(self, name: str) -> int:
        self.removed.append(name)
        self.models = [model for model in self.models if model.name != name]
        return 4_000_000_000

    def plan(self, name: str, context: int | None = None) -> MemoryPlan:
        weights = next(model.file_bytes for model in self.models if model.name == name)
        return MemoryPlan(weights, 1000, 8_192_000, 1_000_000, 2_000_000_000, 8192)


def test_model_picker_fetches_goes_on_warns_deletes_and_opens() -> None:
    async def scenario() -> None:
        library, opened = Library(), []

        def opener_for(name: str):  # type: ignore[no-untyped-def]
            def opener(notice: object) -> FakeBackend:
                opened.append(name)
                return FakeBackend(model=replace(FAKE_MODEL, name=name))

            return opener

        app = EdgeChat(FakeBackend(), library=library, opener_for=opener_for)
        async with app.run_test(size=(110, 30)) as pilot:
            await send(pilot, app, "Hi")
            await pilot.press("ctrl+o")
            assert isinstance(app.screen, ModelsScreen)
            await until(pilot, lambda: "gemma3-270m" in shown(app), "listed")
            page = shown(app)
            assert "to fetch" in page and "too big" in page and "fits" in page
            assert "= 107 MB of 2.0 GB" in page
            await pilot.press(*"big", "enter")
            await until(pilot, lambda: "It does not fit" in shown(app), "warned")
            await pilot.press("ctrl+d", "ctrl+d")
            await until(pilot, lambda: library.removed == ["big-7b"], "deleted")
            app.screen.query_one(Input).value = ""
            await pilot.press(*"gemma", "enter")
            await until(pilot, lambda: "Enter goes on" in shown(app), "cut")
            assert "the connection was lost" in shown(app)
            await pilot.press("enter")
            await until(pilot, lambda: "Enter opens it" in shown(app), "fetched")
            await pilot.press("enter")
            await until(pilot, lambda: "gemma3-270m answers from here on" in shown(app), "opened")
            assert opened == ["gemma3-270m"] and library.pulls == ["gemma3-270m"] * 2
            assert len(replies(app)) == 1

    asyncio.run(scenario())


def test_restart_opens_the_same_model_and_a_failure_leaves_the_chat() -> None:
    async def scenario() -> None:
        backends = [FakeBackend(), FakeBackend(Script(pieces=["back"]))]
        calls = []

        def opener(notice: object) -> FakeBackend:
            calls.append(time.monotonic())
            if len(calls) == 2:
                raise TransferError("no memory")
            return backends[min(len(calls) - 1, 1)]

        app = EdgeChat(opener=opener, model_name="smollm2-135m")
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: isinstance(app.screen, ChatScreen), "opened")
            await pilot.pause()
            await send(pilot, app, "Hi")
            await send(pilot, app, "/restart", wait=False)
            await until(pilot, lambda: "no memory" in shown(app), "told")
            assert backends[0].closed and len(replies(app)) == 1
            await send(pilot, app, "/restart", wait=False)
            await until(pilot, lambda: "answers from here on" in shown(app), "again")
            await send(pilot, app, "Still there?")
            assert "back" in shown(app)

    asyncio.run(scenario())


def test_editor_takes_the_draft_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    async def scenario() -> None:
        app = EdgeChat(FakeBackend())
        async with app.run_test() as pilot:
            prompt(app).replace_text("draft")
            await pilot.press("ctrl+g")
            assert "cannot be handed" in status(app).hint
            monkeypatch.setattr(EdgeChat, "suspend", lambda self: contextlib.nullcontext())
            monkeypatch.setenv("VISUAL", "sh -c 'printf more >> \"$0\"'")
            await pilot.press("ctrl+g")
            assert prompt(app).text == "draftmore"
            monkeypatch.setenv("VISUAL", "no-such-editor")
            await pilot.press("ctrl+g")
            assert "could not be run" in status(app).hint

    asyncio.run(scenario())
