"""A chat message as OpenAI's JSON has it: what chat templates are given and what goes over the wire."""

from __future__ import annotations

from typing import Any

from edgellm.contracts import ChatMessage


def message_object(message: ChatMessage) -> dict[str, Any]:
    """A message in OpenAI's form, absent fields absent."""
    content: Any = message.content
    if content is not None and not isinstance(content, str):
        content = [{"type": part.type, "text": part.text} for part in content]
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found
