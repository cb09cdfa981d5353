"""The chat that is shown: its branch in the store, and what is asked, edited or answered again in it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.contracts import AnswerWriter, ChatMessage, ChatStore, SamplingParams, StoredChat, StoredMessage
from edgellm_tui.unsaved import text_of

THINKS = "enable_thinking"
"""Its name among the params of a chat, and for chat templates."""


@dataclass(frozen=True)
class Question:
    """What the backend is asked, and who writes down its answer."""

    chat_id: str
    messages: Sequence[ChatMessage]
    sampling: SamplingParams
    writer: AnswerWriter


@dataclass
class Conversation:
    """One chat of ``store``, made there with its first question."""

    store: ChatStore
    model: str
    sampling: SamplingParams
    """What holds where the chat itself says nothing."""
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that this chat changes."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is kept with the chat's params, by whoever composes the screen."""
    chat_id: str | None = None
    branch: list[StoredMessage] = field(default_factory=list)
    """The messages that are shown, from the first to the head."""
    unsaved_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, store: ChatStore, chat: StoredChat, model: str, sampling: SamplingParams) -> Conversation:
        """A saved chat, at the branch where it was left."""
        known = {name: value for name, value in chat.params.items() if hasattr(sampling, name)}
        extra = {name: value for name, value in chat.params.items() if name not in known}
        conversation = cls(store, model, sampling, chat.system, known, extra, chat.id)
        conversation.refresh()
        return conversation

    def refresh(self) -> None:
        """Reads the shown branch again."""
        self.branch = [] if self.chat_id is None else list(self.store.branch(self.chat_id))

    @property
    def title(self) -> str:
        return "" if self.chat_id is None else self.store.get_chat(self.chat_id).title

    @property
    def effective_sampling(self) -> SamplingParams:
        """BadInputError where a stored value is none."""
        values = dict(self.params)
        if "stop" in values:
            values["stop"] = tuple(values["stop"])
        return replace(self.sampling, **values)

    # --- settings of the chat ---

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Replaces what the chat changes; BadInputError for a value that SamplingParams refuses."""
        replace(self.sampling, **params)
        self.params = dict(params)
        self._keep_params()

    @property
    def thinks(self) -> bool | None:
        """What the model is told about thinking; None leaves it to its template."""
        told = self.extra.get(THINKS)
        return told if isinstance(told, bool) else None

    def set_thinks(self, wanted: bool) -> None:
        self.extra[THINKS] = wanted
        self._keep_params()

    def _keep_params(self) -> None:
        if self.chat_id is not None:
            self.store.update_chat(self.chat_id, params={**self.extra, **self.params})

    def set_system(self, text: str) -> None:
        self.system = text
        if self.chat_id is not None:
            self.store.update_chat(self.chat_id, system=text)

    def rename(self, title: str) -> None:
        if self.chat_id is None:
            self.chat_id = self._make_chat(title).id
        else:
            self.store.update_chat(self.chat_id, title=title)

    def _make_chat(self, title: str = "") -> StoredChat:
        params = {**self.extra, **self.params}
        return self.store.create_chat(title=title, system=self.system, model=self.model, params=params)

    # --- asking ---

    def ask(self, text: str, *, instead_of: StoredMessage | None = None) -> StoredMessage:
        """Adds a question at the end, or as another version of one that was asked before."""
        if self.chat_id is None:
            self.chat_id = self._make_chat().id
        if instead_of is not None:
            parent = instead_of.parent_id
        else:
            parent = self.branch[-1].id if self.branch else None
        question = self.store.add_message(self.chat_id, ChatMessage("user", text), parent_id=parent)
        self.refresh()
        return question

    def begin(self, question: StoredMessage) -> Question:
        """Gets an answer to ``question``, another one where it has one already."""
        assert self.chat_id is not None
        sampling = self.effective_sampling
        self.store.update_chat(self.chat_id, model=self.model)
        self.store.set_head(self.chat_id, question.id)
        self.refresh()
        messages = self.store.conversation(self.chat_id, question.id)
        writer = self.store.begin_answer(
            self.chat_id, parent_id=question.id, model=self.model, sampling=sampling
        )
        return Question(self.chat_id, messages, sampling, writer)

    # --- where we are ---

    @property
    def last_question(self) -> StoredMessage | None:
        return self.question_back(1)

    def question_back(self, number: int) -> StoredMessage | None:
        """The ``number``th question of the branch from its end."""
        asked = [message for message in self.branch if message.message.role == "user"]
        return asked[-number] if 0 < number <= len(asked) else None

    @property
    def tokens(self) -> int:
        """Of the conversation, when it was last answered; 0 where nobody counted."""
        last = self.answer_back(1)
        usage = last.usage if last is not None else None
        return usage.prompt_tokens + usage.completion_tokens if usage else 0

    def answer_back(self, number: int) -> StoredMessage | None:
        """The ``number``th answer of the branch from its end."""
        given = [message for message in self.branch if message.message.role == "assistant"]
        return given[-number] if 0 < number <= len(given) else None

    @property
    def forks(self) -> list[StoredMessage]:
        """The messages of the branch that have other versions beside them."""
        return [message for message in self.branch if message.num_siblings > 1]

    def step(self, message: StoredMessage, by: int) -> bool:
        """Shows the version of ``message`` that is ``by`` places on; False at the end of the row."""
        row = list(self.store.siblings(message.id))
        place = [sibling.id for sibling in row].index(message.id) + by
        if not 0 <= place < len(row):
            return False
        self.store.select(row[place].id)
        self.refresh()
        return True

    def go_back_to(self, message: StoredMessage | None) -> None:
        """The branch ends with ``message``; what is asked next goes under it. Nothing is removed."""
        assert self.chat_id is not None
        self.store.set_head(self.chat_id, message.id if message else None)
        self.refresh()

    def go_to(self, message_id: str) -> None:
        """Shows the branch with this message, where it was left."""
        if all(message.id != message_id for message in self.branch):
            self.store.select(message_id)
            self.refresh()

    def last_turns(self, number: int) -> list[ChatMessage]:
        """The last ``number`` questions with their answers."""
        first = self.question_back(number) or next(iter(self.branch), None)
        if first is None:
            return []
        ids = [message.id for message in self.branch]
        return [m.message for m in self.branch[ids.index(first.id) :] if text_of(m.message)]
