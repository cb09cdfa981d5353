"""What one ``edgellm chat`` carries along: the notices so far, the history, the chat that it goes on with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cli.chat_record import ChatRecord
from edgellm.cli.output import Output, counted
from edgellm_models.errors import EdgeLLMError, NotFoundError, Notice

if TYPE_CHECKING:
    from edgellm.contracts import ChatStore, StoredChat

LAST = "last"
"""``--continue`` without an id."""


class ChatSession:
    """``notices`` are all that were heard; with ``as_json`` they are for the last line only."""

    def __init__(self, output: Output, *, as_json: bool = False, saves: bool = True) -> None:
        self.output = output
        self.as_json = as_json
        self.saves = saves
        self.shows_notices = not as_json
        self.notices: list[Notice] = []
        self.store: ChatStore | None = None
        self.continued: StoredChat | None = None

    def on_notice(self, notice: Notice) -> None:
        self.notices.append(notice)
        if self.shows_notices:
            self.output.notice(notice)

    def open_store(self) -> ChatStore | None:
        """The history; one that cannot be used is a notice, and the chat is then not saved."""
        if self.store is None and self.saves:
            from edgellm.cli.saved_chats import open_history

            try:
                self.store = open_history(self.on_notice)
            except EdgeLLMError as error:
                self.on_notice(Notice("chat_not_saved", f"this chat is not saved: {error}"))
                self.saves = False
        return self.store

    def take_up(self, asked: str) -> StoredChat:
        """The chat of ``--continue``: ``last`` or an id's beginning. NotFoundError when there is none."""
        from edgellm.cli.saved_chats import open_history

        self.store = open_history(self.on_notice)
        if asked == LAST:
            chats = self.store.list_chats(limit=1000)
            if not chats:
                raise NotFoundError("there is no saved chat to go on with; edgellm chat begins one")
            self.continued = max(chats, key=lambda chat: chat.updated)
        else:
            self.continued = self.store.find_chat(asked)
        return self.continued

    def record(self, system: str, model_argument: str) -> ChatRecord:
        """The conversation to talk in, with what was said before in the chat that is gone on with."""
        store = self.open_store()
        record = ChatRecord(
            store if self.saves else None, self.on_notice, system=system, model_argument=model_argument
        )
        if self.continued is not None and store is None:
            store = self.store
        if self.continued is not None and store is not None:
            record.take_up(store, self.continued)
            said = counted(sum(m.role != "system" for m in record.messages), "message")
            title = f' "{self.continued.title}"' if self.continued.title else ""
            detail = f"going on with chat {self.continued.id[:8]}{title}: {said}"
            self.on_notice(Notice("continued", detail))
        return record

    @property
    def continued_model(self) -> str | None:
        """The MODEL argument that the chat which is gone on with was begun with, or a catalog model that
        answered it last."""
        if self.continued is None:
            return None
        found = self.continued.params.get("model_argument")
        if isinstance(found, str) and found:
            return found
        from edgellm_models.catalog import load_catalog

        return self.continued.model if self.continued.model in load_catalog() else None

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
