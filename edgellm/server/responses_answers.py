"""Chat events as the responses API: one response object, or its stream of typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from edgellm.contracts import Delta, Finished, FinishReason, Notice, NoticeEvent, TokenLogprob
from edgellm.server.answering import Answering
from edgellm.server.api_errors import ApiError
from edgellm.server.chat_answers import (
    LogprobWriter,
    final_extras,
    new_id,
    notice_json,
    raise_failure,
    usage_json,
)
from edgellm.server.options import Options
from edgellm_models.tokenizer.base import Tokenizer

ASKED: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
"""Fields of a request that its response repeats, and what they are where nothing was said."""


class ResponsesAnswers:
    """Writes one response. Its items, in order: reasoning, the message, function calls."""

    def __init__(
        self,
        answering: Answering,
        options: Options,
        model_name: str,
        kv_policy: str,
        tokenizer: Tokenizer,
        notices: Sequence[Notice] = (),
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """``body``: the request, of which the response says again what it went by."""
        self.id = new_id("resp_")
        asked = {key: value for key, value in (body or {}).items() if value is not None}
        self._asked = {**ASKED, **{key: asked[key] for key in ASKED if key in asked}}
        constrained = answering.choices[0].request.constraint is not None
        self._logprobs = LogprobWriter(tokenizer, options.logprobs or 0, strips_first=not constrained)
        self._answering = answering
        self._options = options
        self._model = model_name
        self._kv_policy = kv_policy
        self._notices = [*notices]
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._sequence = 0

    async def whole(self) -> dict[str, Any]:
        """The response. ApiError when the answer failed."""
        async for _ in self._followed():
            pass
        raise_failure(self._answering.choices[0])
        return self._response(self._status())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, each with its ``type``; the last may be an error object."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        events = self._followed()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        try:
            raise_failure(self._answering.choices[0])
        except ApiError as error:
            yield error.body()
            return
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    async def _followed(self) -> AsyncIterator[dict[str, Any]]:
        """Builds the items and tells of each step."""
        events = self._answering.events()
        try:
            async for _, event in events:
                if isinstance(event, NoticeEvent):
                    self._notices.append(event.notice)
                elif isinstance(event, Delta):
                    if event.reasoning:
                        for told in self._add_text("reasoning", event.reasoning):
                            yield told
                    if event.text or self._is_open("message"):
                        for told in self._add_text("message", event.text, event.logprobs):
                            yield told
                    if event.tool_call is not None:
                        for told in self._close():
                            yield told
                        for told in self._add_call(event.tool_call):
                            yield told
                elif isinstance(event, Finished):
                    for told in self._close():
                        yield told
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and (self._items[-1]["type"], self._items[-1]["status"]) == (
            kind,
            "in_progress",
        )

    def _add_text(self, kind: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[dict[str, Any]]:
        """``logprobs``: of the tokens of the text; of one that is no text only where a message is open."""
        told: list[dict[str, Any]] = []
        if not self._is_open(kind):
            told += self._close()
            item: dict[str, Any] = {
                "id": new_id("rs_" if kind == "reasoning" else "msg_"),
                "type": kind,
                "status": "in_progress",
            }
            if kind == "message":
                item |= {"role": "assistant", "content": []}
            else:
                item |= {"summary": [], "content": []}
            self._items.append(item)
            told.append(self._event("response.output_item.added", output_index=self._index, item=_copy(item)))
            part = _part(kind, "")
            item["content"].append(part)
            told.append(self._part_event("response.content_part.added", part=_part(kind, "")))
        part = self._items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [*told, self._part_event("response.reasoning_text.delta", delta=text)]
        entries = (
            [self._logprobs.entry(one) for one in logprobs] if self._options.logprobs is not None else []
        )
        part["logprobs"] += entries
        if text or entries:
            told.append(self._part_event("response.output_text.delta", delta=text, logprobs=entries))
        return told

    def _add_call(self, call: Any) -> list[dict[str, Any]]:
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        self._items.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        place = {"output_index": self._index, "item_id": item["id"]}
        return [
            self._event("response.output_item.added", output_index=self._index, item=begun),
            self._event("response.function_call_arguments.delta", delta=item["arguments"], **place),
            self._event(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
                **place,
            ),
            self._event("response.output_item.done", output_index=self._index, item=dict(item)),
        ]

    def _close(self) -> list[dict[str, Any]]:
        """Ends the item that is open."""
        if not self._items or self._items[-1]["status"] == "completed":
            return []
        item = self._items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        message = item["type"] == "message"
        name = "response.output_text.done" if message else "response.reasoning_text.done"
        return [
            self._part_event(
                name, text=part["text"], **({"logprobs": [*part["logprobs"]]} if message else {})
            ),
            self._part_event("response.content_part.done", part=dict(part)),
            self._event("response.output_item.done", output_index=self._index, item=_copy(item)),
        ]

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _part_event(self, kind: str, **values: Any) -> dict[str, Any]:
        item_id = self._items[-1]["id"]
        return self._event(kind, output_index=self._index, item_id=item_id, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **values}

    def _status(self) -> str:
        finished = self._answering.choices[0].finished
        assert finished is not None
        whole = finished.reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        return "completed" if whole else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        sampling = self._options.sampling
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [_copy(item) for item in self._items],
            "error": None,
            "incomplete_details": None,
            **self._asked,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": sampling.max_new_tokens,
            "previous_response_id": None,
            "store": False,
            "usage": None,
        }
        if status == "in_progress":
            return body
        choice = self._answering.choices[0]
        usage = usage_json(self._answering.choices)
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        extras = final_extras(choice, self._kv_policy)
        if self._options.warnings:
            extras["warnings"] = list(self._options.warnings)
        if self._notices:
            extras["notices"] = [notice_json(notice) for notice in self._notices]
        return {**body, "edgellm": extras}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    if "content" not in item:
        return dict(item)
    parts = [{key: [*v] if isinstance(v, list) else v for key, v in part.items()} for part in item["content"]]
    return {**item, "content": parts}
