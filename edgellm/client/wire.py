"""ChatBackend's types as OpenAI's JSON and back: requests, stream chunks, models, stats. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from edgellm.chat.messages import message_object
from edgellm.contracts import (
    ChatEvent,
    ChatMessage,
    ConstraintKind,
    ConstraintSpec,
    Delta,
    DraftCounts,
    EngineStats,
    Finished,
    FinishReason,
    GpuUse,
    ModelInfo,
    NoticeEvent,
    Prefill,
    Queued,
    RequestTimings,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from edgellm_models.errors import BadInputError, Notice

_STANDARD = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
_OURS = ("top_k", "min_p", "typical_p", "repetition_penalty", "ignore_eos")


def chat_body(
    model: str,
    conversation_id: str,
    messages: Sequence[ChatMessage],
    sampling: SamplingParams,
    tools: Sequence[Mapping[str, Any]],
    constraint: ConstraintSpec | None,
    *,
    ours: bool,
) -> dict[str, Any]:
    """The request of one streamed answer. To a server that is not ``ours`` only OpenAI's own fields go;
    BadInputError for a grammar that it could not keep to."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [message_object(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name, key in _STANDARD.items():
        value = getattr(sampling, name)
        if value is not None:
            body[key] = value
    if sampling.max_new_tokens is not None:
        body["max_completion_tokens" if ours else "max_tokens"] = sampling.max_new_tokens
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if constraint is not None:
        body |= _constraint_json(constraint, ours=ours)
    if ours:
        body |= {name: getattr(sampling, name) for name in _OURS}
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        body |= {"conversation_id": conversation_id, "return_progress": True, "return_token_ids": True}
    return body


def _constraint_json(constraint: ConstraintSpec, *, ours: bool) -> dict[str, Any]:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema = {"name": "answer", "schema": json.loads(constraint.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if not ours:
        raise BadInputError(
            f"this server takes JSON schemas only, not a {constraint.kind.value} grammar; use edgellm serve"
        )
    return {"grammar": {"kind": constraint.kind.value, "text": constraint.text}}


class StreamReader:
    """Lines of one event stream to chat events, of our server's or of any other."""

    def __init__(self) -> None:
        self.answer_id: str | None = None
        self.finished = False
        self._reason: FinishReason | None = None
        self._error: str | None = None
        self._usage = Usage(0, 0, 0)
        self._timings = RequestTimings(0.0, 0.0, 0.0)
        self._draft = DraftCounts()
        self._seed = 0
        self._calls: dict[int, dict[str, Any]] = {}

    def push(self, line: str) -> Iterator[ChatEvent]:
        """What a line tells; comments and unknown fields of the format tell nothing."""
        if self.finished or not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            yield from self._tool_calls()
            yield self.end(self._reason or FinishReason.STOP)
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping):
            yield self.end(FinishReason.ERROR, "the server sent an event that is no JSON object")
            return
        error = chunk.get("error")
        if error:
            message = error.get("message") if isinstance(error, Mapping) else error
            yield self.end(FinishReason.ERROR, str(message))
            return
        if isinstance(chunk.get("id"), str):
            self.answer_id = chunk["id"]
        yield from self._extras(chunk.get("edgellm"))
        if isinstance(chunk.get("usage"), Mapping):
            self._usage = usage_of(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if isinstance(choice, Mapping) and not choice.get("index"):
                yield from self._choice(choice, chunk.get("edgellm"))

    def end(self, reason: FinishReason, error: str | None = None) -> Finished:
        """The last event, with what is known by then."""
        self.finished = True
        return Finished(reason, self._usage, self._timings, self._draft, self._seed, error)

    def _choice(self, choice: Mapping[str, Any], extras: Any) -> Iterator[ChatEvent]:
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            text = delta.get("content")
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            ids = extras.get("token_ids") if isinstance(extras, Mapping) else None
            found = Delta(
                text=text if isinstance(text, str) else "",
                reasoning=reasoning if isinstance(reasoning, str) else "",
                token_ids=tuple(i for i in ids if isinstance(i, int)) if isinstance(ids, list) else (),
                logprobs=_logprobs(choice.get("logprobs")),
            )
            if found.text or found.reasoning or found.token_ids:
                yield found
            for call in delta.get("tool_calls") or ():
                if isinstance(call, Mapping):
                    self._add_call(call)
        if choice.get("finish_reason"):
            try:
                self._reason = self._reason or FinishReason(choice["finish_reason"])
            except ValueError:
                self._reason = FinishReason.STOP

    def _add_call(self, call: Mapping[str, Any]) -> None:
        index = call.get("index", len(self._calls))
        entry = self._calls.setdefault(
            index if isinstance(index, int) else 0,
            {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
        )
        entry["id"] = call.get("id") or entry["id"]
        function = call.get("function")
        if isinstance(function, Mapping):
            entry["function"]["name"] += function.get("name") or ""
            entry["function"]["arguments"] += function.get("arguments") or ""

    def _tool_calls(self) -> Iterator[ChatEvent]:
        for index in sorted(self._calls):
            yield Delta(tool_call=self._calls[index])
        self._calls.clear()

    def _extras(self, extras: Any) -> Iterator[ChatEvent]:
        """What only our server says."""
        if not isinstance(extras, Mapping):
            return
        position = extras.get("queue_position")
        if isinstance(position, int):
            yield Queued(position)
        prefill = extras.get("prefill")
        if isinstance(prefill, Mapping):
            yield Prefill(*(_whole(prefill.get(key)) for key in ("done", "total", "cached")))
        for notice in extras.get("notices") or ():
            if isinstance(notice, Mapping):
                yield NoticeEvent(Notice(str(notice.get("kind")), str(notice.get("detail"))))
        for warning in extras.get("warnings") or ():
            yield NoticeEvent(Notice("request_warning", str(warning)))
        if isinstance(extras.get("timings"), Mapping):
            self._timings = _built(RequestTimings, extras["timings"])
        if isinstance(extras.get("draft"), Mapping):
            self._draft = _built(DraftCounts, extras["draft"])
        if isinstance(extras.get("seed"), int):
            self._seed = extras["seed"]
        if extras.get("finish_reason") == "cancelled":
            self._reason = FinishReason.CANCELLED


def usage_of(found: Mapping[str, Any]) -> Usage:
    """OpenAI's usage object."""
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
    return Usage(_whole(found.get("prompt_tokens")), _whole(cached), _whole(found.get("completion_tokens")))


def model_info(entry: Mapping[str, Any], address: str) -> ModelInfo:
    """A model of ``/v1/models``, with what our server adds."""
    name = str(entry.get("id"))
    ours = entry.get("edgellm")
    if not isinstance(ours, Mapping):
        return foreign_model(name, address)
    base = {f.name: getattr(foreign_model(name, address), f.name) for f in fields(ModelInfo)}
    known = {key: ours[key] for key, value in base.items() if isinstance(ours.get(key), type(value))}
    return ModelInfo(**{**base, **known, "name": name})


def foreign_model(name: str, address: str) -> ModelInfo:
    """A model of which only the name is known."""
    return ModelInfo(
        name=name,
        path=address,
        architecture="",
        file_format="",
        quantization="",
        parameters=0,
        file_bytes=0,
        context_length=0,
        trained_context=0,
        has_chat_template=True,
    )


def engine_stats(answer: Mapping[str, Any]) -> EngineStats:
    """The stats of ``/v1/edge/status``; fields that are not known here are left out."""
    found = answer.get("stats")
    if not isinstance(found, Mapping):
        return EngineStats()
    values = dict(found)
    if isinstance(values.get("draft"), Mapping):
        values["draft"] = _built(DraftCounts, values["draft"])
    stats: EngineStats = _built(EngineStats, values | {"gpu": None})
    return replace(stats, gpu=_gpu_use(values.get("gpu")))


def _gpu_use(found: Any) -> GpuUse | None:
    if not isinstance(found, Mapping):
        return None
    used, total = _whole(found.get("memory_used_bytes")), _whole(found.get("memory_total_bytes"))
    known = {name: _number(found.get(name)) for name in ("busy", "watts", "celsius")}
    return GpuUse(used, total, **known) if total > 0 else None


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from those of the values that have a field of their type; the rest keeps its default."""
    usual = {
        "RequestTimings": RequestTimings(0.0, 0.0, 0.0),
        "DraftCounts": DraftCounts(),
        "EngineStats": EngineStats(),
    }[kind.__name__]
    fitting = {}
    for f in fields(kind):
        default, value = getattr(usual, f.name), values.get(f.name)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        fitting[f.name] = value if isinstance(value, type(default)) else default
    return kind(**fitting)


def _logprobs(found: Any) -> tuple[TokenLogprob, ...]:
    """Logprobs of a chunk, where they carry our token ids; OpenAI's own name tokens by text only."""
    content = found.get("content") if isinstance(found, Mapping) else None
    made = []
    for entry in content or ():
        if isinstance(entry, Mapping) and isinstance(entry.get("token_id"), int):
            top = tuple(
                (other["token_id"], float(other["logprob"]))
                for other in entry.get("top_logprobs") or ()
                if isinstance(other, Mapping) and isinstance(other.get("token_id"), int)
            )
            made.append(TokenLogprob(entry["token_id"], float(entry.get("logprob", 0.0)), top))
    return tuple(made)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
