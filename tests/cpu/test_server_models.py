"""The server over real small models: the openai client on both kinds of address, logprobs, embeddings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bigram import make_bigram
from tests.support.schemas import is_valid, schemas
from tests.support.served import MODEL, TEMPLATE, Running, http, loaded_model, serving
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import transformers_model

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HELLO: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("t") / "m", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Running]:
    with serving(lambda: loaded_model(tiny, kernels="torch")) as found:
        yield found


@pytest.fixture(scope="module")
def on_socket(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    uds = tmp_path_factory.mktemp("s") / "own" / "s"
    with serving(lambda: loaded_model(tiny, kernels="torch"), uds=uds) as found:
        yield found


def openai_client(running: Running, **fields: Any) -> Any:
    """A client of any major version (acceptance/other_clients.py tries an older one)."""
    import openai

    if running.address.startswith("unix:"):
        # The HTTP library that this version of the client is built on.
        library = sys.modules[openai.DefaultHttpxClient.__base__.__module__]
        transport = library.HTTPTransport(uds=running.address.removeprefix("unix:"))
        fields["http_client"] = openai.DefaultHttpxClient(transport=transport)
        return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, **fields)
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0, **fields)


@pytest.mark.parametrize("where", ["running", "on_socket"])
def test_the_openai_client(where: str, request: pytest.FixtureRequest) -> None:
    """One list over TCP and over the unix socket: what programs written for the API do."""
    import openai

    running: Running = request.getfixturevalue(where)
    client = openai_client(running)
    assert [model.id for model in client.models.list()] == [MODEL]
    asked = {"model": MODEL, "messages": HELLO, "seed": 7, "max_tokens": 12}
    answer = client.chat.completions.create(**asked, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 24

    chunks = list(
        client.chat.completions.create(**asked, n=2, stream=True, stream_options={"include_usage": True})
    )
    for index in range(2):
        parts = [
            c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == index
        ]
        assert "".join(parts) == answer.choices[index].message.content
    assert chunks[-1].usage == answer.usage or chunks[-1].usage.completion_tokens == 24

    text = answer.choices[0].message.content
    stopped = client.chat.completions.create(**asked, stop=[text[3:6]])
    assert stopped.choices[0].message.content == text[: text.index(text[3:6])]
    assert stopped.choices[0].finish_reason == "stop"

    called = client.chat.completions.create(
        **{**asked, "max_tokens": 200},
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [call] = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    assert is_valid(CITY, call.function.arguments) and not called.choices[0].message.content
    streamed = client.chat.completions.create(
        **{**asked, "max_tokens": 200}, tools=[TOOL], tool_choice="required", stream=True
    )
    deltas = [c.choices[0].delta for c in streamed]
    arguments = "".join(t.function.arguments or "" for d in deltas for t in d.tool_calls or ())
    assert is_valid(CITY, arguments) and not any(d.content for d in deltas)

    wrong = [
        (openai.NotFoundError, {"model": "other"}, "model_not_found"),
        (openai.BadRequestError, {"temperature": -1}, None),
        (
            openai.BadRequestError,
            {"messages": [{"role": "user", "content": "x " * 3000}]},
            "context_length_exceeded",
        ),
    ]
    for kind, fields, code in wrong:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{**asked, **fields})
        assert caught.value.code == code and caught.value.body["message"]

    legacy = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=3, seed=1, logprobs=2)
    assert len(legacy.choices) == 2 and len(legacy.choices[0].logprobs.token_logprobs) == 3

    response = client.responses.create(model=MODEL, input="hello there", max_output_tokens=12)
    assert response.status == "incomplete" and response.output_text
    kinds = [
        e.type for e in client.responses.create(model=MODEL, input=HELLO, max_output_tokens=3, stream=True)
    ]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds

    vector = client.embeddings.create(model=MODEL, input="hello there").data[0].embedding
    assert len(vector) == 64 and all(math.isfinite(v) for v in vector)
    with pytest.raises(openai.APITimeoutError):
        openai_client(running, timeout=0.001).chat.completions.create(**asked)


def test_answers_keep_to_random_schemas(running: Running) -> None:
    """Each that ends by itself validates; one that was cut says so."""
    ended = 0
    with http(running.address) as client:
        for number, schema in enumerate(schemas(12, seed=4)):
            body = {
                "messages": HELLO, "seed": number, "max_tokens": 300,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, (schema, answer.text)
            [choice] = answer.json()["choices"]
            if choice["finish_reason"] == "stop":
                ended += 1
                assert is_valid(schema, choice["message"]["content"]), (schema, choice)
            else:
                assert choice["finish_reason"] == "length"
    assert ended >= 10


def test_echoed_logprobs_are_those_of_transformers(running: Running, tiny: Path) -> None:
    """What lm-evaluation-harness asks: echo, logprobs, and no or one token of an answer."""
    oracle = transformers_model(tiny)
    with http(running.address) as client:
        ids = client.post("/tokenize", json={"content": "the quick brown fox", "add_special": True}).json()[
            "tokens"
        ]
        with torch.no_grad():
            rows = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), -1)
        for count in (0, 1):
            body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": count, "temperature": 0}
            [choice] = client.post("/v1/completions", json=body).json()["choices"]
            found = choice["logprobs"]
            assert len(found["token_logprobs"]) == len(ids) + count == len(found["text_offset"])
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            for place in range(1, len(ids)):
                expected = rows[place - 1]
                assert found["token_logprobs"][place] == pytest.approx(float(expected[ids[place]]), abs=1e-3)
                assert max(found["top_logprobs"][place].values()) == pytest.approx(
                    float(expected.max()), abs=1e-3
                )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_embeddings_are_pooled_hidden_states_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Over several chunks, and with a sliding window."""
    folder = make_tiny(architecture, tmp_path / "m")
    oracle = transformers_model(folder)
    with serving(lambda: loaded_model(folder, kernels="torch")) as found, http(found.address) as client:
        ids = [(7 * i) % 300 + 5 for i in range(300)]
        with torch.no_grad():
            states = oracle.model(torch.tensor([ids])).last_hidden_state[0]
        for pooling, expected in (("mean", states.mean(0)), ("last", states[-1])):
            body = client.post("/v1/embeddings", json={"input": [ids, ids[:9]], "pooling": pooling}).json()
            assert body["usage"]["prompt_tokens"] == 309
            vector = torch.tensor(body["data"][0]["embedding"])
            torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
        assert client.post("/v1/embeddings", json={"input": [ids], "dimensions": 3}).status_code == 400


def test_logprobs_of_chat_spell_the_content(tmp_path: Path) -> None:
    """G08: the new shape, bytes of a split character, sorted alternatives, an entry a token, streamed."""
    emoji = [bytes([byte]) for byte in "🫠".encode()]
    folder = make_bigram(tmp_path / "m", ["Hi ", *emoji, "!"], chat_template=TEMPLATE, encodable=False)
    with serving(lambda: loaded_model(folder, kernels="torch")) as found, http(found.address) as client:
        body = {"messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        answer = client.post("/v1/chat/completions", json=body).json()
        [choice] = answer["choices"]
        content = choice["message"]["content"]
        assert content == "Hi 🫠!"
        entries = choice["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"] == 7
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content
        for entry in entries:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 3 and values == sorted(values, reverse=True)
            assert all(math.isfinite(v) for v in (entry["logprob"], *values))
            assert set(entry) >= {"token", "logprob", "bytes", "top_logprobs"}
        hot = client.post("/v1/chat/completions", json={**body, "temperature": 0.5, "seed": 1}).json()
        assert hot["choices"][0]["logprobs"]["content"][0]["logprob"] == pytest.approx(entries[0]["logprob"])
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
        streamed = [
            entry
            for chunk in chunks
            for c in chunk["choices"]
            for entry in ((c["logprobs"] or {}).get("content") or ())
        ]
        assert streamed == entries


def test_ten_turns_reuse_what_was_said(tmp_path: Path) -> None:
    """The cached tokens grow with the history, the answers' own ids included, though their text would be
    tokenized otherwise."""
    chain = ["al", "pha", " be", "ta", " gam", "ma"]
    folder = make_bigram(tmp_path / "m", chain, chat_template=TEMPLATE, encodable=False, context=4000)
    with serving(lambda: loaded_model(folder, kernels="torch")) as found, http(found.address) as client:
        messages: list[dict[str, str]] = []
        cached, prompts = [], []
        for turn in range(10):
            messages.append({"role": "user", "content": f"question {turn}?"})
            body = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0}).json()
            text = body["choices"][0]["message"]["content"]
            assert text == "".join(chain)
            messages.append({"role": "assistant", "content": text})
            usage = body["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            prompts.append(usage["prompt_tokens"])
        assert cached == sorted(cached) and len(set(cached)) >= 8
        # All but the newest turn and at most a block.
        for turn in range(1, 10):
            assert cached[turn] >= prompts[turn - 1] - 16
        # By their own ids: each answer is 6 tokens in the next prompt, not one per character.
        assert prompts[1] - prompts[0] == len(chain) + len("\n[user]question 1?\n[assistant]")
