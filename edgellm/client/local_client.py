"""A conversation partner over the engine of this process."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.chat.events import ChatEventMaker
from edgellm.chat.remembered import remember
from edgellm.chat.request import build_request, chat_encoder, count_tokens
from edgellm.contracts import (
    ChatEvent,
    ChatMessage,
    ConstraintSpec,
    DraftCounts,
    EngineStats,
    Finished,
    FinishReason,
    ModelInfo,
    NoticeEvent,
    Queued,
    RequestTimings,
    SamplingParams,
    Usage,
)
from edgellm.engine.async_engine import AsyncEngine
from edgellm.log import log_answer, log_notice
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.chat_encoding import RememberedAnswer
from edgellm_models.tokenizer.chat_template import ChatTemplates

MAX_CONVERSATIONS = 100
"""Conversations whose answers are remembered as ids; the one unused for longest is forgotten first."""


@dataclass
class _Turn:
    """One answer in the making."""

    request_id: str
    cancelled: bool = False


class LocalClient:
    """A contracts.ChatBackend. Renders and tokenizes in a worker thread, so that no event loop waits for a
    long prompt.

    BadInputError when the model has no chat template, unless ``plain_fallback`` allows a plain transcript;
    its notice then comes with the first answer. ``kv_policy`` trim leaves out oldest turns that do not fit.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        templates: ChatTemplates | None,
        info: ModelInfo,
        *,
        plain_fallback: bool = False,
        kv_policy: str = "stop",
    ) -> None:
        self._engine = engine
        self._kv_policy = kv_policy
        self._info = info
        self._encoder, self._notices = chat_encoder(
            tokenizer, templates, model_name=info.name, plain_fallback=plain_fallback
        )
        self._remembered: OrderedDict[str, tuple[RememberedAnswer, ...]] = OrderedDict()
        self._turns: dict[str, list[_Turn]] = {}

    def info(self) -> ModelInfo:
        return self._info

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def stream_chat(
        self,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: ConstraintSpec | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatEvent]:
        """See contracts.ChatBackend. BadInputError when the messages cannot be answered, EngineError when the
        engine has failed; a failure on the way is in Finished."""
        turn = _Turn(f"{conversation_id}-{uuid.uuid4().hex}")
        self._turns.setdefault(conversation_id, []).append(turn)
        try:
            built = await asyncio.to_thread(
                build_request,
                self._encoder,
                list(messages),
                sampling,
                context_length=self._info.context_length,
                tools=tools,
                remembered=self._remembered.get(conversation_id, ()),
                conversation_id=conversation_id,
                request_id=turn.request_id,
                constraint=constraint,
                kv_policy=self._kv_policy,
                template_variables=template_variables,
            )
            if constraint is not None:  # compiling it is no work for an event loop
                await asyncio.to_thread(self._engine.validate, built.request)
            notices, self._notices = (*self._notices, *built.notices), ()
            for notice in notices:
                log_notice(notice)
                yield NoticeEvent(notice)
            prompt_tokens = len(built.request.prompt_token_ids)
            if turn.cancelled:
                yield _cancelled(prompt_tokens)
                return
            maker = ChatEventMaker(prompt_tokens)
            stream = self._engine.submit(built.request)
            try:
                async for event in stream:
                    if (
                        event.queue_position is not None
                        and event.prefill_done is None
                        and not event.token_ids
                    ):
                        yield Queued(event.queue_position)
                    for made in maker.push(event):
                        if isinstance(made, Finished):
                            self._remember(conversation_id, maker)
                            log_answer(self._info.name, made.reason, made.usage, made.timings)
                        elif isinstance(made, NoticeEvent):
                            log_notice(made.notice)
                        yield made
            finally:
                await stream.aclose()
                if not maker.finished:
                    self._remember(conversation_id, maker)
        finally:
            turns = self._turns[conversation_id]
            turns.remove(turn)
            if not turns:
                del self._turns[conversation_id]

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        return await asyncio.to_thread(count_tokens, self._encoder, list(messages))

    async def cancel(self, conversation_id: str) -> None:
        """Ends the conversation's answers within a step; without one it does nothing."""
        for turn in self._turns.get(conversation_id, ()):
            turn.cancelled = True
            self._engine.cancel(turn.request_id)

    async def save_chat(self, conversation_id: str, path: Path) -> int:
        """Writes the KV of a conversation to a file, with its answers as ids, so that a later process goes on
        without a prefill; how many tokens. BadInputError when there is no answer yet, OutputError."""
        answers = [(a.text, a.token_ids) for a in self._remembered.get(conversation_id, ())]
        return await asyncio.to_thread(
            self._engine.save_kv, path, conversation_id=conversation_id, answers=answers
        )

    async def load_chat(self, conversation_id: str, path: Path) -> int:
        """Takes a conversation up from its file: the next answer reuses what it holds; how many tokens.

        BadInputError, one line, when the file is damaged or belongs to another model, KV type or version; the
        conversation then just starts with a prefill.
        """
        saved = await asyncio.to_thread(self._engine.load_kv, path)
        self._remembered[conversation_id] = tuple(RememberedAnswer(*answer) for answer in saved.answers)
        self._remembered.move_to_end(conversation_id)
        return len(saved.token_ids)

    async def close(self) -> None:
        """Cancels what is open and stops the engine."""
        await self._engine.aclose()

    def _remember(self, conversation_id: str, maker: ChatEventMaker) -> None:
        answers = self._remembered.get(conversation_id, ())
        self._remembered[conversation_id] = remember(
            answers, maker.text, maker.token_ids, self._encoder.tokenizer
        )
        self._remembered.move_to_end(conversation_id)
        if len(self._remembered) > MAX_CONVERSATIONS:
            self._remembered.popitem(last=False)


def _cancelled(prompt_tokens: int) -> Finished:
    """The end of an answer that was cancelled before it reached the engine."""
    return Finished(
        FinishReason.CANCELLED,
        Usage(prompt_tokens, 0, 0),
        RequestTimings(0.0, 0.0, 0.0),
        DraftCounts(),
        seed=0,
    )
