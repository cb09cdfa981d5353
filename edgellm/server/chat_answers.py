"""Chat events as OpenAI's chat completions: chunks of a stream, or one whole answer, from the same events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from edgellm.contracts import (
    ChatEvent,
    Delta,
    DraftCounts,
    Finished,
    FinishReason,
    Notice,
    NoticeEvent,
    Prefill,
    Queued,
    TokenLogprob,
    Usage,
)
from edgellm.server.answering import Answering, Choice, is_out_of_memory
from edgellm.server.api_errors import RETRY_FULL_S, ApiError
from edgellm.server.options import Options
from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.shared import HIDDEN_KINDS

LEAST_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON has no form for; OpenAI's value."""


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


class ChatAnswers:
    """Writes the answers of one request."""

    def __init__(
        self,
        answering: Answering,
        options: Options,
        tokenizer: Tokenizer,
        model_name: str,
        kv_policy: str,
        notices: Sequence[Notice] = (),
    ) -> None:
        self.id = new_id("chatcmpl-")
        self._answering = answering
        self._options = options
        self._tokenizer = tokenizer
        self._model = model_name
        self._kv_policy = kv_policy
        self._notices = [*notices]
        self._created = int(time.time())

    # --- one whole answer ---

    async def whole(self) -> dict[str, Any]:
        """The body of a completion. ApiError when one of its answers failed."""
        count = len(self._answering.choices)
        texts: list[list[Delta]] = [[] for _ in range(count)]
        async for index, event in self._answering.events():
            if isinstance(event, Delta):
                texts[index].append(event)
            elif isinstance(event, NoticeEvent):
                self._notices.append(event.notice)
        for choice in self._answering.choices:
            raise_failure(choice)
        choices = [self._whole_choice(i, deltas) for i, deltas in enumerate(texts)]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage_json(self._answering.choices),
            "edgellm": {
                **final_extras(self._answering.choices[0], self._kv_policy),
                **self._told(),
                **self._token_ids([t for delta in texts[0] for t in delta.token_ids]),
            },
        }

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        content = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = [_whole_call(delta.tool_call) for delta in deltas if delta.tool_call is not None]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        message["refusal"] = None
        finished = self._answering.choices[index].finished
        assert finished is not None
        logprobs = None
        if self._options.logprobs is not None:
            writer = self._writer()
            entries = [writer.entry(lp) for delta in deltas for lp in delta.logprobs]
            logprobs = {"content": entries, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_word(finished),
        }

    # --- a stream ---

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream; the last may be an error object, after which no other comes."""
        writers = [self._writer() for _ in self._answering.choices]
        for index in range(len(self._answering.choices)):
            extras = self._told() if index == 0 else {}
            self._notices.clear()
            yield self._chunk(index, {"role": "assistant", "content": ""}, extras)
        events = self._answering.events()
        try:
            async for index, event in events:
                if isinstance(event, NoticeEvent):
                    yield self._chunk(index, {}, {"notices": [notice_json(event.notice)]})
                elif isinstance(event, Delta):
                    if not self._says_something(event):
                        continue
                    yield self._delta_chunk(index, event, writers[index])
                elif isinstance(event, Finished):
                    choice = self._answering.choices[index]
                    try:
                        raise_failure(choice)
                    except ApiError as error:
                        yield error.body()
                        return
                    extras = final_extras(choice, self._kv_policy)
                    yield self._chunk(index, {}, extras, finish_word(event))
                elif self._options.return_progress:
                    yield self._chunk(index, {}, progress_json(event))
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        if self._options.include_usage:
            yield {**self._head(), "choices": [], "usage": usage_json(self._answering.choices)}

    def _delta_chunk(self, index: int, delta: Delta, writer: LogprobWriter) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if delta.text:
            found["content"] = delta.text
        if delta.reasoning:
            found["reasoning_content"] = delta.reasoning
        if delta.tool_call is not None:
            found["tool_calls"] = [dict(delta.tool_call)]
        chunk = self._chunk(index, found, self._token_ids(delta.token_ids))
        if self._options.logprobs is not None:
            entries = [writer.entry(logprob) for logprob in delta.logprobs]
            chunk["choices"][0]["logprobs"] = {"content": entries, "refusal": None} if entries else None
        return chunk

    def _says_something(self, delta: Delta) -> bool:
        """An end token alone is worth a chunk only to who asked for tokens."""
        shown = delta.text or delta.reasoning or delta.tool_call is not None
        asked = (self._options.return_token_ids and delta.token_ids) or (
            self._options.logprobs is not None and delta.logprobs
        )
        return bool(shown or asked)

    def _writer(self) -> LogprobWriter:
        constrained = self._answering.choices[0].request.constraint is not None
        return LogprobWriter(self._tokenizer, self._options.logprobs or 0, strips_first=not constrained)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], extras: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        chunk = {
            **self._head(),
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }
        if extras:
            chunk["edgellm"] = extras
        return chunk

    def _told(self) -> dict[str, Any]:
        """Warnings and notices, where there are some."""
        found: dict[str, Any] = {}
        if self._options.warnings:
            found["warnings"] = list(self._options.warnings)
        if self._notices:
            found["notices"] = [notice_json(notice) for notice in self._notices]
        return found

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._options.return_token_ids and token_ids else {}


class LogprobWriter:
    """Log-probabilities in the form of chat completions, token by token of one answer."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, strips_first: bool) -> None:
        """``strips_first``: the answer's text begins without the first token's space."""
        self._tokenizer = tokenizer
        self._top = top
        self._first = strips_first

    def entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        first, self._first = self._first, False
        return {
            **self._one(logprob.token_id, logprob.logprob, first),
            "top_logprobs": [self._one(t, value, first) for t, value in logprob.top[: self._top]],
        }

    def _one(self, token_id: int, logprob: float, first: bool) -> dict[str, Any]:
        data = visible_bytes(token_id, self._tokenizer, first=first)
        text = data.decode("utf-8", "replace") if data else token_name(token_id, self._tokenizer)
        return {
            "token": text,
            "logprob": max(LEAST_LOGPROB, logprob),
            "bytes": list(data),
            "token_id": token_id,
        }


def visible_bytes(token_id: int, tokenizer: Tokenizer, *, first: bool = False) -> bytes:
    """The bytes that a token adds to an answer's text: none for an end token."""
    if token_id >= tokenizer.vocab_size or tokenizer.token_kind(token_id) in HIDDEN_KINDS:
        return b""
    data = tokenizer.token_bytes(token_id)
    return data.removeprefix(b" ") if first and tokenizer.strips_leading_space else data


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """The spelling of a token that is no text."""
    if token_id >= tokenizer.vocab_size:
        return f"<unused {token_id}>"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def raise_failure(choice: Choice) -> None:
    """ApiError when an answer failed, or was out of time before it began."""
    finished = choice.finished
    assert finished is not None
    error = None
    if finished.reason is FinishReason.ERROR:
        error = engine_failure(finished.error)
    elif choice.timed_out and not finished.usage.completion_tokens:
        error = out_of_time()
    if error is not None:
        error.counted = True  # by Answering
        raise error


def engine_failure(error: str | None) -> ApiError:
    """What an error of the engine is to a client: its memory did not suffice, or something broke."""
    error = error or "the engine failed"
    if is_out_of_memory(error):
        return ApiError(
            503, error, kind="service_unavailable", code="out_of_memory", retry_after_s=RETRY_FULL_S
        )
    return ApiError(500, error, kind="server_error", code="engine_error")


def out_of_time() -> ApiError:
    """A request whose time ended before its answer began."""
    return ApiError(
        503,
        "the request was out of time (--request-timeout) before its answer began",
        kind="service_unavailable",
        code="request_timeout",
        retry_after_s=RETRY_FULL_S,
    )


def finish_word(finished: Finished) -> str:
    """OpenAI's word; an answer that was cut short by a cancel or a deadline is one cut by length."""
    return "length" if finished.reason is FinishReason.CANCELLED else finished.reason.value


def usage_json(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens over all answers; a prompt counts once, however many answers it has."""
    usages = [choice.finished.usage for choice in choices if choice.finished is not None]
    drafts = [choice.finished.draft for choice in choices if choice.finished is not None]
    prompts: dict[str, Usage] = {}
    for choice in choices:
        if choice.finished is not None:
            prompts.setdefault(choice.request.request_id, choice.finished.usage)
    prompt = sum(usage.prompt_tokens for usage in prompts.values())
    completion = sum(usage.completion_tokens for usage in usages)
    accepted = sum(draft.accepted for draft in drafts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts.values())},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reply.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(draft.proposed for draft in drafts) - accepted,
        },
    }


def final_extras(choice: Choice, kv_policy: str) -> dict[str, Any]:
    """The ``edgellm`` object of an answer's end."""
    finished = choice.finished
    assert finished is not None
    timings = finished.timings
    reason = "timeout" if choice.timed_out else finished.reason.value
    return {
        "finish_reason": reason,
        "timings": {
            "queued_s": timings.queued_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "prefill_tokens": timings.prefill_tokens,
            "completion_tokens": timings.completion_tokens,
        },
        "ttft_ms": round(timings.ttft_s * 1000, 3),
        "prefill_tok_s": round(timings.prefill_tokens_per_s, 3),
        "decode_tok_s": round(timings.decode_tokens_per_s, 3),
        "draft": draft_json(finished.draft),
        "seed": finished.seed,
        "kv_policy": kv_policy,
    }


def draft_json(draft: DraftCounts) -> dict[str, int]:
    return {"proposed": draft.proposed, "accepted": draft.accepted, "steps": draft.steps}


def notice_json(notice: Notice) -> dict[str, str]:
    return {"kind": notice.kind, "detail": notice.detail}


def progress_json(event: ChatEvent) -> dict[str, Any]:
    if isinstance(event, Queued):
        return {"queue_position": event.position}
    assert isinstance(event, Prefill)
    return {"prefill": {"done": event.done, "total": event.total, "cached": event.cached}}


def _whole_call(call: Any) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key != "index"}
