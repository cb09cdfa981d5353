"""The Python API: a model, prompts in, answers out. A composition root beside the commands."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from edgellm.contracts import (
    ChatMessage,
    ConstraintSpec,
    EngineStats,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    Notice,
    RequestTimings,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from edgellm.own_loop import run_in_own_loop
from edgellm_models.errors import BadInputError, EngineError, UsageError

if TYPE_CHECKING:
    from edgellm.cli.runtime import Runtime
    from edgellm.engine.async_engine import TokenStream
    from edgellm_models.tokenizer.chat_encoding import ChatEncoder, RememberedAnswer

DEFAULT_MAX_TOKENS = 256

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class LLMAnswer:
    """One sampled answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: RequestTimings
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    """Why it broke off, where ``finish_reason`` is ERROR."""


@dataclass(frozen=True)
class LLMResult:
    """Everything that came of one prompt."""

    prompt_token_ids: tuple[int, ...]
    answers: tuple[LLMAnswer, ...]
    """``num_samples`` of them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens from the second on."""
    notices: tuple[Notice, ...] = ()

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text


class LLM:
    """A loaded model. The prompts of one call run together, and beside those of calls from other threads.

    with LLM("smollm2-135m", ctx=2048) as llm:
        for result in llm.generate(["The capital of France is", "1, 2, 3,"]):
            print(result.text)
    """

    def __init__(
        self, model: str | Path, *, on_notice: Callable[[Notice], None] | None = None, **settings: Any
    ) -> None:
        """``model`` is what commands take: a catalog name, a path, ``hf:...``; fetched if it is not here.

        ``settings`` are the fields of ``EngineConfig``; what is not given comes from the environment and the
        configuration files. ``on_notice`` hears what was chosen or changed, which ``notices`` keeps as well.
        """
        from edgellm.cli.runtime import load_runtime
        from edgellm.config import EngineConfig
        from edgellm.locations import Locations
        from edgellm_models.catalog import pull_model, resolve_model

        self._lock = threading.Lock()
        self._encoder: ChatEncoder | None = None
        self._remembered: tuple[RememberedAnswer, ...] = ()
        self._resolved = EngineConfig(model=str(model), **settings).resolve()
        locations = Locations.from_environment()
        found = resolve_model(str(model), locations.models)
        path = found.path
        if path is None:
            assert found.entry is not None
            locations.ensure(locations.models)
            path = pull_model(
                found.entry, locations.models, on_notice=on_notice or (lambda notice: None)
            ).path
        self._runtime: Runtime = load_runtime(self._resolved, path, found.name, on_notice)
        self._recommended = dict(found.entry.sampling) if found.entry is not None else {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the model."""
        self._runtime.close()

    @property
    def info(self) -> ModelInfo:
        return self._runtime.info

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What loading chose or changed."""
        return self._runtime.notices

    @property
    def stats(self) -> EngineStats:
        return self._runtime.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_samples: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        constraint: ConstraintSpec | None = None,
    ) -> list[LLMResult]:
        """Continues texts, or lists of token ids, without a chat template: a result per prompt, in order.

        Greedy and at most 256 tokens unless ``sampling`` says otherwise, for all or one for each: prompts
        that are equal get equal texts where their seed is. BadInputError, before anything runs, names the
        first prompt that cannot be served; UsageError where there are not as many samplings as prompts.
        """
        listed = _as_list(prompts)
        if sampling is None:
            base = SamplingParams(temperature=0.0, max_new_tokens=DEFAULT_MAX_TOKENS)
            sampling = self._resolved.sampling_params(base)
        each = [sampling] * len(listed) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(listed):
            raise UsageError(f"{len(listed)} prompts have {len(each)} samplings: give one, or one for each")
        requests = [
            GenerationRequest(
                uuid.uuid4().hex,
                self._ids(prompt),
                own,
                num_samples=num_samples,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                constraint=constraint,
                kv_policy=self._runtime.kv_policy,
                continues_text=True,
            )
            for prompt, own in zip(listed, each, strict=True)
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        num_samples: int = 1,
        logprobs: int | None = None,
        constraint: ConstraintSpec | None = None,
    ) -> LLMResult:
        """Answers a conversation under the model's chat template. Messages may be dictionaries as OpenAI has
        them.

        ``sampling`` None takes what the catalog, then the model recommends. A later call with this answer as
        an assistant message finds its keys and values in the cache. BadInputError for a base model.
        """
        from edgellm.chat.remembered import remember
        from edgellm.chat.request import build_request

        if sampling is None:
            base: dict[str, Any] = dict(
                self._recommended or self._runtime.sampling_defaults or FALLBACK_SAMPLING
            )
            sampling = self._resolved.sampling_params(SamplingParams(**base))
        with self._lock:
            encoder, remembered = self._chat_encoder(), self._remembered
        built = build_request(
            encoder,
            [_message(message) for message in messages],
            sampling,
            context_length=self.info.context_length,
            tools=tools,
            remembered=remembered,
            num_samples=num_samples,
            logprobs=logprobs,
            constraint=constraint,
            kv_policy=self._runtime.kv_policy,
        )
        [result] = self._run([built.request])
        with self._lock:
            for answer in result.answers:
                self._remembered = remember(
                    self._remembered, answer.text, answer.token_ids, self._runtime.tokenizer
                )
        return replace(result, notices=(*built.notices, *result.notices))

    def save_kv(self, text: Prompt | Sequence[ChatMessage | Mapping[str, Any]], path: str | Path) -> int:
        """Writes the KV of a prompt, of ids (say a result's prompt and answer), or of a chat's messages to a
        file that ``load_kv`` of a later process takes up; how many tokens it holds.

        Whole blocks of what is still in the cache. BadInputError when nothing is, OutputError.
        """
        if isinstance(text, str) or all(isinstance(item, int) for item in text):
            ids = self._ids(cast(Prompt, text))
        else:
            messages = [_message(cast(ChatMessage, message)) for message in text]
            with self._lock:
                encoder, remembered = self._chat_encoder(), self._remembered
            from edgellm.chat.messages import message_object

            ids = encoder.encode([message_object(m) for m in messages], remembered=remembered).token_ids
        answers = [(answer.text, answer.token_ids) for answer in self._remembered]
        return self._runtime.engine.save_kv(Path(path), ids, answers=answers)

    def load_kv(self, path: str | Path) -> int:
        """Puts the KV of a file into the cache, so that what begins with its tokens starts without a prefill;
        how many tokens. BadInputError, one line, when it is damaged or of another model, KV type or version.
        """
        from edgellm_models.tokenizer.chat_encoding import RememberedAnswer

        saved = self._runtime.engine.load_kv(Path(path))
        with self._lock:
            self._remembered = (*self._remembered, *(RememberedAnswer(*a) for a in saved.answers))
        return len(saved.token_ids)

    # --- inside ---

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        tokenizer = self._runtime.tokenizer
        ids = tokenizer.encode(prompt)
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return tuple(ids)

    def _chat_encoder(self) -> ChatEncoder:
        from edgellm.chat.request import chat_encoder

        if self._encoder is None:
            templates = self._runtime.load_templates()
            self._encoder, _ = chat_encoder(self._runtime.tokenizer, templates, model_name=self.info.name)
        return self._encoder

    def _run(self, requests: Sequence[GenerationRequest]) -> list[LLMResult]:
        engine = self._runtime.engine
        for index, request in enumerate(requests):
            try:
                engine.validate(request)
            except BadInputError as error:
                raise BadInputError(f"prompt {index}: {error}" if len(requests) > 1 else str(error)) from None

        async def collect(stream: TokenStream) -> list[TokenEvent]:
            return [event async for event in stream]

        async def answer() -> list[list[TokenEvent]]:
            streams = [engine.submit(request) for request in requests]
            return list(await asyncio.gather(*map(collect, streams)))

        def give_up() -> None:
            for request in requests:
                engine.cancel(request.request_id)

        found = run_in_own_loop(answer(), give_up)
        return [_result(request, events) for request, events in zip(requests, found, strict=True)]


FALLBACK_SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Where neither the catalog nor the model recommends anything."""


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as many: a sequence of integers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _message(message: ChatMessage | Mapping[str, Any]) -> ChatMessage:
    """BadInputError names the keys that a message does not have."""
    if isinstance(message, ChatMessage):
        return message
    try:
        return ChatMessage(**message)
    except TypeError as error:
        raise BadInputError(
            f"a message has a role, content and perhaps tool_calls, not the keys {sorted(message)}: {error}"
        ) from None


def _result(request: GenerationRequest, events: Sequence[TokenEvent]) -> LLMResult:
    answers = []
    for sample in range(request.num_samples):
        own = [event for event in events if event.sample == sample]
        last = own[-1]
        if last.usage is None or last.timings is None or last.seed is None:
            raise EngineError(f"the engine has failed and serves no more: {last.error}")
        assert last.finish_reason is not None
        answers.append(
            LLMAnswer(
                text="".join(event.text for event in own),
                token_ids=tuple(token for event in own for token in event.token_ids),
                finish_reason=last.finish_reason,
                usage=last.usage,
                timings=last.timings,
                seed=last.seed,
                logprobs=tuple(logprob for event in own for logprob in event.logprobs),
                error=last.error,
            )
        )
    return LLMResult(
        request.prompt_token_ids,
        tuple(answers),
        tuple(logprob for event in events for logprob in event.prompt_logprobs),
        tuple(event.notice for event in events if event.notice is not None),
    )
