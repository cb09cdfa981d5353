"""The conversation of the plain chat: its messages, and each of them saved as it comes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.contracts import (
    ChatEvent,
    ChatMessage,
    Delta,
    DraftCounts,
    Finished,
    FinishReason,
    NoticeEvent,
    RequestTimings,
    SamplingParams,
    Usage,
)
from edgellm_models.errors import EdgeLLMError, Notice

if TYPE_CHECKING:
    from edgellm.cli.runtime import OnNotice
    from edgellm.contracts import AnswerWriter, ChatStore, StoredChat, StoredMessage

_T = TypeVar("_T")


class ChatRecord:
    """One conversation after the other, in memory and, with a store, on the disk.

    A chat is made with its first question. A history that refuses is one notice and never the end of a
    conversation: what comes after is not saved.
    """

    def __init__(
        self, store: ChatStore | None, on_notice: OnNotice, *, system: str = "", model_argument: str = ""
    ) -> None:
        """``store`` None saves nothing; ``model_argument`` is how a later command names the model."""
        self._store = store
        self._on_notice = on_notice
        self._system = system
        self._model_argument = model_argument
        self._writer: AnswerWriter | None = None
        self._text: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._finished: Finished | None = None
        self.start_over()

    def start_over(self) -> None:
        """Begins another conversation."""
        self.messages = [ChatMessage("system", self._system)] if self._system else []
        self.conversation_id = uuid.uuid4().hex
        self.chat: StoredChat | None = None
        self.tokens = 0
        """Of the conversation, as its last answer counted them."""
        self._end_id: str | None = None
        """The saved message that the next question follows."""
        self._forget_answer()

    def take_up(self, store: ChatStore, chat: StoredChat) -> None:
        """Goes on with a saved chat, behind its last answer. A question that got no answer stays in the
        store, as a branch of its own."""
        self._system = self._system or chat.system
        self.start_over()
        branch = list(store.branch(chat.id))
        while branch and not _is_answer(branch[-1]):
            branch.pop()
        self._end_id = branch[-1].id if branch else None
        said = store.conversation(chat.id, self._end_id) if self._end_id else []
        self.messages = [*self.messages, *(m for m in said if m.role != "system")]
        self.conversation_id = chat.id
        usages = [m.usage for m in branch if m.usage is not None]
        self.tokens = usages[-1].prompt_tokens + usages[-1].completion_tokens if usages else 0
        if self._store is not None:
            self.chat = chat
            if self._system != chat.system:
                self._try(lambda: store.update_chat(chat.id, system=self._system))

    @property
    def is_saved(self) -> bool:
        """There is a chat in the store with this conversation."""
        return self._store is not None and self.chat is not None

    @contextlib.contextmanager
    def exchange(self, text: str, model: str, sampling: SamplingParams) -> Iterator[None]:
        """A question and its answer: give ``on_event`` every event inside. Whatever ends it, what has come is
        kept; a question whose answer has no text is no part of the conversation that goes on."""
        self._forget_answer()
        self.messages.append(ChatMessage("user", text))
        self._try(lambda: self._begin(text, model, sampling))
        error: str | None = None
        try:
            yield
        except EdgeLLMError as failure:
            error = str(failure)
            raise
        finally:
            self._end(error)

    def on_event(self, event: ChatEvent) -> None:
        writer = self._writer
        if isinstance(event, Delta):
            self._text.append(event.text)
            if event.tool_call is not None:
                self._tool_calls.append(dict(event.tool_call))
            if writer is not None:
                writer.add(event.text, event.reasoning)
        elif isinstance(event, NoticeEvent):
            if writer is not None:
                writer.add_notice(event.notice)
        elif isinstance(event, Finished):
            self._finished = event

    @property
    def reply(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    def _forget_answer(self) -> None:
        self._text, self._tool_calls, self._finished = [], [], None

    def _begin(self, text: str, model: str, sampling: SamplingParams) -> None:
        assert self._store is not None
        if self.chat is None:
            params = {"model_argument": self._model_argument} if self._model_argument else {}
            self.chat = self._store.create_chat(system=self._system, model=model, params=params)
            self.conversation_id = self.chat.id
        chat_id = self.chat.id
        question = self._store.add_message(chat_id, ChatMessage("user", text), parent_id=self._end_id)
        self._writer = self._store.begin_answer(
            chat_id, parent_id=question.id, model=model, sampling=sampling
        )

    def _end(self, error: str | None) -> None:
        writer, self._writer = self._writer, None
        finished = self._finished
        if finished is not None:
            self.tokens = finished.usage.prompt_tokens + finished.usage.completion_tokens
        if writer is not None:
            if finished is None and error is None:
                # Ctrl-C twice, SIGTERM: nobody counted.
                unknown = RequestTimings(0.0, 0.0, 0.0)
                finished = Finished(FinishReason.CANCELLED, Usage(0, 0, 0), unknown, DraftCounts(), 0)
            end = finished
            self._try(
                lambda: (
                    writer.finish(end, tool_calls=self._tool_calls)
                    if end is not None
                    else writer.fail(error or "unknown")
                )
            )
            if self.reply:
                self._end_id = writer.message_id
        if self.reply:
            self.messages.append(ChatMessage("assistant", self.reply))
        else:
            self.messages.pop()

    def _try(self, work: Callable[[], _T]) -> _T | None:
        if self._store is None:
            return None
        try:
            return work()
        except EdgeLLMError as error:
            self._on_notice(Notice("chat_not_saved", f"this chat is not saved any further: {error}"))
            self._store = self._writer = None
            return None


def _is_answer(stored: StoredMessage) -> bool:
    return stored.message.role != "user" and bool(stored.message.content or stored.message.tool_calls)
