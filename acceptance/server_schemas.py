"""Random JSON schemas through the server: what ends by itself validates, what is cut says so."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from acceptance.harness import Figure
from tests.support.real_models import real_model
from tests.support.schemas import is_valid, schemas
from tests.support.served import TEMPLATE, http, loaded_model, serving
from tests.support.tiny_models import make_tiny

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
COUNT = int(os.environ.get("EDGELLM_TEST_SCHEMAS", "200"))
MAX_TOKENS = 400
AT_ONCE = 8


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny("llama", Path(folder) / "m", chat_template=TEMPLATE)
        yield _schemas("random weights", tiny, kernels="torch")
    yield _schemas(MODEL, real_model(MODEL), ctx=8192)


def _schemas(name: str, path: Path, **settings: Any) -> Figure:
    chosen = list(schemas(COUNT, seed=9))
    with (
        serving(lambda: loaded_model(path, **settings), queue=COUNT, wait=False) as running,
        http(running.address) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        _until_ready(client)

        def ask(number: int) -> str:
            """stop, length, or what is wrong."""
            body = {
                "messages": [{"role": "user", "content": f"Fill in form {number} as you like."}],
                "seed": number,
                "max_tokens": MAX_TOKENS,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": chosen[number]},
                },
            }
            response = client.post("/v1/chat/completions", json=body, timeout=900)
            if response.status_code != 200:
                return f"{chosen[number]}: {response.text[:200]}"
            [choice] = response.json()["choices"]
            content, reason = choice["message"]["content"], choice["finish_reason"]
            if reason == "stop" and not is_valid(chosen[number], content):
                return f"{chosen[number]}: {content[:200]!r} does not validate"
            return str(reason)

        found = list(pool.map(ask, range(COUNT)))
    wrong = [text for text in found if text not in ("stop", "length")]
    ended = found.count("stop")
    return Figure(
        f"{name}: answers to {COUNT} random JSON schemas that ended by themselves and validate",
        ended,
        f"({found.count('length')} cut at {MAX_TOKENS} tokens and saying so, {len(wrong)} wrong)",
        f"at least {COUNT * 95 // 100}, none wrong",
        ended >= COUNT * 95 // 100 and not wrong,
        detail={"wrong": wrong[:3]},
    )


def _until_ready(client: Any) -> None:
    while client.get("/health").status_code == 503:
        time.sleep(0.1)
