"""Chat completions and completions over a scripted engine: fields, streams, errors, limits, departures."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgellm.contracts import DraftCounts, DrafterStats, EngineStats, SamplingParams
from edgellm.server.chat_schema import CHAT_FIELDS, read_chat
from edgellm.server.metrics import ServerMetrics
from edgellm.server.options import HARMLESS
from tests.support.fake_engine import END_ID
from tests.support.served import (
    MODEL,
    THINK_TEMPLATE,
    TOOL_TEMPLATE,
    WAIT_S,
    Running,
    Script,
    Scripted,
    StepGate,
    chat_body,
    events_of,
    http,
    says,
    scripted_model,
    serving,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as found:
        yield found


def post(running: Running, body: Any, path: str = "/v1/chat/completions") -> Any:
    with http(running.address) as client:
        return client.post(path, json=body)


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def until(claim: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def joined(events: list[Any], key: str = "content", index: int = 0) -> str:
    return "".join(
        choice["delta"].get(key) or ""
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


# --- streams ---


def test_the_form_of_a_stream(running: Running) -> None:
    """G02, G19: role first, null finish reasons, an empty finish chunk, [DONE]; index counts choices."""
    response = post(running, chat_body("olé 🫠", stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    *chunks, last, usage = events[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    for key in ("id", "object", "created", "model"):
        assert len({chunk[key] for chunk in events[:-1]}) == 1
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
    assert chunks[0]["object"] == "chat.completion.chunk" and chunks[0]["model"] == MODEL


def test_events_are_sent_as_they_come() -> None:
    """G02: each is flushed; nothing waits for the end."""
    gate = StepGate()
    with (
        serving(lambda: scripted_model(says("abcde"), gate=gate)) as found,
        http(found.address) as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response,
    ):
        events = (json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data: {"))
        assert next(events)["choices"][0]["delta"]["role"] == "assistant"
        for letter in "abcde":
            gate.let()  # the next step runs only once the last one's text is here
            assert next(events)["choices"][0]["delta"] == {"content": letter}
        gate.open()
        assert next(events)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["hello", "né 日本 🫠🫠 é", "  spaces  ", "a\nb\r\nc", '"quoted" \\ \t'])
def test_deltas_joined_are_the_whole_answer(text: str) -> None:
    with serving(lambda: scripted_model(says(text))) as found:
        whole = post(found, chat_body(seed=5, n=2)).json()
        events = events_of(post(found, chat_body(seed=5, n=2, stream=True)).text)
        for index in range(2):
            assert whole["choices"][index]["message"]["content"] == text == joined(events, index=index)
        raw = {"prompt": "x", "seed": 5, "max_tokens": 100}
        assert post(found, raw, "/v1/completions").json()["choices"][0]["text"] == text
        events = events_of(post(found, {**raw, "stream": True}, "/v1/completions").text)
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == text


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_held_for_a_stop_string_is_delivered(limit: int | None, stream: bool) -> None:
    """G04: the beginning of a stop string that never came, at the end of an answer and at its limit."""
    with serving(lambda: scripted_model(says("abXY"))) as found:
        body = chat_body(stop=["XYZW"], stream=stream)
        if limit:
            body["max_tokens"] = limit
        response = post(found, body)
        if stream:
            assert joined(events_of(response.text)) == "abXY"
        else:
            [choice] = response.json()["choices"]
            assert choice["message"]["content"] == "abXY"
            assert choice["finish_reason"] == ("length" if limit else "stop")


@pytest.mark.parametrize("stop", ["b", ["zz", "b"], ["bc", "b"]])
def test_stop_strings_end_an_answer_and_are_not_shown(stop: Any) -> None:
    with serving(lambda: scripted_model(says("aabcd"))) as found:
        [choice] = post(found, chat_body(stop=stop)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("aa", "stop")


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1 << 70}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"grammar": "start: ("}, "grammar"),
        ({"grammar": "start: /a/", "response_format": {"type": "json_object"}}, "grammar"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "stop": "x"}, "min_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "tools": TOOLS}, "min_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "max_tokens": 4}, "min_tokens"),
        ({"kv": {"policy": "random"}}, "kv.policy"),
        ({"kv": {"policy": "stop", "budget": 5}}, "kv.budget"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_400_by_name(
    running: Running, fields: dict[str, Any], param: str, stream: bool
) -> None:
    if "stream_options" in fields:
        stream = False
    response = post(running, {**chat_body(), "stream": stream, **fields})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "Traceback" not in error["message"] and "\n" not in error["message"]


def test_unknown_fields_are_told_and_harmless_ones_are_not(running: Running) -> None:
    harmless = {name: "x" for name in HARMLESS}
    assert "warnings" not in post(running, chat_body(**harmless)).json()["edgellm"]
    told = post(running, chat_body(tempreature=0.5)).json()["edgellm"]["warnings"]
    assert len(told) == 1 and "tempreature" in told[0]
    events = events_of(post(running, chat_body(tempreature=0.5, stream=True)).text)
    assert events[0]["edgellm"]["warnings"] == told
    with serving(strict=True) as strict:
        refused = post(strict, chat_body(tempreature=0.5))
        assert refused.status_code == 400 and error_of(refused)["param"] == "tempreature"
        assert post(strict, chat_body(**harmless)).status_code == 200


def test_every_supported_field_reaches_the_engine() -> None:
    body = chat_body(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8, repetition_penalty=1.1, seed=-3,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": -100, "6": 1.5}, stop="s", n=2,
        stop_token_ids=[9], ignore_eos=True, max_completion_tokens=11, logprobs=True, top_logprobs=4,
        cache_salt="salt", prediction={"type": "content", "content": "abc"}, speculative={"mode": "off"},
        kv={"policy": "window", "budget": 99}, conversation_id="c", user="u",
    )  # fmt: skip
    chat = read_chat(body, SamplingParams(top_k=50))
    assert chat.options.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8, repetition_penalty=1.1, seed=-3,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={5: -100.0, 6: 1.5}, stop=("s",),
        stop_token_ids=(9,), ignore_eos=True, max_new_tokens=11,
    )  # fmt: skip
    options = chat.options
    assert (options.n, options.logprobs, options.cache_salt, options.prediction) == (2, 4, "salt", "abc")
    assert (options.speculate, options.kv_policy, options.kv_keep) == (False, "window", 99)
    for said, meant in (({"max": 3}, (True, 3)), ({"max": 0}, (False, 0)), ({"mode": "auto"}, (True, None))):
        options = read_chat(chat_body(speculative=said), SamplingParams()).options
        assert (options.speculate, options.max_draft) == meant
    assert read_chat(chat_body(), SamplingParams(top_k=50)).options.sampling.top_k == 50
    assert read_chat(chat_body(truncation="auto"), SamplingParams()).options.kv_policy == "trim"
    assert not options.warnings and set(body) <= CHAT_FIELDS | HARMLESS


def test_a_benchmark_gets_the_tokens_it_asks_for_and_no_cache_where_it_wants_none() -> None:
    with serving(lambda: scripted_model(says("ab"))) as found:
        asked = chat_body(min_tokens=9, max_tokens=9, ignore_eos=True)
        for cached, fields in ((0, {}), (20, {}), (0, {"cache_prompt": False}), (20, {"cache_prompt": True})):
            usage = post(found, {**asked, **fields}).json()["usage"]
            assert usage["completion_tokens"] == 9
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_salts_keep_caches_apart_and_an_answer_says_what_it_went_by(running: Running) -> None:
    text = "salted " * 20

    def ask(**fields: Any) -> Any:
        return post(running, chat_body(text, max_tokens=3, **fields)).json()

    found = [ask(cache_salt=salt) for salt in ("a", "b", "a", "b")]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in found]
    assert cached[:2] == [0, 0] and min(cached[2:]) > 100
    told = ask(seed=11, return_token_ids=True, kv={"policy": "stop"})["edgellm"]
    assert (told["seed"], told["kv_policy"], told["token_ids"]) == (11, "stop", [*b" de"])
    assert told["timings"]["completion_tokens"] == 3 and told["ttft_ms"] >= 0
    drawn = [ask()["edgellm"]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3
    events = events_of(post(running, chat_body(text, stream=True, seed=11, max_tokens=3)).text)
    assert events[-2]["edgellm"]["seed"] == 11


def test_who_waits_is_told_its_place() -> None:
    gate, done = StepGate(), threading.Event()

    def step_on() -> None:
        while not done.wait(0.005):
            gate.let()
        gate.open()

    thread = threading.Thread(target=step_on)
    with serving(lambda: scripted_model(says("z" * 3000), max_running=1, gate=gate)) as found:
        thread.start()
        try:
            with (
                http(found.address) as client,
                client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as running,
            ):
                lines = running.iter_lines()
                until(lambda: 'content":"z' in next(lines))
                body = chat_body(stream=True, return_progress=True)
                with client.stream("POST", "/v1/chat/completions", json=body) as waiting:
                    events = (json.loads(line[5:]) for line in waiting.iter_lines() if line[:6] == "data: ")
                    told = (event["edgellm"]["queue_position"] for event in events if "edgellm" in event)
                    assert next(told) == 1
        finally:
            done.set()
            thread.join()


def test_models_by_name(running: Running) -> None:
    for name in (MODEL, "*", ""):
        assert post(running, {**chat_body(), "model": name}).status_code == 200
    missing = post(running, {**chat_body(), "model": "gpt-4"})
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found" and MODEL in error_of(missing)["message"]
    with http(running.address) as client:
        assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
        assert error_of(client.get("/v1/models/other"))["code"] == "model_not_found"


def test_a_context_that_is_too_small_says_both_numbers(running: Running) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body("x" * 5000)),
        ("/v1/completions", {"prompt": "x" * 5000}),
    ):
        for stream in (False, True):
            response = post(running, {**body, "stream": stream}, path)
            assert response.status_code == 400
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert "4096" in error["message"] and "50" in error["message"]


def test_what_is_left_out_on_request_is_told() -> None:
    """Whole turns that do not fit, and KV that is evicted; neither happens unasked."""
    turns = [
        message
        for i in range(8)
        for message in (
            {"role": "user", "content": f"question {i} " + "x" * 20},
            {"role": "assistant", "content": f"answer {i}"},
        )
    ]
    turns.append({"role": "user", "content": "last"})
    with serving(lambda: scripted_model(says("z" * 100), context=200)) as found:
        assert error_of(post(found, chat_body(messages=turns)))["code"] == "context_length_exceeded"
        body = post(found, chat_body(messages=turns, truncation="auto", max_tokens=5)).json()
        [trimmed] = body["edgellm"]["notices"]
        assert trimmed["kind"] == "trimmed" and body["usage"]["prompt_tokens"] < 200
        prompt = [*found.scripted.runner.prompts.values()][-1]
        assert b"question 0" not in bytes(prompt) and b"last" in bytes(prompt)
        body = post(found, chat_body(kv={"policy": "window", "budget": 32}, max_tokens=90)).json()
        assert body["choices"][0]["message"]["content"] == "z" * 90
        assert body["edgellm"]["notices"][0]["kind"] == "kv_evicted"
        assert body["edgellm"]["kv_policy"] == "window"
        with http(found.address) as client:
            assert 'evicted_tokens_total{policy="window"}' in client.get("/metrics").text


def test_an_answer_cut_by_the_context_says_so() -> None:
    with serving(lambda: scripted_model(says("z" * 500), context=64)) as found:
        body = post(found, chat_body()).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["edgellm"]["notices"][0]["kind"] == "context_full"


def test_paths_and_methods_that_do_not_exist(running: Running) -> None:
    with http(running.address) as client:
        missing = client.post("/v1/chat/completion", json={})
        assert missing.status_code == 404 and "/v1/chat/completions" in error_of(missing)["message"]
        wrong = client.get("/v1/chat/completions")
        assert wrong.status_code == 405 and "POST" in error_of(wrong)["message"]
        assert "POST" in wrong.headers["allow"]


def test_prefill_progress_is_shown_to_who_asks(running: Running) -> None:
    events = events_of(post(running, chat_body("q" * 900, stream=True, return_progress=True)).text)
    progress = [e["edgellm"]["prefill"] for e in events[:-1] if "prefill" in e.get("edgellm", {})]
    assert len(progress) >= 2 and progress[-1]["done"] == progress[-1]["total"] > 900
    assert [p["done"] for p in progress] == sorted(p["done"] for p in progress)


# --- reasoning and tools ---


def streamed_and_whole(script: Script, template: str, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """A choice of both modes; their texts are the same."""
    with serving(lambda: scripted_model(script, template=template)) as found:
        [choice] = post(found, chat_body(**fields)).json()["choices"]
        events = events_of(post(found, chat_body(stream=True, **fields)).text)[:-1]
    message = choice["message"]
    assert joined(events) == (message["content"] or "")
    assert joined(events, "reasoning_content") == message.get("reasoning_content", "")
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [(c["index"], c["function"]) for c in calls] == [
        (i, c["function"]) for i, c in enumerate(message.get("tool_calls", ()))
    ]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice, events


def test_stop_strings_are_about_the_content_where_reasoning_is_split_off() -> None:
    """G05: with the split, a stop string inside the reasoning does nothing; without, it is plain text."""
    text = "<think>\nQuestion: ok\n</think>\n\nAnswer. Question: no"
    choice, _ = streamed_and_whole(says(text), THINK_TEMPLATE, stop=["Question:"])
    assert choice["message"]["reasoning_content"] == "Question: ok"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Answer. ", "stop")
    choice, _ = streamed_and_whole(says(text), THINK_TEMPLATE, stop=["Question:"], reasoning_format="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<think>\n", "stop")


def test_reasoning_that_the_prompt_began_or_a_limit_cut() -> None:
    begun = THINK_TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    choice, _ = streamed_and_whole(says("hm </think> yes"), begun)
    assert choice["message"] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm", "refusal": None,
    }  # fmt: skip
    choice, _ = streamed_and_whole(says("<think>hm, well </think> yes"), THINK_TEMPLATE, max_tokens=11)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"] == "hm,"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>', None, 1),
        ('Let me see.\n<tool_call>{"name":"weather","arguments":{}}</tool_call>\n', "Let me see.", 1),
        (
            '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"name":"b","arguments":{}}</tool_call>',
            None,
            2,
        ),
        ('<tool_call>{"name":"a","arguments":{}}', None, 1),
        ("a <tool b", "a <tool b", 0),
        ("a < b and <too", "a < b and <too", 0),
        ("<tool_call>{not json}</tool_call>", "{not json}", 0),
        ('<tool_call>{"name": 7}</tool_call> after', '{"name": 7} after', 0),
    ],
)
def test_tool_calls_leave_no_markup_and_eat_no_text(text: str, content: str | None, calls: int) -> None:
    """G10: tags over many tokens, text that only looks like one, calls that are none."""
    choice, _ = streamed_and_whole(says(text), TOOL_TEMPLATE, tools=TOOLS)
    assert choice["message"]["content"] == content
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_call_that_is_cut_is_no_call() -> None:
    """G10: cut by max_tokens it is never half JSON as a finished call."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    choice, _ = streamed_and_whole(says(text), TOOL_TEMPLATE, tools=TOOLS, max_tokens=40)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert "<tool_call>" not in choice["message"]["content"]


def test_tool_choice_none_and_one_call_at_a_time() -> None:
    text = (
        '<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b","arguments":{}}</tool_call>'
    )
    choice, _ = streamed_and_whole(says(text), TOOL_TEMPLATE, tools=TOOLS, tool_choice="none")
    assert choice["message"]["content"] == text
    with serving(lambda: scripted_model(says(text), template=TOOL_TEMPLATE)) as found:
        body = post(found, chat_body(tools=TOOLS, parallel_tool_calls=False)).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["edgellm"]["notices"][0]["kind"] == "tool_calls_dropped"


# --- limits and departures ---


def test_a_full_queue_is_429_and_frees_itself() -> None:
    gate = StepGate()
    with serving(lambda: scripted_model(says("z" * 40), max_running=2, gate=gate), queue=1) as found:
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(post(found, chat_body()).status_code))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        with http(found.address) as client:
            until(lambda: client.get("/v1/edge/status").json()["open_requests"] == 3)
        for stream in (False, True):
            refused = post(found, chat_body(stream=stream))
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert error_of(refused)["code"] == "queue_full"
        gate.open()
        for thread in threads:
            thread.join()
        assert answers == [200, 200, 200]
        assert post(found, chat_body()).status_code == 200


def test_request_timeout_cuts_an_answer_and_says_so() -> None:
    def clock() -> float:
        """An hour and more goes by once three tokens were made."""
        made = found.runner.plans if found is not None else ()
        return time.monotonic() + (4000 if len(made) >= 3 else 0)

    found: Scripted | None = None

    def make() -> Scripted:
        nonlocal found
        found = scripted_model(says("z" * 500), clock=clock)
        return found

    with serving(make, request_timeout_s=3600.0) as found_server:
        body = post(found_server, chat_body()).json()
        [choice] = body["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == "zzz"
        assert body["edgellm"]["finish_reason"] == "timeout"
        assert "deadline" in [notice["kind"] for notice in body["edgellm"]["notices"]]
        with http(found_server.address) as client:
            assert 'requests_total{status="timeout"} 1' in client.get("/metrics").text


def ended(found: Running) -> dict[str, int]:
    """Requests that ended, by reason, as far as there are any."""
    with http(found.address) as client:
        lines = client.get("/metrics").text.splitlines()
    counts = (line.split('status="')[1].split('"} ') for line in lines if "requests_total{" in line)
    return {reason: int(count) for reason, count in counts if int(count)}


def test_every_request_is_counted_once_by_its_reason() -> None:
    """Whole, streamed or refused."""
    with serving(lambda: scripted_model(says("ab" * 30), num_blocks=16), queue=0) as found:
        for stream in (False, True):
            assert post(found, chat_body(stream=stream)).status_code in (200, 503)
        assert post(found, chat_body("x" * 2000)).status_code == 503
        assert ended(found) == {"no_memory": 3}
        assert post(found, chat_body(max_tokens=2)).status_code == 200
        assert post(found, chat_body(n=9)).status_code == 400
        assert post(found, chat_body(model="other")).status_code == 404
        assert post(found, chat_body(stop="b", stream=True)).status_code == 200
        assert ended(found) == {"no_memory": 3, "length": 1, "bad_request": 2, "stop": 1}
        found.loop.call_soon_threadsafe(found.scripted.model.engine.close)
    gate = StepGate()
    with serving(lambda: scripted_model(gate=gate), wait=False) as found:
        until(lambda: bool(found.made))
        until(lambda: http(found.address).get("/health").status_code == 200)
        found.scripted.model.engine.close()
        assert post(found, chat_body()).status_code == 500
        assert post(found, {"input": "a"}, "/v1/embeddings").status_code == 500
        assert ended(found) == {"engine": 2}


def test_a_server_that_loads_or_ends_is_unavailable() -> None:
    go_on = threading.Event()

    def make() -> Scripted:
        assert go_on.wait(WAIT_S)
        return scripted_model()

    with serving(make, wait=False) as found:
        assert post(found, chat_body()).status_code == 503
        assert ended(found) == {"unavailable": 1}
        go_on.set()


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    with serving(lambda: scripted_model(says("abcdef"), error_at=3)) as found:
        events = events_of(post(found, chat_body(stream=True)).text)
        assert "NaN" in events[-1]["error"]["message"] and "[DONE]" not in events
        assert joined(events[:-1]) == "abc"
        failed = post(found, chat_body())
        assert failed.status_code == 500 and error_of(failed)["code"] == "engine_error"


def test_an_answer_can_be_cancelled_by_its_id() -> None:
    with (
        serving(lambda: scripted_model(says("z" * 2000), delay_s=0.01)) as found,
        http(found.address) as client,
    ):
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            answer_id = json.loads(next(lines)[5:])["id"]
            assert http(found.address).post(f"/v1/edge/cancel/{answer_id}", json={}).json()["cancelled"]
            events = events_of("\n".join(lines))
        assert events[-1] == "[DONE]"
        assert events[-2]["edgellm"]["finish_reason"] == "cancelled"
        assert client.post("/v1/edge/cancel/nothing", json={}).status_code == 404


def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    """Queued, prefilling, decoding, streaming or not: their requests end and every block is free again."""
    rng = random.Random(0)
    with serving(lambda: scripted_model(says("z" * 300), delay_s=0.002, max_running=4), queue=400) as found:

        async def leave(number: int) -> None:
            port = int(found.address.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps(chat_body(str(number) * rng.randint(1, 300), stream=bool(number % 2))).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            )
            data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            writer.write(data if number % 7 else data[: rng.randint(1, len(data))])
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.3)
            writer.transport.abort()

        async def all_leave() -> None:
            for _ in range(3):
                await asyncio.gather(*(leave(number) for number in range(50)))

        asyncio.run(all_leave())
        engine = found.scripted.model.engine
        with http(found.address) as client:

            def nothing_is_left() -> bool:
                """What the last of them sent may still be on its way in."""
                status = client.get("/v1/edge/status").json()
                counts = engine.stats().kv_blocks
                in_use = status["open_requests"] + counts["used"] + counts["shared"]
                return not in_use and not engine.call(found.scripted.core.has_work)

            until(nothing_is_left)
            engine.call(found.scripted.core.check_integrity)
            assert client.post("/v1/chat/completions", json=chat_body(max_tokens=3)).status_code == 200


def test_64_clients_at_once_get_their_own_texts_while_health_answers() -> None:
    """G18: streaming and not; nothing crashes, mixes or starves."""
    gate = StepGate()
    with serving(lambda: scripted_model(delay_s=0.001, gate=gate), queue=100) as found:
        import httpx2

        async def ask(client: Any, number: int) -> None:
            text = f"client {number} says {number * 7919}"
            response = await client.post("/v1/chat/completions", json=chat_body(text, stream=number % 2 == 0))
            assert response.status_code == 200
            if number % 2 == 0:
                assert joined(events_of(response.text)) == text[::-1]
            else:
                assert response.json()["choices"][0]["message"]["content"] == text[::-1]

        async def main() -> None:
            limits = httpx2.Limits(max_connections=100)
            async with httpx2.AsyncClient(
                base_url=found.address, timeout=WAIT_S, limits=limits, verify=False
            ) as client:
                work = asyncio.gather(*(ask(client, number) for number in range(64)))
                polls = 0
                while not work.done():
                    for path in ("/health", "/v1/models"):
                        assert (await client.get(path)).status_code == 200
                    polls += 1
                    if polls <= 5:
                        gate.let(2)  # answered with requests under way, whatever the machine does
                    else:
                        gate.open()
                    await asyncio.sleep(0.01)
                await work
                assert polls > 5

        asyncio.run(main())
        with http(found.address) as client:
            assert 'requests_total{status="stop"} 64' in client.get("/metrics").text


def test_a_slow_reader_holds_nobody_up() -> None:
    with (
        serving(lambda: scripted_model(says("z" * 400))) as found,
        http(found.address) as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as slow,
    ):
        assert post(found, chat_body()).status_code == 200
        assert joined(events_of(slow.read().decode())) == "z" * 400


# --- completions ---


def test_prompts_of_every_kind_and_echo(running: Running) -> None:
    bodies: list[tuple[Any, list[str]]] = [
        ("a\n]bc\n", ["cb"]),
        (["a\n]bc\n", "a\n]xy\n"], ["cb", "yx"]),
        (list(b"a\n]bc\n"), ["cb"]),
        ([list(b"a\n]bc\n"), list(b"a\n]xy\n")], ["cb", "yx"]),
    ]
    for prompt, texts in bodies:
        body = post(running, {"prompt": prompt, "max_tokens": 50, "n": 2}, "/v1/completions").json()
        assert [c["text"] for c in body["choices"]] == [t for text in texts for t in (text, text)]
        assert [c["index"] for c in body["choices"]] == list(range(2 * len(texts)))
        echoed = post(running, {"prompt": prompt, "echo": True, "max_tokens": 0}, "/v1/completions").json()
        first = prompt if isinstance(prompt, str) else "a\n]bc\n"
        assert echoed["choices"][0]["text"] == first
        assert echoed["usage"]["completion_tokens"] == 0
    for wrong in ("", [], [[]], 7, ["a", 7], [99999], [[-1]], {"a": 1}, [True]):
        response = post(running, {"prompt": wrong}, "/v1/completions")
        assert response.status_code == (200 if wrong == "" else 400), wrong
    for fields in ({"suffix": "x"}, {"best_of": 3}, {"logprobs": 21}, {"messages": []}):
        assert post(running, {"prompt": "a", **fields}, "/v1/completions").status_code == 400


def test_metrics_parse_and_agree_with_usage(running: Running) -> None:
    with http(running.address) as client:

        def counters() -> dict[str, float]:
            lines = client.get("/metrics").text.splitlines()
            samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
            assert len({name for name, _ in samples}) == len(samples)
            return {name: float(value) for name, value in samples}

        before = counters()
        usage = client.post("/v1/chat/completions", json=chat_body("m" * 50, n=2)).json()["usage"]
        after = counters()

        def grown(name: str) -> float:
            return after[name] - before[name]

        assert grown("edgellm_prompt_tokens_total") == usage["prompt_tokens"]
        assert grown("edgellm_generation_tokens_total") == usage["completion_tokens"]
        assert grown('edgellm_requests_total{status="stop"}') == 1
        assert grown("edgellm_e2e_request_latency_seconds_count") == 1
        assert grown("edgellm_time_to_first_token_seconds_count") == 1
        assert grown("edgellm_inter_token_latency_seconds_count") == usage["completion_tokens"] - 2
        assert after["edgellm_up"] == 1 and 0 <= after["edgellm_kv_waste_ratio"] <= 1
        assert all(after[name] >= before[name] for name in before if "_total" in name)


def test_metrics_of_drafters_and_evictions() -> None:
    drafter = DrafterStats("ngram", 2, DraftCounts(50, 30, 20), (19, 11))
    stats = EngineStats(drafters=(drafter,), evicted_tokens={"window": 96})
    lines = ServerMetrics().render(stats, None, ready=True).splitlines()
    for line in (
        'edgellm_evicted_tokens_total{policy="window"} 96',
        'edgellm_spec_armed{drafter="ngram"} 2',
        'edgellm_spec_drafted_tokens_total{drafter="ngram"} 50',
        'edgellm_spec_accepted_tokens_total{drafter="ngram"} 30',
        'edgellm_spec_drafts_total{drafter="ngram"} 20',
        'edgellm_spec_accepted_per_position{drafter="ngram",position="0"} 19',
        'edgellm_spec_accepted_per_position{drafter="ngram",position="1"} 11',
    ):
        assert line in lines


def test_tokenizer_and_template_endpoints(running: Running) -> None:
    with http(running.address) as client:
        found = client.post("/tokenize", json={"content": "hé"}).json()
        assert found["tokens"] == [*"hé".encode()] and found["count"] == 3
        pieces = client.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()["tokens"]
        assert pieces[0] == {"id": 104, "piece": "h"} and pieces[1]["piece"] == [0xC3]
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"] == "hé"
        template = client.post("/apply-template", json={"messages": chat_body()["messages"]}).json()
        assert template == {"prompt": "[user]hello\n[assistant]", "tokens": 23}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"content": 7}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [END_ID + 999]}),
            ("/apply-template", {}),
        ):
            assert client.post(path, json=body).status_code == 400, (path, body)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_texts_are_embedded_by_the_engine_in_their_order(pooling: str) -> None:
    """Many at once, more than run and than may wait: one client's work does not fill the queue."""
    texts = [f"{'x' * (7 * i % 23)}{i}" for i in range(40)]
    with serving(lambda: scripted_model(max_running=3), queue=1) as found, http(found.address) as client:
        body = client.post("/v1/embeddings", json={"input": texts, "pooling": pooling}).json()
        for index, (text, row) in enumerate(zip(texts, body["data"], strict=True)):
            data = text.encode()
            first = sum(data) / len(data) if pooling == "mean" else data[-1]
            assert (row["index"], row["embedding"]) == (index, [first, len(data)])
        assert body["usage"]["prompt_tokens"] == sum(map(len, texts))
        metrics = client.get("/metrics").text
        assert 'requests_total{status="stop"} 1' in metrics
        assert f"edgellm_prompt_tokens_total {sum(map(len, texts))}" in metrics
        status = client.get("/v1/edge/status").json()["stats"]["kv_blocks"]
        assert status["used"] == status["shared"] == 0


def test_a_text_that_is_too_long_or_a_vector_of_another_size_is_400_by_name(running: Running) -> None:
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
        ({"input": ["a", "x" * 5000]}, "input.1", "context_length_exceeded"),
        ({"input": ["a", "b"], "dimensions": 7}, "dimensions", None),
        ({"input": []}, "input", None),
        ({"input": [99999]}, "input", None),
        ({"input": "a", "pooling": "max"}, "pooling", None),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", None),
    ]
    for body, param, code in cases:
        response = post(running, body, "/v1/embeddings")
        assert response.status_code == 400, body
        error = error_of(response)
        assert (error["param"], error["code"]) == (param, code)
        if code:
            assert "5000" in error["message"] and "4096" in error["message"]
    assert post(running, {"input": "x" * 4096}, "/v1/embeddings").status_code == 200


def test_a_chat_goes_on_while_texts_are_embedded_and_texts_end_with_their_client() -> None:
    """Long texts run in chunks beside the chat's tokens; a client that leaves ends those of its own."""
    gate = StepGate()

    def make() -> Scripted:
        return scripted_model(says("z" * 3000), gate=gate, max_running=8)

    with serving(make) as found, http(found.address) as client:
        core, engine = found.scripted.core, found.scripted.model.engine
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as chat:
            events = (json.loads(line[5:]) for line in chat.iter_lines() if line.startswith("data: {"))
            next(events)
            port = int(found.address.rpartition(":")[2])
            body = json.dumps({"input": ["x" * 4000] * 30}).encode()
            head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

                def embedding_runs() -> bool:
                    gate.let()
                    return any(s.num_states for plan in found.scripted.runner.plans for s in plan.sequences)

                until(embedding_runs)
                for _ in range(20):  # each token of the chat comes although texts are not done
                    gate.let()
                    next(events)
                assert len(core._samples) > 1
            gate.open()
            until(lambda: len(core._samples) <= 1)
            assert 'requests_total{status="cancelled"} 1' in client.get("/metrics").text
        until(lambda: not engine.call(core.has_work))
        assert engine.stats().kv_blocks["used"] == 0
        engine.call(core.check_integrity)


def test_texts_out_of_time_or_memory_are_503_and_a_failed_step_500() -> None:
    def clock() -> float:
        """An hour and more goes by with the first step."""
        made = found.runner.plans if found is not None else ()
        return time.monotonic() + (4000 if made else 0)

    found: Scripted | None = None

    def make() -> Scripted:
        nonlocal found
        found = scripted_model(clock=clock)
        return found

    with serving(make, request_timeout_s=3600.0) as late:
        refused = post(late, {"input": ["x" * 900, "y"]}, "/v1/embeddings")
        assert refused.status_code == 503 and error_of(refused)["code"] == "request_timeout"
    with serving(lambda: scripted_model(num_blocks=8)) as small:
        refused = post(small, {"input": "x" * 900}, "/v1/embeddings")
        assert refused.status_code == 503 and error_of(refused)["code"] == "out_of_memory"
        assert post(small, {"input": "x" * 20}, "/v1/embeddings").status_code == 200
    with serving(lambda: scripted_model(raise_at_step=0)) as broken:
        refused = post(broken, {"input": "abc"}, "/v1/embeddings")
        assert refused.status_code == 500 and "fire" in error_of(refused)["message"]


def test_a_base_model_completes_but_does_not_chat() -> None:
    with serving(lambda: scripted_model(template=None)) as found:
        refused = post(found, chat_body())
        assert refused.status_code == 400 and "chat template" in error_of(refused)["message"]
        assert post(found, {"prompt": "a\n]bc\n"}, "/v1/completions").status_code == 200
