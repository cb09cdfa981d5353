"""On a GPU a step is in flight while the next is planned, and the text is that of one step after another."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.oracles import require_oracle

require_oracle("gguf")

from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm_quantize.writers import write_quantized_gguf
from tests.support.engines import run_all
from tests.support.tiny_models import make_tiny

LENGTHS = (1, 5, 17, 40)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has steps in flight")
def test_the_text_is_the_same_with_a_step_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    write_quantized_gguf(make_tiny("llama", tmp_path / "model", quantizable=True), path, "Q4_K_M")

    def loaded(spec: str) -> Runtime:
        config = EngineConfig(device="cuda", model=str(path), spec=spec)
        return load_runtime(config.resolve(environ={}), path, "tiny")

    def answers(runtime: Runtime) -> list[list[int]]:
        requests = []
        for index, length in enumerate(LENGTHS):
            ids = tuple((7 * index + 3 * i) % runtime.vocab_size for i in range(length))
            for temperature in (0.0, 0.9):
                sampling = SamplingParams(
                    temperature=temperature, top_p=0.95, seed=index, max_new_tokens=30, ignore_eos=True
                )
                requests.append(GenerationRequest(f"r{index}, {temperature}", ids, sampling))
        return [result.token_ids for result in run_all(runtime.core, requests)]

    ahead, plain = loaded("off"), loaded("ngram")
    assert ahead.core._flights is not None and plain.core._flights is None
    assert answers(ahead) == answers(plain)
