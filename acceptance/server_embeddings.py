"""Embeddings of the server beside the pooled hidden states of transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.harness import Figure, version
from tests.support.real_models import REAL_MODELS, real_model
from tests.support.served import http, loaded_model, serving

TEXTS = (
    "The lighthouse keeper wrote down what the sea had done that night, and in the morning he read it to the "
    "gulls. " * 8,
    "Grüße aus Ulm!",
    "x",
)
EXACT = {"activations": "exact", "kv_dtype": "f32"}
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("torch kernels, exact", {"kernels": "torch", **EXACT}),
    ("native kernels, exact", EXACT),
    ("default settings", {}),
)
MOST = 1e-4


def run() -> Iterator[Figure]:
    from tests.support.transformers_oracle import transformers_model

    for name in REAL_MODELS:
        path = real_model(name)
        oracle = transformers_model(path)
        for words, settings in SETTINGS:
            yield _differences(name, path, oracle, words, settings)


def _differences(name: str, path: Path, oracle: Any, words: str, settings: dict[str, Any]) -> Figure:
    import torch

    worst, cosine = 0.0, 1.0
    with (
        serving(lambda: loaded_model(path, ctx=1024, **settings)) as running,
        http(running.address) as client,
    ):
        ids = [
            client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
            for text in TEXTS
        ]
        for pooling in ("mean", "last"):
            asked = {"input": ids, "pooling": pooling}
            rows = client.post("/v1/embeddings", json=asked, timeout=600).json()["data"]
            for own, row in zip(ids, rows, strict=True):
                with torch.no_grad():
                    states = oracle.model(torch.tensor([own])).last_hidden_state[0].double()
                expected = states.mean(0) if pooling == "mean" else states[-1]
                found = torch.tensor(row["embedding"], dtype=torch.float64)
                worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
                cosine = min(cosine, float(torch.nn.functional.cosine_similarity(found, expected, dim=0)))
    is_exact = bool(settings)
    return Figure(
        f"{name}: embeddings of {len(TEXTS)} texts, mean and last, {words}",
        worst,
        f"of the largest element at most (cosine at least {cosine:.9f})",
        f"at most {MOST:g}" if is_exact else "none",
        worst <= MOST or not is_exact,
        f"transformers {version('transformers')}, f32, the same weights",
        detail={"cosine": cosine, "settings": settings},
    )
