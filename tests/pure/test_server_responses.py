"""The responses API over a scripted engine: items, typed events, what it shares with chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.served import (
    MODEL,
    THINK_TEMPLATE,
    TOOL_TEMPLATE,
    Script,
    events_of,
    http,
    says,
    scripted_model,
    serving,
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


def both(script: Script, template: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response as a whole, and the events of its stream, whose last one holds the same."""
    asked = {"model": MODEL, "input": "hello", **body}
    with serving(lambda: scripted_model(script, template=template)) as found, http(found.address) as client:
        whole = client.post("/v1/responses", json=asked)
        assert whole.status_code == 200, whole.text
        text = client.post("/v1/responses", json={**asked, "stream": True}).text
    events = events_of(text)
    assert "[DONE]" not in events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    lines = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert lines == [event["type"] for event in events]
    last = events[-1]["response"]
    for key in ("status", "incomplete_details"):
        assert last[key] == whole.json()[key]
    for key in ("input_tokens", "output_tokens", "total_tokens", "output_tokens_details"):
        assert last["usage"][key] == whole.json()["usage"][key]
    assert [_bare(item) for item in last["output"]] == [_bare(item) for item in whole.json()["output"]]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    return whole.json(), events


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def joined(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == kind)


def test_a_text_and_its_events() -> None:
    body, events = both(says("Grüß dich"), TOOL_TEMPLATE, instructions="Be kind.", metadata={"a": "b"})
    assert body["status"] == "completed" and body["object"] == "response"
    [item] = body["output"]
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "Grüß dich")
    assert [event["type"] for event in events if not event["type"].endswith("delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert joined(events, "response.output_text.delta") == "Grüß dich"
    added = next(event for event in events if event["type"] == "response.content_part.added")
    assert added["part"]["text"] == ""
    assert (body["instructions"], body["metadata"], body["tools"]) == ("Be kind.", {"a": "b"}, [])
    assert body["usage"]["output_tokens"] == len("Grüß dich".encode()) + 1


def test_an_answer_that_was_cut_is_incomplete() -> None:
    body, events = both(says("z" * 50), TOOL_TEMPLATE, max_output_tokens=7)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete"


def test_reasoning_is_an_item_of_its_own() -> None:
    body, events = both(says("<think>hm, well</think> yes"), THINK_TEMPLATE)
    reasoning, message = body["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm, well")
    assert message["content"][0]["text"] == "yes"
    assert joined(events, "response.reasoning_text.delta") == "hm, well"
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_calls_are_items_with_their_arguments(choice: Any) -> None:
    script = says(("Let me see. " if choice == "auto" else "") + CALL)
    body, events = both(script, TOOL_TEMPLATE, tools=[WEATHER], tool_choice=choice)
    call = body["output"][-1]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Ulm"},
    )
    assert body["status"] == "completed" and call["call_id"]
    assert joined(events, "response.function_call_arguments.delta") == call["arguments"]
    assert (body["tools"], body["tool_choice"]) == ([WEATHER], choice)
    assert len(body["output"]) == (2 if choice == "auto" else 1)


def test_a_history_of_items_is_the_conversation_that_it_tells() -> None:
    """Calls, their results, and an earlier response's own items, sent back as they came."""
    items = [
        {"role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain in Ulm?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "And Bonn?"},
    ]  # fmt: skip
    with serving(lambda: scripted_model(says("ok"))) as found, http(found.address) as client:
        assert client.post("/v1/responses", json={"input": items}).status_code == 200
        [prompt] = found.scripted.runner.prompts.values()
    text = bytes(t for t in prompt if t < 256).decode()
    for part in ("Short.", "[user]Rain in Ulm?\n", "[tool]rain\n", "[assistant]Yes.\n", "[user]And Bonn?\n"):
        assert part in text
    assert text.endswith("[assistant]") and "hm" not in text


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs_come_where_they_are_asked_for(fields: dict[str, Any]) -> None:
    with serving(lambda: scripted_model(says("abc"), logprobs=True)) as found, http(found.address) as client:
        body = client.post("/v1/responses", json={"input": "x", **fields}).json()
        asked = {"input": "x", "stream": True, **fields}
        events = events_of(client.post("/v1/responses", json=asked).text)
        plain = client.post("/v1/responses", json={"input": "x"}).json()
    assert "warnings" not in body["edgellm"]
    entries = body["output"][0]["content"][0]["logprobs"]
    assert len(entries) == body["usage"]["output_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"abc"
    assert all(len(entry["top_logprobs"]) == fields.get("top_logprobs", 0) for entry in entries)
    streamed = [e for event in events if event["type"].endswith("text.delta") for e in event["logprobs"]]
    assert streamed == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
    assert plain["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages.0.content.0.type"),
        ({"include": "all"}, "include"),
        ({"max_output_tokens": -1}, "max_completion_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_400_by_name(fields: dict[str, Any], param: str) -> None:
    with serving() as found, http(found.address) as client:
        response = client.post("/v1/responses", json={"input": "x", **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        for harmless in ({"store": False}, {"background": False}, {"previous_response_id": None}):
            assert client.post("/v1/responses", json={"input": "x", **harmless}).status_code == 200


def test_a_failure_in_the_middle_is_the_last_event() -> None:
    with (
        serving(lambda: scripted_model(says("abcdef"), error_at=3)) as found,
        http(found.address) as client,
    ):
        events = events_of(client.post("/v1/responses", json={"input": "x", "stream": True}).text)
        assert events[-1]["error"]["code"] == "engine_error"
        assert joined(events[:-1], "response.output_text.delta") == "abc"
        failed = client.post("/v1/responses", json={"input": "x"})
        assert failed.status_code == 500
        assert 'requests_total{status="engine"} 2' in client.get("/metrics").text
