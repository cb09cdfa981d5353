"""What the keys and slash commands of the chat do: the actions that the table of commands names."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import SuspendNotSupported
from textual.screen import Screen

from edgellm.contracts import ChatMessage, Finished, StoredMessage
from edgellm_models.errors import BadInputError, EdgeLLMError, NotFoundError, Notice, OutputError
from edgellm_tui.clipboard import copy_text
from edgellm_tui.code_blocks import code_blocks
from edgellm_tui.commands import Command
from edgellm_tui.files import MAX_ATTACHED_BYTES, export_name, read_text_file, with_attachments, write_new
from edgellm_tui.parameters import find_parameter, parse_value, value_text
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.screens.history import HistoryScreen
from edgellm_tui.screens.parameters import Choice, ParametersScreen
from edgellm_tui.unsaved import text_of
from edgellm_tui.widgets.figures import count_text, path_text
from edgellm_tui.widgets.transcript import ErrorLine

if TYPE_CHECKING:
    from edgellm.contracts import ChatBackend, ChatStore, ModelInfo
    from edgellm_tui.app import EdgeChat
    from edgellm_tui.branch_view import BranchView
    from edgellm_tui.conversation import Conversation
    from edgellm_tui.settings import ChatSettings
    from edgellm_tui.stream_worker import ReplyStream
    from edgellm_tui.widgets.prompt import ChatPrompt
    from edgellm_tui.widgets.reply import Reply
    from edgellm_tui.widgets.stats_panel import StatsPanel
    from edgellm_tui.widgets.status_line import StatusLine, TopBar
    from edgellm_tui.widgets.transcript import Transcript

QUIT_WINDOW_S = 2.0
"""A second Ctrl+C within this time quits."""

BUSY = "Still answering: stop it with Esc first"


@dataclass(frozen=True)
class Attachment:
    """A file that goes along with the next question."""

    name: str
    text: str
    size: str
    """Its tokens, or its characters where nobody counts tokens."""


class ChatActions(Screen[None]):
    """The actions; what they act on is the chat screen's (screens/chat.py)."""

    _backend: ChatBackend
    _settings: ChatSettings
    _store: ChatStore
    _model: ModelInfo
    _conversation: Conversation
    _view: BranchView
    _stream: ReplyStream | None
    _reply: Reply | None
    _last_finished: Finished | None

    if TYPE_CHECKING:

        @property
        def _top(self) -> TopBar: ...
        @property
        def _transcript(self) -> Transcript: ...
        @property
        def _prompt(self) -> ChatPrompt: ...
        @property
        def _status(self) -> StatusLine: ...
        @property
        def _panel(self) -> StatsPanel: ...
        @property
        def generating(self) -> bool: ...
        def show_hint(self, text: str, *, seconds: float = 4.0, while_answering: bool = False) -> None: ...
        def _describe_prompt(self) -> None: ...
        def _show_chat(self) -> None: ...
        def _place_panel(self) -> None: ...
        def _new_conversation(self) -> Conversation: ...
        async def _open_chat(self, chat_id: str) -> None: ...
        async def _show_notice(self, notice: Notice) -> None: ...
        async def _ask(
            self, message: StoredMessage, *, shown_from: str | None, again: bool = False
        ) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self._interrupted_at = float("-inf")
        self._attached: list[Attachment] = []
        self._editing: StoredMessage | None = None
        self._panel_chosen: bool | None = None
        self._code_from: tuple[str, int] = ("", 0)
        self._thinking_shown = False

    @property
    def edge_app(self) -> EdgeChat:
        app: Any = self.app
        return app  # type: ignore[no-any-return]

    @property
    def can_restart(self) -> bool:
        return self.edge_app.can_open

    async def run_command(self, command: Command, argument: str = "") -> None:
        """Does what a slash command says; what goes wrong is one line in the status bar."""
        action = getattr(self, f"action_{command.name}")
        try:
            result = action(argument) if command.argument else action()
            if result is not None:
                await result
        except EdgeLLMError as error:
            self.show_hint(str(error), seconds=8.0)

    async def _save(self, write: Callable[[], object]) -> None:
        """Writes to the store; when it refuses, the screen goes on and says so."""
        try:
            write()
        except EdgeLLMError as error:
            await self._transcript.add(ErrorLine(f"the chat could not be saved: {error}"))

    def _busy(self) -> bool:
        if self.generating:
            self.show_hint(BUSY, while_answering=True)
        return self.generating

    @staticmethod
    def _number(argument: str, what: str, default: int = 1) -> int:
        if not argument:
            return default
        if not argument.isascii() or not argument.isdigit() or not 0 < int(argument) < 10**6:
            raise BadInputError(f"{what} takes a number from 1 on, not {argument[:20]}")
        return int(argument)

    # --- stopping and leaving ---

    async def action_stop_reply(self) -> None:
        """Esc: ends the answer, keeps what has come, leaves the draft alone."""
        if self._stream is None:
            if self._editing is not None:
                self._editing = None
                self._prompt.replace_text("")
                self._describe_prompt()
            elif self._attached:
                self._attached.clear()
                self._describe_prompt()
                self.show_hint("The attached files were taken away")
            self.clear_selection()
            return
        self._status.phase = "stopping"
        # In a task of its own: while the backend takes its time, keys still work.
        self.run_worker(self._stream.stop(), group="stop", exit_on_error=False)

    async def interrupt(self) -> None:
        """Ctrl+C: copies a selection, else stops, else (the second time within two seconds) quits."""
        selected = self._prompt.selected_text or self.get_selected_text()
        if selected:
            await self.copy(selected)
            self.clear_selection()
            self._prompt.move_cursor(self._prompt.cursor_location)
            return
        now = time.monotonic()
        if now - self._interrupted_at <= QUIT_WINDOW_S:
            self.app.exit(return_code=0)
            return
        self._interrupted_at = now
        if self.generating:
            await self.action_stop_reply()
            self.show_hint("Stopped. Ctrl+C again quits", seconds=QUIT_WINDOW_S)
        else:
            self.show_hint("Ctrl+C again quits, Ctrl+Q quits at once", seconds=QUIT_WINDOW_S)

    async def action_quit_chat(self) -> None:
        await self.app.action_quit()

    # --- asking again ---

    async def action_regenerate(self) -> None:
        """Answers the last question again; the answer that is there becomes its sibling."""
        if self._busy():
            return
        question = self._conversation.last_question
        if question is None:
            self.show_hint("There is no question to answer again")
            return
        last = self._conversation.branch[-1]
        sampling = self._conversation.effective_sampling
        if last.id != question.id and (sampling.temperature == 0 or sampling.seed is not None):
            why = "temperature 0" if sampling.temperature == 0 else f"seed {sampling.seed}"
            self.show_hint(
                f"With {why} the answer is the same again: F3 or /set temperature 0.8", seconds=8.0
            )
        ids = [message.id for message in self._conversation.branch]
        after = ids[ids.index(question.id) + 1 :]
        if not after:
            # Not answered: what stands below the question (an error, "stopped") goes with it.
            await self._ask(question, shown_from=question.id)
        else:
            await self._ask(question, shown_from=after[0], again=True)

    async def action_edit_question(self, argument: str = "") -> None:
        """Puts a question into the prompt; sent, it is asked as another version of itself."""
        if self._busy():
            return
        question = self._conversation.question_back(self._number(argument, "/edit"))
        if question is None:
            self.show_hint("There is no such question to edit")
            return
        draft = self._prompt.draft
        if draft and self._editing is None:
            self._prompt.remember(draft)
        self._editing = question
        self._prompt.replace_text(text_of(question.message))
        self._describe_prompt()
        self._prompt.focus()

    async def action_branch(self, argument: str = "") -> None:
        """Goes back to an earlier answer; what is asked next is a branch from there."""
        if self._busy():
            return
        number = self._number(argument, "/branch", 2)
        answer = self._conversation.answer_back(number)
        if answer is None:
            self.show_hint("There is no such answer to go on from")
            return
        self._conversation.go_back_to(answer)
        await self._view.update(self._conversation)
        self._show_chat()
        self.show_hint("What you ask now goes on from here; the rest is kept beside it")

    async def _other_version(self, by: int) -> None:
        if self._busy():
            return
        fork = self._view.fork(self._conversation)
        if fork is None:
            self.show_hint("There are no other versions here: Ctrl+R answers again, Ctrl+E edits")
            return
        place = [message.id for message in self._conversation.branch].index(fork.id)
        if not self._conversation.step(fork, by):
            self.show_hint("This is the last version" if by > 0 else "This is the first version")
            return
        self._editing = None
        self._view.keep_place(self._conversation.branch[place])
        await self._view.update(self._conversation)
        self._show_chat()

    async def action_previous_sibling(self) -> None:
        await self._other_version(-1)

    async def action_next_sibling(self) -> None:
        await self._other_version(1)

    def action_previous_fork(self) -> None:
        if not self._view.choose(self._conversation, -1):
            self.show_hint("There is no fork above")

    def action_next_fork(self) -> None:
        if not self._view.choose(self._conversation, 1):
            self.show_hint("There is no fork below")

    # --- taking answers away ---

    @property
    def _last_answer(self) -> str:
        if self._reply is not None and self._reply.text:
            return self._reply.text
        answer = self._conversation.answer_back(1)
        return text_of(answer.message) if answer is not None else ""

    async def copy(self, text: str) -> None:
        """To the clipboard; the status line says which way."""
        self.show_hint(await copy_text(self.edge_app, text, os.environ))

    async def action_copy_answer(self) -> None:
        if self._last_answer:
            await self.copy(self._last_answer)
        else:
            self.show_hint("There is no answer to copy yet")

    async def action_copy_code(self, argument: str = "") -> None:
        """The last code block of the last answer; pressed again, the one before it."""
        answer = self._last_answer
        blocks = code_blocks(answer)
        if not blocks:
            self.show_hint("There is no code block in the last answer")
            return
        if argument:
            place = self._number(argument, "/code") - 1
            if place >= len(blocks):
                raise BadInputError(f"the last answer has {len(blocks)} code blocks")
        else:
            seen, before = self._code_from
            place = before - 1 if seen == answer and before > 0 else len(blocks) - 1
        self._code_from = (answer, place)
        told = await copy_text(self.edge_app, blocks[place], os.environ)
        self.show_hint(f"Block {place + 1} of {len(blocks)}: {told}")

    def action_save_answer(self, argument: str = "") -> None:
        if not self._last_answer:
            self.show_hint("There is no answer to save yet")
            return
        self._write(argument or f"answer-{time.strftime('%Y%m%d-%H%M%S')}.md", self._last_answer)

    def action_export(self, argument: str = "") -> None:
        if self._conversation.chat_id is None:
            self.show_hint("There is nothing to export yet")
            return
        name = argument or export_name(self._conversation.title)
        form = "json" if name.lower().endswith(".json") else "markdown"
        self._write(name, self._store.export(self._conversation.chat_id, form))

    def _write(self, name: str, text: str) -> None:
        try:
            path = write_new(name, self._settings.save_folder, text)
        except OutputError as error:
            self.show_hint(str(error))
        else:
            self.show_hint(f"Saved to {path_text(path, 60)}")

    async def action_toggle_thinking(self, argument: str = "") -> None:
        """Shows or folds away the thinking of all answers."""
        if argument not in ("", "show", "hide"):
            raise BadInputError("/think takes show or hide; whether a model thinks is the model's own doing")
        self._thinking_shown = argument == "show" if argument else not self._thinking_shown
        found = False
        for message in self._transcript.messages():
            if hasattr(message, "show_thinking"):
                found = await message.show_thinking(self._thinking_shown) or found
        if not found:
            self.show_hint("No answer here has thinking to show")

    # --- chats ---

    async def action_new_chat(self) -> None:
        if self._busy():
            return
        self._conversation = self._new_conversation()
        self._editing = None
        self._attached.clear()
        self._last_finished = None
        await self._view.show(self._conversation, self._model)
        self._show_chat()

    def action_history(self) -> None:
        self._pick_chat("")

    def action_search_history(self, argument: str = "") -> None:
        self._pick_chat(argument, searching=True)

    def _pick_chat(self, words: str, *, searching: bool = False) -> None:
        if self._busy():
            return
        current = self._conversation.chat_id

        async def picked(chat_id: str | None) -> None:
            if chat_id is not None:
                await self._open_chat(chat_id)
            elif current is not None:
                self._top.title = self._conversation.title  # it may have been renamed there
                if self._store.get_chat(current).deleted is not None:
                    await self.action_new_chat()

        self.app.push_screen(HistoryScreen(self._store, current, words, searching), picked)

    def action_rename(self, argument: str = "") -> None:
        title = " ".join(argument.split())
        if not title:
            raise BadInputError("/rename needs a title: /rename Paris, plans for May")
        self._conversation.rename(title)
        self._top.title = self._conversation.title

    async def action_compact(self, argument: str = "") -> None:
        """A new chat that begins with the end of this one, which stays as it is."""
        if self._busy():
            return
        number = self._number(argument, "/compact", 2)
        kept = self._conversation.last_turns(number)
        if not kept:
            self.show_hint("There is nothing to go on with yet")
            return
        old = self._conversation
        new = self._new_conversation()
        new.system, new.params = old.system, dict(old.params)
        new.rename(f"{old.title} (continued)"[:80])
        parent: str | None = None
        assert new.chat_id is not None
        for message in kept:
            copied = ChatMessage(message.role, message.content, message.reasoning)
            parent = self._store.add_message(new.chat_id, copied, parent_id=parent).id
        await self._open_chat(new.chat_id)
        dropped = sum(m.message.role == "user" for m in old.branch) - number
        if dropped > 0:
            which = f"the {dropped} oldest question{'s' * (dropped > 1)}"
            text = f"goes on without {which}; the whole chat is in Ctrl+S"
            await self._show_notice(Notice("compacted", text))

    # --- writing ---

    async def action_attach(self, argument: str = "") -> None:
        """Reads a text file and counts its tokens; it goes along with the next question."""
        if not argument:
            raise BadInputError("/attach needs a file: /attach notes.txt")
        name, text = read_text_file(argument)
        tokens = await self._backend.count_tokens([ChatMessage("user", with_attachments("", [(name, text)]))])
        size = f"{count_text(tokens)} tokens" if tokens else f"{count_text(len(text))} characters"
        length = self._model.context_length
        self._attached.append(Attachment(name, text, size))
        self._describe_prompt()
        if tokens and length and tokens > length:
            self.show_hint(
                f"{name} has {size}, more than the context of {count_text(length)}: Esc takes it away",
                seconds=8,
            )
        else:
            self.show_hint(f"{name}: {size} go along with the next question")

    def action_external_editor(self) -> None:
        """Hands the draft to $VISUAL or $EDITOR and takes it back."""
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        descriptor, name = tempfile.mkstemp(prefix="edgellm-", suffix=".md")  # 0600
        path = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(self._prompt.draft)
            with self.app.suspend():
                code = subprocess.run([*shlex.split(editor), name], check=False).returncode
            if code:
                self.show_hint(f"{editor} ended with {code}; the draft is as it was")
                return
            data = path.read_bytes()[:MAX_ATTACHED_BYTES]
            self._prompt.paste_text(data.decode("utf-8", "replace").rstrip("\n"))
        except SuspendNotSupported:
            self.show_hint("This terminal cannot be handed to an editor")
        except (OSError, ValueError) as error:
            self.show_hint(f"The editor {editor} could not be run: {error}; set EDITOR")
        finally:
            path.unlink(missing_ok=True)

    # --- model and values ---

    def action_models(self, argument: str = "") -> None:
        if self._busy():
            return
        app = self.edge_app
        if argument:
            app.open_model(argument)
            return
        if app.library is None:
            self.show_hint("Other models cannot be opened here")
            return
        from edgellm_tui.screens.models import ModelsScreen

        def picked(name: str | None) -> None:
            if name is not None:
                app.open_model(name)

        app.push_screen(ModelsScreen(app.library, self._model.name), picked)

    def action_restart(self) -> None:
        if self._busy():
            return
        if not self.can_restart:
            self.show_hint("The engine was started elsewhere and cannot be restarted here")
            return
        self.edge_app.open_model(None)

    def action_parameters(self) -> None:
        conversation, settings = self._conversation, self._settings

        def chosen(choice: Choice | None) -> None:
            if choice is not None:
                conversation.set_params(choice.params)
                if choice.system != conversation.system:
                    conversation.set_system(choice.system)

        self.app.push_screen(
            ParametersScreen(
                settings.sampling, settings.sampling_origins, conversation.params, conversation.system
            ),
            chosen,
        )

    def action_set_parameter(self, argument: str = "") -> None:
        name, _, text = argument.partition(" ")
        if not name:
            raise BadInputError("/set needs a name: /set temperature 0.7 (F3 lists them)")
        parameter = find_parameter(name)
        params = dict(self._conversation.params)
        if text.strip():
            params[parameter.name] = parse_value(parameter, text)
        else:
            params.pop(parameter.name, None)
        self._conversation.set_params(params)
        value = value_text(getattr(self._conversation.effective_sampling, parameter.name)) or "not set"
        origin = "" if parameter.name in params else " (as the model was opened)"
        self.show_hint(f"{parameter.label}: {value}{origin}")

    async def action_system(self, argument: str = "") -> None:
        if not argument:
            said = self._conversation.system
            await self._show_notice(
                Notice("system", f"system prompt: {said}" if said else "no system prompt")
            )
            return
        self._conversation.set_system("" if argument == "-" else argument)
        self.show_hint("System prompt removed" if argument == "-" else "System prompt set for this chat")

    # --- view ---

    def action_toggle_panel(self) -> None:
        self._panel_chosen = not self._panel.display
        self._place_panel()

    async def action_show_context(self) -> None:
        """One line: what the next question will be asked with, by kind."""
        conversation, length = self._conversation, self._model.context_length
        system = [ChatMessage("system", conversation.system)] if conversation.system else []
        turns = [m.message for m in conversation.branch if text_of(m.message)]
        whole: Sequence[ChatMessage] = [*system, *turns]
        if not whole:
            self.show_hint("The context is empty")
            return
        total = await self._backend.count_tokens(whole)
        if not total:
            self.show_hint("This server does not count tokens")
            return
        share = f" of {count_text(length)} ({total / length:.0%})" if length else ""
        questions = sum(message.role == "user" for message in turns)
        parts = [f"{questions} question{'s' * (questions != 1)}, {len(turns) - questions} answers"]
        if system:
            parts.append(f"a system prompt of {count_text(len(conversation.system))} characters")
        await self._show_notice(
            Notice("context_use", f"context: {count_text(total)}{share} tokens; " + ", ".join(parts))
        )

    def action_change_theme(self, argument: str = "") -> None:
        if not argument:
            self.edge_app.action_change_theme()
            return
        names = {"dark": "edgellm-dark", "light": "edgellm-light"}
        name = names.get(argument, argument)
        if name not in self.app.available_themes:
            raise NotFoundError(f"there is no theme {argument}; /theme alone lists them")
        self.app.theme = name

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(dict(self._settings.keymap)))
