"""The fields that all generating endpoints share: which are honoured, harmless or refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgellm.constraint.grammar import grammar_kind
from edgellm.contracts import ConstraintKind, ConstraintSpec, SamplingParams
from edgellm.server.api_errors import bad_field
from edgellm.server.fields import Fields, shown
from edgellm_models.errors import BadInputError

MAX_STOP = 16
MAX_SAMPLES = 8
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 30
MAX_SEED = (1 << 63) - 1

SAMPLING_FIELDS = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ]
)
SHARED_FIELDS = SAMPLING_FIELDS | frozenset(
    [
        "model",
        "n",
        "stream",
        "stream_options",
        "max_tokens",
        "grammar",
        "cache_prompt",
        "cache_salt",
        "prompt_cache_key",
        "prediction",
        "speculative",
        "kv",
        "truncation",
        "conversation_id",
        "return_progress",
        "return_token_ids",
        "min_tokens",
    ]
)
HARMLESS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "verbosity",
        "safety_identifier",
        "prompt_cache_retention",
        "timings_per_token",
        "stream_obfuscation",
    ]
)
"""Sent by clients; they cannot change the answer."""


@dataclass(frozen=True)
class Options:
    """What a request says beside its prompt."""

    model: str
    sampling: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    constraint: ConstraintSpec | None
    cache_salt: str
    prediction: str
    speculate: bool
    max_draft: int | None
    kv_policy: str | None
    """None is the server's."""
    kv_keep: int | None
    conversation_id: str | None
    return_progress: bool
    return_token_ids: bool
    warnings: tuple[str, ...] = ()


def check_names(
    fields: Fields,
    supported: Iterable[str],
    refused: Mapping[str, str],
    *,
    strict: bool,
    harmless: Iterable[str] = HARMLESS,
) -> tuple[str, ...]:
    """Warnings for the names that nobody knows. ApiError for a known one that cannot be honoured, and with
    ``strict`` for an unknown one."""
    known = {*supported, *harmless}
    warnings: list[str] = []
    for name in fields.names():
        if name in refused and fields.has(name):
            raise bad_field(
                fields.name(name), f"{fields.name(name)} {refused[name]}", "unsupported_parameter"
            )
        if name in known or name in refused:
            continue
        shown_name = shown(name)[1:-1]
        if strict:
            raise bad_field(
                shown_name, f"the field {shown_name} is not known (--strict)", "unknown_parameter"
            )
        if len(warnings) < 20:
            warnings.append(f"the field {shown_name} is not known and was ignored")
    return tuple(warnings)


def read_options(
    fields: Fields,
    defaults: SamplingParams,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    warnings: tuple[str, ...],
) -> Options:
    """The shared fields. ``defaults``: what is not said; ``max_tokens``: the limit in force."""
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise bad_field("stream_options", "stream_options is for streams; set stream to true")
    sampling, constraint = _sampling(fields, defaults, max_tokens), _constraint(fields)
    _check_min_tokens(fields, sampling, constrained=constraint is not None or fields.has("tools"))
    kv_policy, kv_keep = _kv(fields)
    salt = fields.text("cache_salt")
    if not fields.boolean("cache_prompt", True):  # llama.cpp's word for computing a prompt anew
        salt = uuid.uuid4().hex
    fields.text("prompt_cache_key")  # routes requests at OpenAI; here all share one cache
    speculative = fields.object("speculative")
    speculate, max_draft = True, None
    if speculative is not None:
        max_draft = speculative.integer("max", 0, 64)
        speculate = speculative.choice("mode", ("auto", "off"), "auto") != "off" and max_draft != 0
    return Options(
        model=fields.text("model"),
        sampling=sampling,
        n=fields.integer("n", 1, MAX_SAMPLES, 1) or 1,
        stream=stream,
        include_usage=stream_options.boolean("include_usage") if stream_options is not None else False,
        logprobs=logprobs,
        constraint=constraint,
        cache_salt=salt,
        prediction=_prediction(fields),
        speculate=speculate,
        max_draft=max_draft,
        kv_policy=kv_policy,
        kv_keep=kv_keep,
        conversation_id=fields.text("conversation_id") or None,
        return_progress=fields.boolean("return_progress"),
        return_token_ids=fields.boolean("return_token_ids"),
        warnings=warnings,
    )


def max_tokens_of(fields: Fields) -> int | None:
    """``max_completion_tokens`` or its old name ``max_tokens``; both and different is refused."""
    new = fields.integer("max_completion_tokens", 0, MAX_TOKENS)
    old = fields.integer("max_tokens", 0, MAX_TOKENS)
    if new is not None and old is not None and new != old:
        raise bad_field(
            "max_tokens", f"max_tokens is {old} and max_completion_tokens {new}; give one of them"
        )
    return old if new is None else new


def _sampling(fields: Fields, defaults: SamplingParams, max_tokens: int | None) -> SamplingParams:
    said: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1, MAX_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "typical_p": fields.number("typical_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.001, 100),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "seed": fields.integer("seed", -MAX_SEED - 1, MAX_SEED),
        "max_new_tokens": max_tokens,
    }
    if said["top_k"] == -1:  # vLLM's spelling of "off"
        said["top_k"] = 0
    for name in ("top_p", "typical_p"):
        if said[name] == 0:
            raise fields.refuse(name, "above 0")
    values = {name: value for name, value in said.items() if value is not None}
    if fields.has("logit_bias"):
        values["logit_bias"] = _logit_bias(fields)
    if fields.has("stop"):
        values["stop"] = _stop(fields)
    if fields.has("stop_token_ids"):
        values["stop_token_ids"] = _token_ids(fields, "stop_token_ids", 256)
    if fields.has("ignore_eos"):
        values["ignore_eos"] = fields.boolean("ignore_eos")
    try:
        return replace(defaults, **values)
    except BadInputError as error:
        name = str(error).split(" ", 1)[0]
        raise bad_field("max_tokens" if name == "max_new_tokens" else name, str(error)) from None


def _check_min_tokens(fields: Fields, sampling: SamplingParams, *, constrained: bool) -> None:
    """``min_tokens`` is honoured where nothing could end the answer before its limit, as benchmarks ask."""
    least = fields.integer("min_tokens", 0, MAX_TOKENS, 0) or 0
    if not least:
        return
    most = sampling.max_new_tokens
    if most is not None and least > most:
        raise bad_field("min_tokens", f"min_tokens is {least} and max_tokens {most}; it cannot be more")
    if constrained or sampling.stop or sampling.stop_token_ids or not sampling.ignore_eos:
        raise bad_field(
            "min_tokens",
            "min_tokens needs ignore_eos, and no stop, stop_token_ids, response_format, grammar or tools: "
            "those end an answer earlier",
            "unsupported_parameter",
        )


def _logit_bias(fields: Fields) -> dict[int, float]:
    found: dict[int, float] = {}
    values = fields.mapping("logit_bias")
    entries = Fields(values, "logit_bias.")
    if len(values) > 4096:
        raise bad_field("logit_bias", f"logit_bias has {len(values)} entries; at most 4096 are taken")
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_field("logit_bias", f"logit_bias names tokens by their ids, not {shown(key)}")
        value = entries.number(key, -100, 100)
        if value is None:
            raise entries.refuse(key, "a number from -100 to 100")
        found[int(key)] = value
    return found


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or len(value) > MAX_STOP or not all(isinstance(s, str) for s in value):
        raise fields.refuse("stop", f"a text or a list of at most {MAX_STOP} texts")
    if any(len(s) > 1000 for s in value):
        raise fields.refuse("stop", "texts of at most 1000 characters")
    return tuple(s for s in value if s)


def _token_ids(fields: Fields, key: str, most: int) -> tuple[int, ...]:
    value = fields.raw(key)
    fits = isinstance(value, list) and len(value) <= most
    if not fits or not all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 1 << 31 for t in value
    ):
        raise fields.refuse(key, f"a list of at most {most} token ids")
    return tuple(value)


def _kv(fields: Fields) -> tuple[str | None, int | None]:
    """``kv: {policy, budget}`` and ``truncation: auto|disabled`` (turns that do not fit are left out)."""
    truncation = fields.choice("truncation", ("auto", "disabled"), "disabled")
    kv = fields.object("kv")
    if kv is None:
        return ("trim" if truncation == "auto" else None), None
    # "random" exists for measurements only, and is nothing that a client may ask for.
    policy = kv.choice("policy", ("stop", "trim", "window", "budget"), "stop")
    keep = kv.integer("budget", 1, MAX_TOKENS)
    if keep is not None and policy not in ("window", "budget"):
        raise bad_field("kv.budget", "kv.budget is how many tokens the policies window and budget keep")
    return policy, keep


def _prediction(fields: Fields) -> str:
    prediction = fields.object("prediction")
    if prediction is None:
        return ""
    prediction.choice("type", ("content",), "content")
    content = prediction.raw("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise prediction.refuse("content", "a text or a list of text parts")
    return content


def _constraint(fields: Fields) -> ConstraintSpec | None:
    """``response_format`` or ``grammar``; never something weaker than was asked."""
    format_fields = fields.object("response_format")
    found: ConstraintSpec | None = None
    if format_fields is not None:
        kind = format_fields.choice("type", ("text", "json_object", "json_schema"), "text")
        if kind == "json_object":
            found = ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"type":"object"}')
        elif kind == "json_schema":
            wrapped = format_fields.object("json_schema")
            if wrapped is None or wrapped.raw("schema") is None:
                raise bad_field(
                    "response_format.json_schema",
                    "response_format of type json_schema needs json_schema.schema, the schema itself",
                )
            found = ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(wrapped.mapping("schema")))
    grammar = fields.raw("grammar")
    if grammar is None:
        return found
    if found is not None:
        raise bad_field("grammar", "grammar and response_format were both given; give one of them")
    if isinstance(grammar, dict):
        entry = Fields(grammar, "grammar.")
        name = entry.choice("kind", [kind.value for kind in ConstraintKind], "lark")
        return ConstraintSpec(ConstraintKind(name), entry.text("text"))
    text = fields.text("grammar")
    return ConstraintSpec(grammar_kind(text), text)
