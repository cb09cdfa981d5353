"""The request of /v1/chat/completions: messages, tools, template variables, and the shared options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgellm.contracts import ChatMessage, ContentPart, SamplingParams
from edgellm.server.api_errors import bad_field
from edgellm.server.fields import Fields, shown
from edgellm.server.options import (
    MAX_LOGPROBS,
    SHARED_FIELDS,
    Options,
    check_names,
    max_tokens_of,
    read_options,
)

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")

CHAT_FIELDS = SHARED_FIELDS | frozenset(
    [
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "reasoning_format",
        "chat_template_kwargs",
    ]
)
REFUSED = {
    "audio": "is not supported: this server answers in text",
    "functions": "is the old form; use tools",
    "function_call": "is the old form; use tool_choice",
    "web_search_options": "is not supported: this server does not search the web",
    "best_of": "is not supported; use n",
    "echo": "is for /v1/completions",
    "suffix": "is for /v1/completions",
    "prompt": "is for /v1/completions; here it is messages",
    "input": "is for /v1/responses; here it is messages",
    "chat_template": "is not supported: the model's own template is used",
}


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may or must call."""

    kind: str = "auto"
    """auto, none or required."""
    name: str | None = None
    """With required: this one."""


@dataclass(frozen=True)
class ChatRequest:
    """One request of a chat completion."""

    options: Options
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, Any] | None = None
    split_reasoning: bool = True


def read_chat(body: Mapping[str, Any], defaults: SamplingParams, *, strict: bool = False) -> ChatRequest:
    """A chat request. ApiError 400 names the field that is wrong."""
    fields = Fields(body)
    warnings = check_names(fields, CHAT_FIELDS | {"modalities"}, REFUSED, strict=strict)
    modalities = fields.raw("modalities")
    if modalities is not None and modalities != ["text"]:
        raise fields.refuse("modalities", '["text"]', "unsupported_parameter")
    logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None and not fields.boolean("logprobs"):
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    if fields.boolean("logprobs"):
        logprobs = logprobs or 0
    options = read_options(
        fields, defaults, logprobs=logprobs, max_tokens=max_tokens_of(fields), warnings=warnings
    )
    tools = tuple(read_tool(tool, f"tools.{i}.") for i, tool in enumerate(fields.objects("tools", MAX_TOOLS)))
    choice = read_tool_choice(fields, tools)
    format_text = options.constraint is None
    if tools and choice.kind != "none" and not format_text:
        raise bad_field(
            "response_format",
            "response_format (or grammar) and tools together cannot be honoured; give one of them, or set "
            "tool_choice to none",
        )
    return ChatRequest(
        options=options,
        messages=read_messages(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.boolean("parallel_tool_calls", True),
        template_variables=_template_variables(fields),
        split_reasoning=fields.choice("reasoning_format", ("auto", "deepseek", "none"), "auto") != "none",
    )


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """The messages of a request."""
    found = fields.objects("messages", MAX_MESSAGES)
    if not found:
        raise bad_field("messages", "messages must be a list of at least one message")
    return tuple(read_message(message, f"messages.{i}.") for i, message in enumerate(found))


def read_message(message: Mapping[str, Any], prefix: str) -> ChatMessage:
    """One message in OpenAI's form."""
    fields = Fields(message, prefix)
    role = fields.choice("role", ROLES, "")
    content = fields.raw("content")
    parts: str | tuple[ContentPart, ...] | None
    if content is None or isinstance(content, str):
        parts = content
    elif isinstance(content, list):
        parts = tuple(_part(part, f"{prefix}content.{i}.") for i, part in enumerate(content))
        if len(parts) == 1:  # as a text it is found again among the answers that were given
            parts = parts[0].text
    else:
        raise fields.refuse("content", "a text or a list of parts")
    calls = tuple(
        _tool_call(call, f"{prefix}tool_calls.{i}.")
        for i, call in enumerate(fields.objects("tool_calls", 1000))
    )
    if content is None and not (role == "assistant"):
        raise bad_field(f"{prefix}content", f"{prefix}content is missing")
    return ChatMessage(
        role=role,
        content=parts,
        reasoning=fields.text("reasoning_content") or fields.text("reasoning") or None,
        tool_calls=calls,
        tool_call_id=fields.text("tool_call_id") or None,
        name=fields.text("name") or None,
    )


def _part(part: Any, prefix: str) -> ContentPart:
    if not isinstance(part, dict):
        raise bad_field(prefix[:-1], f"{prefix[:-1]} must be an object, not {shown(part)}")
    fields = Fields(part, prefix)
    kind = fields.text("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise bad_field(
            f"{prefix}type", f"{prefix}type {shown(kind)} is not supported: this model reads text only"
        )
    if kind == "refusal":
        return ContentPart("text", fields.text("refusal"))
    if not isinstance(fields.raw("text"), str):
        raise fields.refuse("text", "a text")
    return ContentPart("text", fields.text("text"))


def _tool_call(call: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    fields = Fields(call, prefix)
    function = fields.object("function")
    if function is None or not function.text("name"):
        raise bad_field(f"{prefix}function", f"{prefix}function must be an object with a name")
    arguments = function.raw("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise function.refuse("arguments", "JSON text")
    return {
        "id": fields.text("id"),
        "type": "function",
        "function": {"name": function.text("name"), "arguments": "{}" if arguments is None else arguments},
    }


def read_tool(tool: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """One tool, checked: a function with a name and a schema of its parameters."""
    fields = Fields(tool, prefix)
    if fields.choice("type", ("function",), "function") != "function":
        raise fields.refuse("type", "function")
    function = fields.object("function")
    if function is None:
        raise bad_field(f"{prefix}function", f"{prefix}function must be an object with a name")
    name = function.text("name")
    if not name or len(name) > 256:
        raise function.refuse("name", "a text of 1 to 256 characters")
    function.text("description")
    function.mapping("parameters")
    return {"type": "function", "function": dict(tool["function"])}


def read_tool_choice(fields: Fields, tools: tuple[Mapping[str, Any], ...]) -> ToolChoice:
    """``tool_choice`` as a word or as the name of a function."""
    value = fields.raw("tool_choice")
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        kind = fields.choice("tool_choice", ("auto", "none", "required"), "auto")
        choice = ToolChoice(kind)
    else:
        wanted = fields.object("tool_choice")
        assert wanted is not None
        function = wanted.object("function")
        name = function.text("name") if function is not None else wanted.text("name")
        if wanted.text("type", "function") != "function" or not name:
            raise fields.refuse(
                "tool_choice", 'auto, none, required or {"type":"function","function":{"name":...}}'
            )
        known = [tool["function"]["name"] for tool in tools]
        if name not in known:
            raise bad_field(
                "tool_choice",
                f"tool_choice names {shown(name)}, which is none of the tools: {', '.join(known)}",
            )
        choice = ToolChoice("required", name)
    if choice.kind == "required" and not tools:
        raise bad_field("tool_choice", "tool_choice asks for a tool, but there are no tools")
    return choice if tools else replace(choice, kind="none")


def _template_variables(fields: Fields) -> Mapping[str, Any]:
    variables = dict(fields.mapping("chat_template_kwargs"))
    taken = {"messages", "tools", "add_generation_prompt", "remembered", "chat", "self"} & set(variables)
    if taken or not all(name.isidentifier() for name in variables):
        wrong = sorted(taken) or [name for name in variables if not name.isidentifier()]
        raise bad_field("chat_template_kwargs", f"chat_template_kwargs may not set {shown(wrong[0])}")
    if len(json.dumps(variables)) > 65536:
        raise bad_field("chat_template_kwargs", "chat_template_kwargs is over 65536 characters")
    effort = fields.text("reasoning_effort")
    if effort:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables
