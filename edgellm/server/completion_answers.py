"""Raw completions: prompts to engine requests, and their events as OpenAI's text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from edgellm.contracts import (
    Delta,
    Finished,
    GenerationRequest,
    Notice,
    NoticeEvent,
    TokenLogprob,
)
from edgellm.server.answering import Answering
from edgellm.server.api_errors import ApiError, api_error, bad_field
from edgellm.server.chat_answers import (
    LEAST_LOGPROB,
    final_extras,
    finish_word,
    new_id,
    notice_json,
    progress_json,
    raise_failure,
    token_name,
    usage_json,
    visible_bytes,
)
from edgellm.server.chat_requests import engine_fields
from edgellm.server.completion_schema import CompletionRequest, Prompt
from edgellm.server.model_host import ServedModel
from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.base import Tokenizer


def encode_prompt(model: ServedModel, prompt: Prompt, name: str = "prompt") -> tuple[int, ...]:
    """Ids of a prompt: a text as the tokenizer has it, BOS included, or ids as they are. ApiError 400."""
    ids = tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    outside = next((t for t in ids if t >= model.vocab_size), None)
    if outside is not None:
        raise bad_field(
            name, f"{name} holds token id {outside}, but the vocabulary has {model.vocab_size} tokens"
        )
    if not ids and model.tokenizer.bos_id is not None:
        ids = (model.tokenizer.bos_id,)
    if not ids:
        raise bad_field(name, f"{name} is empty, and this model adds no beginning-of-text token")
    return ids


def prepare_completion(
    model: ServedModel, completion: CompletionRequest, timeout_s: float | None
) -> list[GenerationRequest]:
    """One request of the engine for each prompt. Work for a thread. ApiError 400."""
    options = completion.options
    policy = options.kv_policy or model.kv_policy
    scores = completion.echo and options.logprobs is not None
    sampling = options.sampling
    if not sampling.max_new_tokens and scores:
        # The engine runs only what answers: one token more, which is left out again.
        sampling = replace(sampling, max_new_tokens=1)
    requests = []
    for index, prompt in enumerate(completion.prompts):
        ids = encode_prompt(model, prompt, "prompt" if len(completion.prompts) == 1 else f"prompt.{index}")
        if len(ids) >= model.info.context_length and sampling.max_new_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens but the context holds {model.info.context_length}; "
                "shorten it, or raise --ctx",
                param="prompt",
                code="context_length_exceeded",
            )
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=ids,
            sampling=sampling,
            prompt_logprobs=options.logprobs if scores else None,
            constraint=options.constraint,
            kv_policy="stop" if policy == "trim" else policy,
            conversation_id=options.conversation_id,
            continues_text=True,
            arrival_time=time.monotonic(),
            **engine_fields(options, model.tokenizer, timeout_s),
        )
        try:
            model.engine.validate(request)
        except BadInputError as error:
            raise api_error(error) from None
        requests.append(request)
    return requests


class CompletionAnswers:
    """Writes the answers of one request."""

    def __init__(
        self,
        answering: Answering,
        completion: CompletionRequest,
        tokenizer: Tokenizer,
        model_name: str,
        kv_policy: str,
    ) -> None:
        self.id = new_id("cmpl-")
        self._answering = answering
        self._completion = completion
        self._options = completion.options
        self._tokenizer = tokenizer
        self._model = model_name
        self._kv_policy = kv_policy
        self._created = int(time.time())
        self._no_answer = self._options.sampling.max_new_tokens == 0

    async def whole(self) -> dict[str, Any]:
        """The body of a completion. ApiError when one of its answers failed."""
        choices = self._answering.choices
        deltas: list[list[Delta]] = [[] for _ in choices]
        notices: list[Notice] = []
        async for index, event in self._answering.events():
            if isinstance(event, Delta) and not self._no_answer:
                deltas[index].append(event)
            elif isinstance(event, NoticeEvent):
                notices.append(event.notice)
        for choice in choices:
            raise_failure(choice)
        body = self._head()
        body["choices"] = [self._whole_choice(i, found) for i, found in enumerate(deltas)]
        body["usage"] = self._usage()
        body["edgellm"] = {
            **final_extras(choices[0], self._kv_policy),
            **self._warnings(),
            **({"notices": [notice_json(notice) for notice in notices]} if notices else {}),
        }
        return body

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        finished = self._answering.choices[index].finished
        assert finished is not None
        writer = _LegacyLogprobs(self._tokenizer, self._options.logprobs or 0)
        text = self._echo(index, writer)
        text += "".join(delta.text for delta in deltas)
        writer.add([logprob for delta in deltas for logprob in delta.logprobs])
        return {
            "index": index,
            "text": text,
            "logprobs": writer.body() if self._options.logprobs is not None else None,
            "finish_reason": "length" if self._no_answer else finish_word(finished),
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream; the last may be an error object, after which no other comes."""
        choices = self._answering.choices
        writers = [_LegacyLogprobs(self._tokenizer, self._options.logprobs or 0) for _ in choices]
        begun: set[int] = set()
        if self._options.warnings:
            yield self._chunk(0, "", None, self._warnings())
        events = self._answering.events()
        try:
            async for index, event in events:
                if index not in begun and isinstance(event, Delta | Finished):
                    begun.add(index)
                    text = self._echo(index, writers[index])
                    if text:
                        yield self._chunk(index, text, writers[index])
                if isinstance(event, NoticeEvent):
                    yield self._chunk(index, "", None, {"notices": [notice_json(event.notice)]})
                elif isinstance(event, Delta):
                    if not self._no_answer and (event.text or event.logprobs or self._token_ids(event)):
                        writers[index].add(event.logprobs)
                        yield self._chunk(index, event.text, writers[index], self._token_ids(event))
                elif isinstance(event, Finished):
                    try:
                        raise_failure(choices[index])
                    except ApiError as error:
                        yield error.body()
                        return
                    word = "length" if self._no_answer else finish_word(event)
                    extras = final_extras(choices[index], self._kv_policy)
                    yield self._chunk(index, "", None, extras, word)
                elif self._options.return_progress:
                    yield self._chunk(index, "", None, progress_json(event))
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        if self._options.include_usage:
            yield {**self._head(), "choices": [], "usage": self._usage()}

    def _echo(self, index: int, writer: _LegacyLogprobs) -> str:
        """The prompt's text, where it is to come first, and its log-probabilities."""
        if not self._completion.echo:
            return ""
        number = index // self._options.n
        prompt = self._completion.prompts[number]
        ids = self._answering.choices[index].request.prompt_token_ids
        if self._options.logprobs is not None:
            writer.add_prompt(ids, self._answering.prompt_logprobs[number])
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(ids)

    def _usage(self) -> dict[str, Any]:
        usage = usage_json(self._answering.choices)
        if self._no_answer:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _warnings(self) -> dict[str, Any]:
        return {"warnings": list(self._options.warnings)} if self._options.warnings else {}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        wanted = self._options.return_token_ids and delta.token_ids
        return {"token_ids": list(delta.token_ids)} if wanted else {}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model}

    def _chunk(
        self,
        index: int,
        text: str,
        writer: _LegacyLogprobs | None,
        extras: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        logprobs = writer.take() if writer is not None and self._options.logprobs is not None else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(), "choices": [choice]}
        if extras:
            chunk["edgellm"] = extras
        return chunk


class _LegacyLogprobs:
    """Log-probabilities in the form of text completions: four lists, an entry per token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._lists: dict[str, list[Any]] = {}
        self._clear()

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The prompt: nothing comes before its first token, which has no probability."""
        self._entry(token_ids[0], None, ())
        for token_id, logprob in zip(token_ids[1:], logprobs, strict=False):
            self._entry(token_id, logprob.logprob, logprob.top)

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        for logprob in logprobs:
            self._entry(logprob.token_id, logprob.logprob, logprob.top)

    def take(self) -> dict[str, list[Any]] | None:
        """What came since the last call; None where nothing did."""
        body = self.body()
        self._clear()
        return body if body["tokens"] else None

    def body(self) -> dict[str, list[Any]]:
        return self._lists

    def _clear(self) -> None:
        self._lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _entry(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        lists = self._lists
        lists["tokens"].append(self._name(token_id))
        lists["token_logprobs"].append(None if logprob is None else max(LEAST_LOGPROB, logprob))
        lists["text_offset"].append(self._offset)
        best: dict[str, float] | None = None
        if logprob is not None:
            best = {}
            for other, value in top[: self._top]:
                best.setdefault(self._name(other), max(LEAST_LOGPROB, value))
            if not best and not self._top:
                best = {self._name(token_id): max(LEAST_LOGPROB, logprob)}
        lists["top_logprobs"].append(best)
        self._offset += len(visible_bytes(token_id, self._tokenizer).decode("utf-8", "replace"))

    def _name(self, token_id: int) -> str:
        """A token's text; one that is no whole text by its bytes, as OpenAI spells them."""
        data = visible_bytes(token_id, self._tokenizer)
        if not data:
            return token_name(token_id, self._tokenizer)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
