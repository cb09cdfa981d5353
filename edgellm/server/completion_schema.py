"""The requests of /v1/completions, /v1/embeddings, /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.contracts import ChatMessage, SamplingParams
from edgellm.server.api_errors import bad_field
from edgellm.server.chat_schema import MAX_TOOLS, read_messages, read_tool
from edgellm.server.fields import Fields
from edgellm.server.options import SHARED_FIELDS, Options, check_names, max_tokens_of, read_options

MAX_PROMPTS = 1024
MAX_IDS = 1 << 22
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for /v1/completions."""
MAX_LOGPROBS = 20

COMPLETION_FIELDS = SHARED_FIELDS | frozenset(
    ["prompt", "logprobs", "echo", "best_of", "suffix", "response_format", "max_completion_tokens"]
)
REFUSED = {
    "messages": "is for /v1/chat/completions; here it is prompt",
    "tools": "is for /v1/chat/completions",
    "tool_choice": "is for /v1/chat/completions",
    "top_logprobs": "is for /v1/chat/completions; here logprobs is a number",
}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    """One request of a raw completion: its prompts, each answered ``n`` times."""

    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool = False


@dataclass(frozen=True)
class EmbeddingRequest:
    model: str
    inputs: tuple[Prompt, ...]
    base64: bool
    pooling: str
    dimensions: int | None
    warnings: tuple[str, ...] = ()


def read_completion(
    body: Mapping[str, Any], defaults: SamplingParams, *, strict: bool = False
) -> CompletionRequest:
    """ApiError 400 names the field that is wrong."""
    fields = Fields(body)
    warnings = check_names(fields, COMPLETION_FIELDS, REFUSED, strict=strict)
    if fields.text("suffix"):
        raise bad_field(
            "suffix", "suffix is not supported: this model only continues", "unsupported_parameter"
        )
    n = fields.integer("n", 1, 1 << 30, 1)
    if fields.integer("best_of", 1, 1 << 30, n) != n:
        raise bad_field("best_of", "best_of is not supported; use n", "unsupported_parameter")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS) if fields.raw("logprobs") is not False else None
    limit = max_tokens_of(fields)
    options = read_options(
        fields,
        defaults,
        logprobs=logprobs,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        warnings=warnings,
    )
    echo = fields.boolean("echo")
    if options.constraint is not None and echo:
        raise bad_field(
            "echo", "echo with a grammar cannot be honoured: the prompt is not part of the answer"
        )
    return CompletionRequest(options, read_prompts(fields, "prompt"), echo)


def read_embedding(body: Mapping[str, Any], *, strict: bool = False) -> EmbeddingRequest:
    """ApiError 400 names the field that is wrong."""
    fields = Fields(body)
    supported = ("model", "input", "encoding_format", "dimensions", "pooling")
    warnings = check_names(fields, supported, {}, strict=strict)
    return EmbeddingRequest(
        fields.text("model"),
        read_prompts(fields, "input"),
        fields.choice("encoding_format", ("float", "base64"), "float") == "base64",
        fields.choice("pooling", ("mean", "last"), "mean"),
        fields.integer("dimensions", 1, 1 << 20),
        warnings,
    )


def read_prompts(fields: Fields, key: str) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    value = fields.raw(key)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.refuse(key, "a text, a list of texts, token ids, or lists of token ids")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return (read_ids(value, fields.name(key)),)
    if len(value) > MAX_PROMPTS:
        raise bad_field(
            fields.name(key), f"{fields.name(key)} has {len(value)} entries; at most {MAX_PROMPTS}"
        )
    found: list[Prompt] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and item:
            found.append(read_ids(item, f"{fields.name(key)}.{index}"))
        else:
            raise fields.refuse(key, "a text, a list of texts, token ids, or lists of token ids")
    return tuple(found)


def read_ids(value: list[Any], name: str) -> tuple[int, ...]:
    """Token ids; whether the model has them is checked where it is known."""
    fits = len(value) <= MAX_IDS and all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 1 << 31 for t in value
    )
    if not fits:
        raise bad_field(name, f"{name} must be a list of at most {MAX_IDS} token ids of 0 or more")
    return tuple(value)


@dataclass(frozen=True)
class TemplateRequest:
    """What /apply-template, and /tokenize with messages, render."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool


def read_template(fields: Fields) -> TemplateRequest:
    tools = fields.objects("tools", MAX_TOOLS)
    return TemplateRequest(
        read_messages(fields),
        tuple(read_tool(tool, f"tools.{i}.") for i, tool in enumerate(tools)),
        fields.boolean("add_generation_prompt", True),
    )
