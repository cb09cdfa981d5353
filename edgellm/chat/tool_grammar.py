"""The grammar of an answer that must be a tool call, and the system text that tells a model of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.chat.tool_calls import CLOSE, OPEN, ToolFamily
from edgellm.contracts import ConstraintKind, ConstraintSpec

TOOL_PROMPT = (
    "You may call one or more functions to help with the user's request. The functions are given as JSON "
    "within <tools></tools>:\n<tools>\n{tools}\n</tools>\nFor each call answer with a JSON object of the "
    'function\'s name and arguments within tags:\n<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n'
    "</tool_call>"
)
"""For models whose template has no place for tools; the form is the one of Hermes."""


def forced_call(
    family: ToolFamily, tools: Sequence[Mapping[str, Any]], name: str | None
) -> tuple[ConstraintSpec, ToolFamily]:
    """The constraint of an answer that is one call, of the tool ``name`` or of any, and how to read it.

    The arguments keep to the tool's own schema; one that cannot be enforced is refused when the constraint is
    compiled.
    """
    key = "parameters" if family in (ToolFamily.LLAMA_JSON, ToolFamily.LLAMA_PYTHONIC) else "arguments"
    definitions: dict[str, Any] = {}
    forms = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if name is not None and function["name"] != name:
            continue
        schema = function.get("parameters") or {"type": "object"}
        forms.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    key: _hoisted(schema, f"tool{index}_", definitions, top=True),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    call: dict[str, Any] = forms[0] if len(forms) == 1 else {"anyOf": forms}
    if definitions:
        call = {**call, "$defs": definitions}
    if family is ToolFamily.HERMES:
        text = f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {json.dumps(call)}\n'
        return ConstraintSpec(ConstraintKind.LARK, text), ToolFamily.HERMES
    if family is ToolFamily.MISTRAL:
        listed = {key: value for key, value in call.items() if key != "$defs"}
        schema = {"type": "array", "items": listed, "minItems": 1, "maxItems": 1}
        if definitions:
            schema["$defs"] = definitions
        return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), family
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(call)), ToolFamily.LLAMA_JSON


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system text that lists the tools."""
    return TOOL_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _hoisted(value: Any, prefix: str, definitions: dict[str, Any], *, top: bool = False) -> Any:
    """A schema whose own definitions go to the root of the whole grammar, where its references look."""
    if isinstance(value, list):
        return [_hoisted(item, prefix, definitions) for item in value]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for key, item in value.items():
        if top and key in ("$defs", "definitions") and isinstance(item, Mapping):
            for name, schema in item.items():
                definitions[f"{prefix}{name}"] = _hoisted(schema, prefix, definitions)
        elif key == "$ref" and isinstance(item, str) and item.startswith(("#/$defs/", "#/definitions/")):
            found[key] = f"#/$defs/{prefix}{item.split('/', 2)[2]}"
        else:
            found[key] = _hoisted(item, prefix, definitions)
    return found
