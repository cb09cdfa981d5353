"""What the chat screen and its actions share: what they act on, and how a command is carried out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from edgellm.contracts import Finished, StoredMessage
from edgellm_models.errors import BadInputError, EdgeLLMError, Notice
from edgellm_tui.clipboard import copy_text
from edgellm_tui.commands import Command
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
        self._attached: list[Attachment] = []
        self._editing: StoredMessage | None = None

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
