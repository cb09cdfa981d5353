"""What quantized KV costs: KL divergence from f32 KV over one context of 4,096 tokens read back in chunks.

EDGELLM_TEST_KV_CONTEXT  tokens (default: 4096)
EDGELLM_TEST_KV_TYPES    int8,fp8,int4 (default: all)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure
from tests.support.real_models import REAL_MODELS, real_model

CONTEXT = int(os.environ.get("EDGELLM_TEST_KV_CONTEXT", "4096"))
CHUNK = 16
PROMISED = {"int8": 0.002, "int4": 0.05}
"""Nothing is promised of fp8, which takes int8's bytes."""
TYPES = set(os.environ.get("EDGELLM_TEST_KV_TYPES", "int8,fp8,int4").split(","))
PAIRS = [
    *[("int8", "int8"), ("fp8", "fp8"), ("int4", "int4")],
    *[("int8", "f32"), ("f32", "int8"), ("fp8", "f32"), ("f32", "fp8"), ("int4", "f32"), ("f32", "int4")],
]
"""Types of K and V; where they differ one is exact."""


def run() -> Iterator[Figure]:
    from edgellm.bench.natural_text import natural_text
    from edgellm.cache.kv_storage import KVType
    from edgellm.cli.evaluate_text import Evaluation, run_evaluation
    from edgellm.config import EngineConfig

    resolved = EngineConfig(ctx=CONTEXT, device="cpu", kernels="torch", activations="exact").resolve(
        environ={}
    )
    text = natural_text("prose")[: 8 * CONTEXT]
    for name in REAL_MODELS:
        path = real_model(name)
        with tempfile.TemporaryDirectory() as folder:
            for keys, values in PAIRS:
                if not TYPES & {keys, values}:
                    continue
                job = Evaluation(
                    text,
                    path,
                    name,
                    resolved,
                    reference=path,
                    chunk=CHUNK,
                    windows=1,
                    kv=KVType(keys, values, measured_apart=True),
                    cache_folder=Path(folder),
                    scores_all=True,
                )
                report = run_evaluation(job, lambda notice: None)
                found = report.result.divergence
                assert found is not None
                together = keys == values
                promise = PROMISED.get(keys) if together else None
                yield Figure(
                    name=f"{name}: KL from f32 KV, {keys if together else f'{keys} keys, {values} values'}",
                    value=found.mean_kld,
                    unit=f"nats, mean of {report.result.tokens} tokens",
                    promise=("none; " if promise is None else f"at most {promise}, ")
                    + f"one context of {CONTEXT} tokens in chunks of {CHUNK}, all of it scored",
                    met=promise is None or found.mean_kld <= promise,
                    peer="the same weights, kernels and activations with f32 KV",
                    detail={
                        "median": found.median_kld,
                        "p99": found.p99_kld,
                        "max": found.max_kld,
                        "stderr": found.mean_kld_stderr,
                        "top1_agreement": found.top1_agreement,
                        "perplexity": report.result.perplexity,
                    },
                )
