"""A chat as it is stored, and the store itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgellm.contracts.answers import DraftCounts, Finished, FinishReason, RequestTimings, Usage
from edgellm.contracts.requests import ChatMessage, SamplingParams
from edgellm_models.errors import Notice


@dataclass(frozen=True)
class StoredChat:
    """A saved chat without its messages."""

    id: str
    """32 hexadecimal digits; also the conversation_id that the engine knows it by."""
    title: str
    """The beginning of the first question until somebody renames it; may be empty."""
    created: float
    """Seconds since 1970, as ``updated`` and ``deleted``."""
    updated: float
    system: str = ""
    model: str = ""
    """The name of the model that answered last."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Settings that belong to this chat, as its owner wrote them."""
    pinned: bool = False
    head_id: str | None = None
    """The message that the shown branch ends with; None in a chat without messages."""
    num_messages: int = 0
    """Of all branches."""
    deleted: float | None = None


@dataclass(frozen=True)
class StoredMessage:
    """One message of a chat's tree, with what is known of how it was made."""

    id: str
    chat_id: str
    parent_id: str | None
    """None at the root."""
    message: ChatMessage
    created: float
    partial: bool = False
    """An answer whose end was never written: still streaming, or its writer was killed."""
    finish_reason: FinishReason | None = None
    """None in questions and partial answers."""
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of SamplingParams that it was asked with, the seed as it was drawn."""
    usage: Usage | None = None
    timings: RequestTimings | None = None
    draft: DraftCounts | None = None
    notices: tuple[Notice, ...] = ()
    error: str | None = None
    sibling: int = 1
    """Its place among the messages with the same parent, in order of creation, from 1."""
    num_siblings: int = 1


@dataclass(frozen=True)
class SearchHit:
    """A place in a saved chat that has what was searched."""

    chat: StoredChat
    message_id: str | None
    """None when it is the title."""
    role: str
    """user, assistant, ... or title."""
    excerpt: str
    """One line around the first find."""
    marks: tuple[tuple[int, int], ...] = ()
    """(start, end) in ``excerpt`` of each find."""


class AnswerWriter(Protocol):
    """Saves one answer while it streams. ``add`` only notes the text down; a thread of the writer's own puts
    it on the disk, at the latest a second after."""

    @property
    def message_id(self) -> str: ...

    def add(self, text: str, reasoning: str = "") -> None: ...

    def add_notice(self, notice: Notice) -> None: ...

    def finish(self, finished: Finished, *, tool_calls: Sequence[Mapping[str, Any]] = ()) -> StoredMessage:
        """Writes the end, whatever its reason. What was never added is not made up."""
        ...

    def fail(self, error: str) -> StoredMessage | None:
        """The backend raised: keeps what has come with reason ERROR. Without any text the answer is removed,
        its question is the head again, and None is returned."""
        ...


class ChatStore(Protocol):
    """Saved chats: each a tree of messages, of which the branch that ends with the head is shown.

    Usable from any thread; several processes may have the same store open. NotFoundError for an id that is
    none, OutputError when the disk refuses, UnavailableError when another process keeps it locked.
    """

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What opening it had to do: a damaged file set aside, search without an index, ..."""
        ...

    def create_chat(
        self, *, title: str = "", system: str = "", model: str = "", params: Mapping[str, Any] | None = None
    ) -> StoredChat: ...

    def get_chat(self, chat_id: str) -> StoredChat: ...

    def find_chat(self, prefix: str, *, deleted: bool = False) -> StoredChat:
        """The chat whose id begins so. NotFoundError when none does, BadInputError when several do."""
        ...

    def list_chats(self, *, limit: int = 100, offset: int = 0, deleted: bool = False) -> Sequence[StoredChat]:
        """Pinned ones first, then by ``updated``, newest first; with ``deleted`` only the deleted ones."""
        ...

    def update_chat(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
    ) -> StoredChat:
        """Changes what is not None. None of these counts as use: ``updated`` stays."""
        ...

    def delete_chat(self, chat_id: str) -> None:
        """Hides it; after 30 days it is removed for good."""
        ...

    def restore_chat(self, chat_id: str) -> None: ...

    def purge_chat(self, chat_id: str) -> None:
        """Removes it for good, its text overwritten."""
        ...

    def branch(self, chat_id: str, message_id: str | None = None) -> Sequence[StoredMessage]:
        """Root to head, or root to this message."""
        ...

    def conversation(self, chat_id: str, message_id: str | None = None) -> list[ChatMessage]:
        """The same as a backend takes it: the system prompt first, answers without a text left out."""
        ...

    def siblings(self, message_id: str) -> Sequence[StoredMessage]:
        """All messages with the same parent, itself included, in order of creation."""
        ...

    def tree(self, chat_id: str) -> Sequence[StoredMessage]:
        """All messages of all branches; every parent comes before its children."""
        ...

    def add_message(self, chat_id: str, message: ChatMessage, *, parent_id: str | None) -> StoredMessage:
        """A new child of ``parent_id`` (None: a new root), which becomes the head. An edit is a new sibling:
        add with the parent of the edited one. The first question gives an untitled chat its title."""
        ...

    def begin_answer(
        self, chat_id: str, *, parent_id: str | None, model: str, sampling: SamplingParams
    ) -> AnswerWriter:
        """An answer to ``parent_id``. It is in the tree, and the head, with its first text. Regenerate: begin
        another answer to the same parent."""
        ...

    def select(self, message_id: str) -> StoredChat:
        """Shows the branch through this message: the head becomes where that branch was last left."""
        ...

    def set_head(self, chat_id: str, message_id: str | None) -> StoredChat:
        """The shown branch ends exactly here (None: before the first message): what is added next goes under
        it. Nothing is removed."""
        ...

    def search(self, text: str, *, limit: int = 50) -> Sequence[SearchHit]:
        """Chats, not deleted, that have all words of ``text`` in a message or the title (a word may be the
        beginning of one; "in quotes" a phrase), best first."""
        ...

    def export(self, chat_id: str, form: str) -> str:
        """The chat as ``markdown`` (the shown branch) or ``json`` (everything)."""
        ...

    def close(self) -> None: ...
