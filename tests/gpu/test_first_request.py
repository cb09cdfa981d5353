"""The first request after "ready" takes no longer than the second, with an empty kernel cache (F16)."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.support.oracles import require_oracle

require_oracle("gguf")

from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm_quantize.writers import write_quantized_gguf
from tests.support.tiny_models import make_tiny

MARGIN_S = 0.02
"""What a step of a tiny model may wait for anything else."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU compiles kernels at run time")
def test_nothing_is_compiled_after_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16: prompts of 1, 15, 16, 17 and 300 tokens, greedy and drawn, one and five at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    write_quantized_gguf(
        make_tiny("llama", tmp_path / "model", quantizable=True), tmp_path / "q.gguf", "Q4_K_M"
    )
    resolved = EngineConfig(device="cuda", model=str(tmp_path / "q.gguf")).resolve(environ={})
    runtime = load_runtime(resolved, tmp_path / "q.gguf", "tiny")
    compiled = len(list((tmp_path / "kernels").rglob("*.cubin")))
    assert compiled > 10
    number = 0

    def first_token_s(length: int, temperature: float, batch: int) -> float:
        nonlocal number
        for index in range(batch):
            number += 1
            ids = tuple((number + 3 * i) % runtime.vocab_size for i in range(length))
            sampling = SamplingParams(temperature=temperature, max_new_tokens=2, ignore_eos=True, seed=index)
            runtime.core.submit(GenerationRequest(f"r{number}", ids, sampling))
        begin, first = time.perf_counter(), 0.0
        while runtime.core.has_work():
            if any(event.token_ids for event in runtime.core.step()) and not first:
                first = time.perf_counter() - begin
        return first

    for length in (1, 15, 16, 17, 300):
        for temperature in (0.0, 1.0):
            for batch in (1, 5):
                first = first_token_s(length, temperature, batch)
                second = min(first_token_s(length, temperature, batch) for _ in range(3))
                assert first < 2 * second + MARGIN_S, (length, temperature, batch, first, second)
    assert len(list((tmp_path / "kernels").rglob("*.cubin"))) == compiled
