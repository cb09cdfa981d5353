"""The server over small models: schemas, logprobs, embeddings, chats whose KV is reused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.bigram import make_bigram
from tests.support.openai_cases import HELLO
from tests.support.schemas import is_valid, schemas
from tests.support.served import TEMPLATE, Running, http, loaded_model, serving
from tests.support.tiny_models import make_tiny
from tests.support.transformers_oracle import transformers_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("t") / "m", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Running]:
    with serving(lambda: loaded_model(tiny, kernels="torch")) as found:
        yield found


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
        # In the form of the responses API, whose clients send items back as they came.
        items = [
            {
                **m,
                "content": [
                    {"type": "input_text" if m["role"] == "user" else "output_text", "text": m["content"]}
                ],
            }
            for m in messages[:-1]
        ]
        usage = client.post("/v1/responses", json={"input": items, "temperature": 0}).json()["usage"]
        assert usage["input_tokens"] == prompts[-1]
        assert usage["input_tokens_details"]["cached_tokens"] >= prompts[-1] - 16
