"""The request of /v1/responses, stateless: its items as a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgellm.contracts import SamplingParams
from edgellm.server.api_errors import bad_field
from edgellm.server.chat_schema import ChatRequest, read_chat
from edgellm.server.fields import Fields, shown
from edgellm.server.options import HARMLESS, check_names

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "truncation")
"""Fields that mean the same in a chat completion."""
INCLUDED_LOGPROBS = "message.output_text.logprobs"
OWN = ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "reasoning", "include")
EXTRAS = ("top_k", "min_p", "seed", "stop", "cache_salt", "conversation_id", "chat_template_kwargs")
REFUSED = {
    "previous_response_id": "is not supported: nothing is stored here; send the whole input",
    "conversation": "is not supported: nothing is stored here; send the whole input",
    "background": "is not supported",
    "prompt": "is not supported: there are no stored prompts here",
    "messages": "is for /v1/chat/completions; here it is input",
}


def read_responses(body: Mapping[str, Any], defaults: SamplingParams, *, strict: bool = False) -> ChatRequest:
    """The chat request that a responses request means. ApiError 400 names the field."""
    fields = Fields(body)
    refused = {name: why for name, why in REFUSED.items() if body.get(name) not in (None, False)}
    warnings = check_names(
        fields,
        (*SAME, *OWN, *EXTRAS),
        refused,
        strict=strict,
        harmless=(*HARMLESS, *REFUSED, "max_tool_calls"),
    )
    included = fields.raw("include") or []
    if not isinstance(included, list):
        raise fields.refuse("include", "a list of names")
    if [name for name in included if name != INCLUDED_LOGPROBS]:
        warnings = (*warnings, "include asks for what is not made here and was ignored")
    chat: dict[str, Any] = {name: body[name] for name in (*SAME, *EXTRAS) if fields.has(name)}
    chat["messages"] = _messages(fields)
    if fields.has("top_logprobs") or INCLUDED_LOGPROBS in included:
        chat["logprobs"] = True
    if fields.has("max_output_tokens"):
        chat["max_completion_tokens"] = fields.raw("max_output_tokens")
    text = fields.object("text")
    if text is not None:
        format_fields = text.object("format")
        if format_fields is not None:
            chat["response_format"] = _format(format_fields)
    if fields.has("tools"):
        chat["tools"] = [
            _tool(Fields(tool, f"tools.{i}.")) for i, tool in enumerate(fields.objects("tools", 128))
        ]
    if fields.has("tool_choice"):
        chat["tool_choice"] = fields.raw("tool_choice")
    reasoning = fields.object("reasoning")
    if reasoning is not None and reasoning.has("effort"):
        chat["reasoning_effort"] = reasoning.text("effort")
    found = read_chat(chat, defaults, strict=strict)
    from dataclasses import replace

    return replace(found, options=replace(found.options, warnings=(*warnings, *found.options.warnings)))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if fields.has("instructions"):
        found.append({"role": "system", "content": fields.text("instructions")})
    value = fields.raw("input")
    if isinstance(value, str):
        return [*found, {"role": "user", "content": value}]
    items = fields.objects("input", 10_000)
    if not items:
        raise bad_field("input", "input must be a text or a list of at least one item")
    for index, item in enumerate(items):
        found += _item(Fields(item, f"input.{index}."), item)
    return found


def _item(fields: Fields, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = fields.text("type", "message")
    if kind == "message":
        return [{"role": item.get("role"), "content": item.get("content")}]
    if kind == "function_call":
        call = {
            "id": fields.text("call_id"),
            "type": "function",
            "function": {"name": fields.text("name"), "arguments": fields.text("arguments", "{}")},
        }
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        output = fields.raw("output")
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return [{"role": "tool", "content": text, "tool_call_id": fields.text("call_id")}]
    if kind == "reasoning":
        return []  # the model's own thoughts of earlier turns, which templates leave out
    raise bad_field(fields.name("type"), f"{fields.name('type')} {shown(kind)} is not supported")


def _format(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type", "text")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {"name": fields.text("name"), "schema": fields.raw("schema")}}


def _tool(fields: Fields) -> dict[str, Any]:
    if fields.text("type", "function") != "function":
        raise bad_field(fields.name("type"), f"{fields.name('type')} must be function: no others are here")
    function = {key: fields.raw(key) for key in ("name", "description", "parameters") if fields.has(key)}
    return {"type": "function", "function": function}
