"""Messages in the form that a certain chat template expects: roles, content parts, tool calls, the system
prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_models.errors import BadInputError, Notice

TextRenderer = Callable[[list[dict[str, Any]]], str]
"""Renders messages or raises BadInputError."""

PART_SEPARATOR = "\n"
"""Between the text parts of a message where a template takes strings only."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class TemplateTraits:
    """What a template does with messages, found by rendering small ones with it."""

    takes_strings: bool
    takes_parts: bool
    system_role: bool
    argument_objects: bool
    """Tool-call arguments are wanted as an object rather than as JSON text."""


def probe_traits(render: TextRenderer, source: str) -> TemplateTraits:
    """Renders a few short conversations and looks for what was said in them."""

    def shows(messages: list[dict[str, Any]], *needles: str, but_not: str | None = None) -> bool:
        try:
            text = render(messages)
        except BadInputError:
            return False
        return all(needle in text for needle in needles) and (but_not is None or but_not not in text)

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    plain = shows([user("needle-u")], "needle-u")
    # A template for strings prints the list's Python form when it is given parts.
    parts = shows([user([{"type": "text", "text": "needle-u"}])], "needle-u", but_not="'text'")
    asked: Any = "needle-u" if plain or not parts else [{"type": "text", "text": "needle-u"}]
    told: Any = "needle-s" if plain or not parts else [{"type": "text", "text": "needle-s"}]
    works = plain or parts
    system = not works or shows([{"role": "system", "content": told}, user(asked)], "needle-s", "needle-u")
    objects = True
    if "tool_calls" in source:

        def call(arguments: Any) -> list[dict[str, Any]]:
            function = {"name": "needle_f", "arguments": arguments}
            calls = [{"id": "call00001", "type": "function", "function": function}]
            return [user(asked), {"role": "assistant", "content": "", "tool_calls": calls}]

        given = {"needle_k": "needle_v"}
        objects = shows(call(given), "needle_k", "needle_v", but_not="{'needle_k'") or not shows(
            call(json.dumps(given)), "needle_k", "needle_v"
        )
    return TemplateTraits(plain or not parts, parts, system, objects)


def _checked_parts(parts: Sequence[Any], role: str) -> list[dict[str, Any]]:
    checked: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind not in ("text", "input_text", "output_text"):
            raise BadInputError(
                f"a content part of type {kind!r} (in a {role} message) is not supported by a text model;"
                f" supported is"
                " 'text'"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise BadInputError(
                f"a text part (in a {role} message) must have a string as its text, not {text!r}"
            )
        checked.append({"type": "text", "text": text})
    return checked


def _content(value: Any, role: str, traits: TemplateTraits) -> Any:
    if value is None:
        return "" if traits.takes_strings else []
    if isinstance(value, str):
        return value if traits.takes_strings else [{"type": "text", "text": value}]
    if isinstance(value, list | tuple):
        parts = _checked_parts(value, role)
        if traits.takes_parts:
            return parts
        return PART_SEPARATOR.join(part["text"] for part in parts)
    raise BadInputError(f"the content of a {role} message must be text or a list of parts, not {value!r}")


def _tool_calls(calls: Any, traits: TemplateTraits) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise BadInputError(f"tool_calls must be a list, not {calls!r}")
    result: list[dict[str, Any]] = []
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            raise BadInputError(f"a tool call must be an object with a function, not {call!r}")
        function = dict(call.get("function", call))
        arguments = function.get("arguments")
        if isinstance(arguments, str) and traits.argument_objects:
            try:
                parsed = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                parsed = None
            # Text that is no JSON object goes to the template as it is.
            function["arguments"] = parsed if isinstance(parsed, dict) else arguments
        elif isinstance(arguments, Mapping) and not traits.argument_objects:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        result.append({**call, "function": function} if "function" in call else function)
    return result


def _joined(first: str, content: Any) -> Any:
    """A system text in front of a user's content."""
    if isinstance(content, str):
        return f"{first}\n\n{content}" if content else first
    return [{"type": "text", "text": first}, *content]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else PART_SEPARATOR.join(part["text"] for part in content)


def fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts each system text in front of the next user message, or makes one where none follows."""
    folded: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(_plain(message["content"]))
        elif message["role"] == "user" and waiting:
            folded.append({**message, "content": _joined("\n\n".join(waiting), message["content"])})
            waiting = []
        else:
            folded.append(message)
    if waiting:
        folded.append({"role": "user", "content": "\n\n".join(waiting)})
    return folded


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits, source: str
) -> tuple[list[dict[str, Any]], list[Notice]]:
    """Messages as a template with these traits takes them, and what was changed for that. The input is
    untouched."""
    prepared: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadInputError(f"a message must be an object with a role, not {message!r}")
        role = message["role"]
        if role == "developer" and "developer" not in source:
            role = "system"
        one = {**message, "role": role, "content": _content(message.get("content"), role, traits)}
        reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
        if reasoning is not None:
            one = {"thinking": reasoning, **one, "reasoning_content": reasoning}
        if message.get("tool_calls"):
            one["tool_calls"] = _tool_calls(message["tool_calls"], traits)
        elif "tool_calls" in one:
            del one["tool_calls"]
        prepared.append(one)
    notices: list[Notice] = []
    if not traits.system_role and any(message["role"] == "system" for message in prepared):
        prepared = fold_system(prepared)
        notices.append(
            Notice(
                "system_folded",
                "the model's chat template has no system role, so the system prompt stands at the start of"
                " the user's"
                " message",
            )
        )
    return prepared, notices
