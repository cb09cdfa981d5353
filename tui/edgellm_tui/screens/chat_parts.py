"""What the chat screen and its actions share: what they act on, and how a command is carried out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.screen import Screen
from textual.timer import Timer

from edgellm.contracts import Finished, KeepsChats, StoredMessage
from edgellm_models.errors import BadInputError, EdgeLLMError, Notice
from edgellm_tui.clipboard import copy_text
from edgellm_tui.commands import Command
from edgellm_tui.unsaved import MemoryStore
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

BUSY = "Still answering: stop it with Esc first"
HINT_S = 4.0


@dataclass(frozen=True)
class Attachment:
    """A file that goes along with the next question."""

    name: str
    text: str
    size: str
    """Its tokens, or its characters where nobody counts tokens."""


class ChatParts(Screen[None]):
    """What actions act on; it is the chat screen's (screens/chat.py)."""

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
        def _describe_prompt(self) -> None: ...
        def _show_chat(self) -> None: ...
        def _place_panel(self) -> None: ...
        def _new_conversation(self) -> Conversation: ...
        async def _open_chat(self, chat_id: str, message_id: str | None = None) -> None: ...
        async def _leave_chat(self) -> None: ...
        async def _show_notice(self, notice: Notice) -> None: ...
        async def _ask(
            self, message: StoredMessage, *, shown_from: str | None, again: bool = False
        ) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self._attached: list[Attachment] = []
        self._editing: StoredMessage | None = None
        self._answered_chats: set[str] = set()
        """Chats in which there is an answer that the engine has not put by."""
        self._hint_timer: Timer | None = None
        self._hint_ends_with_answer = False

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

    def show_hint(self, text: str, *, seconds: float = HINT_S, while_answering: bool = False) -> None:
        """A sentence in the status line: for a while, and with ``while_answering`` not beyond the answer."""
        self._hint_ends_with_answer = while_answering
        if self._hint_timer is not None:
            if text and text == self._status.hint:
                self._hint_timer.reset()
                return
            self._hint_timer.stop()
        self._status.hint = text
        self._hint_timer = self.set_timer(seconds, self._clear_hint)

    def _clear_hint(self) -> None:
        if self._hint_timer is not None:
            self._hint_timer.stop()
            self._hint_timer = None
        self._hint_ends_with_answer = False
        self._status.hint = ""

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

    # --- what the engine keeps of a chat ---

    async def _take_up(self) -> None:
        """Has the engine take up what it kept of the chat that was opened."""
        chat, backend = self._conversation.chat_id, self._backend
        if chat is not None and self._keeps and isinstance(backend, KeepsChats):
            for notice in await backend.take_up(chat, self._conversation.tokens):
                await self._show_notice(notice)

    async def put_by(self) -> Sequence[Notice]:
        """Has the engine keep what it computed of this chat, if it answered in it."""
        chat, backend = self._conversation.chat_id, self._backend
        if chat is None or chat not in self._answered_chats or not self._keeps:
            return ()
        if not isinstance(backend, KeepsChats):
            return ()
        self._answered_chats.discard(chat)
        messages = [stored.message for stored in self._conversation.branch]
        return await backend.put_by(chat, messages, self._conversation.tokens)

    @property
    def _keeps(self) -> bool:
        """Not of chats that nobody wants saved."""
        return not isinstance(self._store, MemoryStore)

    async def copy(self, text: str) -> None:
        """To the clipboard; the status line says which way."""
        self.show_hint(await copy_text(self.edge_app, text, os.environ))

    @staticmethod
    def _number(argument: str, what: str, default: int = 1) -> int:
        if not argument:
            return default
        if not argument.isascii() or not argument.isdigit() or not 0 < int(argument) < 10**6:
            raise BadInputError(f"{what} takes a number from 1 on, not {argument[:20]}")
        return int(argument)
