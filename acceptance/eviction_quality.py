"""What lossy eviction costs at half the KV: perplexity, KL, needle recall, beside random victims."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acceptance.harness import Figure
from tests.support.real_models import REAL_MODELS, real_model

if TYPE_CHECKING:
    from edgellm.config import ResolvedConfig

CONTEXT = int(os.environ.get("EDGELLM_TEST_EVICTION_CONTEXT", "2048"))
KEEP = CONTEXT // 2
WINDOWS = int(os.environ.get("EDGELLM_TEST_EVICTION_WINDOWS", "2"))
NEEDLES = int(os.environ.get("EDGELLM_TEST_EVICTION_NEEDLES", "8"))
CHUNK = 16
POLICIES = ("window", "budget", "random")
_SENTENCE = "The secret number of the lighthouse keeper is {number}."


def run() -> Iterator[Figure]:
    from edgellm.bench.natural_text import natural_text
    from edgellm.cli.evaluate_text import Evaluation, run_evaluation
    from edgellm.config import EngineConfig

    exact = EngineConfig(ctx=CONTEXT, device="cpu", kernels="torch", activations="exact", kv_dtype="f32")
    base = replace(exact.resolve(environ={}), kv_window=KEEP, kv_budget=KEEP)
    text = natural_text("prose")[: 8 * CONTEXT * (WINDOWS + 1)]
    for name in REAL_MODELS:
        path = real_model(name)
        full_recall = recall(path, name, base)
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for policy in POLICIES:
                # ``random`` is no setting: it stands here for comparison.
                resolved = replace(base, kv_policy=policy)
                job = Evaluation(text, path, name, resolved, path, CHUNK, WINDOWS, cache_folder=Path(folder))
                result = run_evaluation(job, lambda notice: None).result
                assert result.divergence is not None
                found[policy] = (result.divergence.mean_kld, result.perplexity, recall(path, name, resolved))
        for policy, (kld, perplexity, recalled) in found.items():
            others = {other: value[0] for other, value in found.items() if other != policy}
            is_judged = policy == "budget"
            yield Figure(
                name=f"{name}: KL from all KV, {policy} of {KEEP} tokens in a context of {CONTEXT}",
                value=kld,
                unit=f"nats; perplexity {perplexity:.3f}, needles {recalled}/{NEEDLES} (all {full_recall})",
                promise="less than window and random, else it is experimental" if is_judged else "none",
                met=not is_judged or all(kld < other for other in others.values()),
                peer=", ".join(f"{other} {value:.4g}" for other, value in others.items()),
                detail={"perplexity": perplexity, "needles": recalled, "needles_of_all_kv": full_recall},
            )


def recall(path: Path, name: str, resolved: ResolvedConfig) -> int:
    """How many of the needles, each at another depth of the context, are said at its end."""
    from edgellm.bench.natural_text import natural_ids
    from edgellm.cli.runtime import load_runtime

    runtime = load_runtime(resolved, path, name)
    encode = runtime.tokenizer.encode
    bos = [runtime.tokenizer.bos_id] if runtime.tokenizer.add_bos else []

    def plain(text: str) -> list[int]:
        return encode(text, add_special=False)

    hits = 0
    try:
        for index in range(NEEDLES):
            number = str(1000 + (7919 * (index + 1)) % 9000)
            needle = plain("\n\n" + _SENTENCE.format(number=number) + "\n\n")
            question = plain("\n\n" + _SENTENCE.format(number="").rstrip(" ."))
            room = CONTEXT - len(needle) - len(question) - len(bos) - 16
            hay = list(natural_ids(plain, "prose", room, index))
            at = room * (2 * index + 1) // (2 * NEEDLES)
            hits += number in _answer(
                runtime, [*bos, *hay[:at], *needle, *hay[at:], *question], resolved.kv_policy
            )
    finally:
        runtime.close()
    return hits


def _answer(runtime: Any, ids: Sequence[int], policy: str) -> str:
    from edgellm.contracts import GenerationRequest, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    runtime.core.submit(
        GenerationRequest("needle", tuple(ids), sampling, kv_policy=policy, continues_text=True)
    )
    text = ""
    while runtime.core.has_work():
        for event in runtime.core.step():
            assert event.error is None, event.error
            text += event.text
    return text
