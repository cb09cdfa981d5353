"""Greedy text of a real model on the native kernels: the same bits in any batch and any cut of the prompt."""

from __future__ import annotations

import pytest

from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from tests.support.real_models import real_model

PROMPTS = (
    "The history of the lighthouse begins long before electric light. Sailors near a coast",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: What is the boiling point of water?\nA:",
)
NEW = 8


def runtime(chunk: int) -> Runtime:
    chosen = {"kernels": "native", "device": "cpu", "kv_dtype": "int8", "ctx": 512, "threads": 1}
    resolved = EngineConfig(**chosen).resolve(environ={})  # type: ignore[arg-type]
    return load_runtime(resolved, real_model("smollm2-135m"), "m", prefill_chunk=chunk)


def answers(engine: Runtime, prompts: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The ids of all answers, the prompts submitted together."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    out: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    for prompt in prompts:
        ids = tuple(engine.tokenizer.encode(prompt))
        # A salt of its own: no answer may come from another's cached prefix.
        engine.core.submit(GenerationRequest(prompt, ids, sampling, cache_salt=f"{len(prompts)}"))
    while engine.core.has_work():
        for event in engine.core.step():
            assert event.error is None, event.error
            out[event.request_id].extend(event.token_ids)
    return [tuple(ids) for ids in out.values()]


@pytest.mark.real_model
def test_int8_kv_gives_the_same_text_in_any_batch_and_chunk() -> None:
    whole, cut = runtime(512), runtime(7)
    try:
        alone = [answers(whole, (prompt,))[0] for prompt in PROMPTS]
        assert all(len(ids) == NEW for ids in alone) and len(set(alone)) == len(PROMPTS)
        assert answers(whole, PROMPTS) == alone
        assert answers(cut, PROMPTS) == alone
    finally:
        whole.close()
        cut.close()
