"""Messages of a conversation to one GenerationRequest."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.chat.messages import message_object
from edgellm.chat.trim import trim
from edgellm.contracts import ChatMessage, GenerationRequest, SamplingParams
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.chat_encoding import ChatEncoder, EncodedChat, RememberedAnswer
from edgellm_models.tokenizer.chat_template import ChatTemplates

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""What a base model gets when its user asks for a chat all the same: roles as plain words."""


class ContextExceededError(BadInputError):
    """A prompt that leaves no room for an answer in the context."""

    def __init__(self, message: str, prompt_tokens: int, context_length: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


def chat_encoder(
    tokenizer: Tokenizer, templates: ChatTemplates | None, *, model_name: str, plain_fallback: bool = False
) -> tuple[ChatEncoder, tuple[Notice, ...]]:
    """The encoder for a model's conversations, made once per model.

    A base model without a template is a BadInputError, or with ``plain_fallback`` a plain transcript and a
    Notice: another model's format is never used.
    """
    if templates is not None:
        return ChatEncoder(tokenizer, templates), ()
    if not plain_fallback:
        raise BadInputError(
            f"{model_name} is a base model: it has no chat template, so it cannot chat; use `edgellm"
            f" complete`"
            " (or /v1/completions), or a model that was tuned for chat"
        )
    bos = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None and tokenizer.add_bos else ""
    notice = Notice(
        "no_chat_template",
        f"{model_name} is a base model without a chat template: it sees a plain transcript ('User: ...',"
        f" 'Assistant:')"
        " and may not answer as a chat model does",
    )
    return ChatEncoder(tokenizer, ChatTemplates({"default": PLAIN_TEMPLATE}, {"bos_token": bos})), (notice,)


@dataclass(frozen=True)
class BuiltRequest:
    """A request and what its maker wants to say about it."""

    request: GenerationRequest
    prompt_text: str
    notices: tuple[Notice, ...] = ()


def build_request(
    encoder: ChatEncoder,
    messages: Sequence[ChatMessage],
    sampling: SamplingParams,
    *,
    context_length: int,
    tools: Sequence[Mapping[str, Any]] = (),
    remembered: Sequence[RememberedAnswer] = (),
    template_variables: Mapping[str, Any] | None = None,
    conversation_id: str | None = None,
    request_id: str | None = None,
    kv_policy: str = "stop",
    **fields: Any,
) -> BuiltRequest:
    """Renders, tokenizes and checks a conversation. With any ``kv_policy`` but stop, oldest turns that do
    not fit in the context are left out.

    ``fields`` are further fields of GenerationRequest. BadInputError when there are no messages, when the
    template refuses them, and when the prompt leaves no room in the context (naming both numbers).
    """
    if not messages:
        raise BadInputError("there are no messages to answer")

    def encode(some: Sequence[ChatMessage]) -> EncodedChat:
        return encoder.encode(
            [message_object(message) for message in some],
            tools or None,
            remembered=remembered,
            **dict(template_variables or {}),
        )

    notices: tuple[Notice, ...] = ()
    if kv_policy in ("trim", "window", "budget"):  # evicted or not, no position lies behind the context
        trimmed = trim(messages, encode, context_length, sampling.max_new_tokens)
        chat, notices = trimmed.chat, trimmed.notices
        if kv_policy == "trim":
            kv_policy = "stop"  # what fits is answered like any other
    else:
        chat = encode(messages)
    if not chat.token_ids:
        raise BadInputError("the chat template rendered the messages to an empty prompt")
    check_context(chat, context_length)
    request = GenerationRequest(
        request_id=request_id or uuid.uuid4().hex,
        prompt_token_ids=chat.token_ids,
        sampling=sampling,
        protected_tokens=chat.system_tokens,
        turn_starts=chat.turn_starts,
        conversation_id=conversation_id,
        kv_policy=kv_policy,
        arrival_time=time.monotonic(),
        **fields,
    )
    return BuiltRequest(request, chat.text, (*notices, *chat.notices))


def check_context(chat: EncodedChat, context_length: int) -> None:
    """ContextExceededError, with both numbers, when no token of an answer fits behind the prompt."""
    if len(chat.token_ids) >= context_length:
        raise ContextExceededError(
            f"the conversation has {len(chat.token_ids)} tokens but the context holds {context_length};"
            f" start a new"
            " chat, shorten the messages, or raise --ctx",
            len(chat.token_ids),
            context_length,
        )


def count_tokens(encoder: ChatEncoder, messages: Sequence[ChatMessage]) -> int:
    """Tokens of the prompt that these messages make, the generation prompt included."""
    return len(encoder.encode([message_object(message) for message in messages]).token_ids) if messages else 0
