"""Texts embedded by the engine: transformers' pooled states, whatever runs beside them and however often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.contracts import (
    ConstraintKind,
    ConstraintSpec,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Task,
)
from edgellm_models.errors import BadInputError
from tests.support.engines import Result, load_engine, run_all
from tests.support.tiny_models import ARCHITECTURES, make_tiny
from tests.support.transformers_oracle import transformers_model

POOLINGS = ("mean", "last")


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed) % 300 + 5 for i in range(length))


def embed(name: str, ids: Sequence[int], pooling: str = "mean", **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, tuple(ids), task=Task.EMBED, pooling=pooling, **fields)


def vector(result: Result) -> tuple[float, ...]:
    last = result.events[-1]
    assert result.reason is FinishReason.STOP and last.embedding is not None
    assert not result.token_ids and not result.text
    return last.embedding


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("t") / "m")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_are_the_pooled_states_of_transformers(architecture: str, tmp_path: Path) -> None:
    """To 1e-4, over several chunks, beyond sliding windows, for one token and for several texts at once."""
    folder = make_tiny(architecture, tmp_path / "m")
    oracle = transformers_model(folder)
    engine = load_engine(folder, chunk=48).engine
    texts = [text(150), text(49, 1), text(1, 2)]
    requests = [embed(f"{p}{i}", ids, p) for p in POOLINGS for i, ids in enumerate(texts)]
    found = [vector(result) for result in run_all(engine, requests)]
    for request, got in zip(requests, found, strict=True):
        with torch.no_grad():
            states = oracle.model(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
        expected = states.mean(0) if request.pooling == "mean" else states[-1]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_neighbours_chunks_and_the_cache_change_nothing(tiny: Path, kernels: str) -> None:
    """Answers in the same steps, prompts that are in the prefix cache already, other chunks: the same vector,
    on the native kernels bit for bit; and the answers are what they are alone."""
    ids = text(120)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    alone = [vector(r) for r in run_all(load_engine(tiny, kernels=kernels).engine, _both(ids))]
    answer = run_all(load_engine(tiny, kernels=kernels).engine, [GenerationRequest("a", ids, sampling)])[0]
    engine = load_engine(tiny, kernels=kernels, chunk=16, token_budget=24).engine
    again, *found = run_all(engine, [GenerationRequest("a", ids, sampling), *_both(ids)])
    cached = run_all(engine, _both(ids))
    for expected, one, later in zip(alone, found, cached, strict=True):
        for got in (vector(one), vector(later)):
            if kernels == "native":
                assert got == expected
            else:
                torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        usage = later.events[-1].usage
        assert usage is not None and (usage.prompt_tokens, usage.cached_tokens) == (120, 0)
    assert again.token_ids == answer.token_ids


def _both(ids: Sequence[int]) -> list[GenerationRequest]:
    return [embed(pooling, ids, pooling) for pooling in POOLINGS]


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_a_text_that_is_pushed_out_counts_every_token_once(tiny: Path, host_blocks: int) -> None:
    """It gives way to an answer that somebody waits for, then runs again, from the host or from its start."""
    ids = text(200)
    alone = [vector(r) for r in run_all(load_engine(tiny, kernels="native").engine, _both(ids))]
    loaded = load_engine(
        tiny, kernels="native", chunk=32, num_blocks=[15], max_running=2, host_blocks=host_blocks
    )
    engine, sampling = loaded.engine, SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    for pooling, expected in zip(POOLINGS, alone, strict=True):
        events = []
        engine.submit(embed(pooling, ids, pooling, priority=1))
        for _ in range(3):
            events += engine.step()
        engine.submit(GenerationRequest("urgent", text(150, 5), sampling))
        while engine.has_work():
            events += engine.step()
            engine.check_integrity()
        own = [e for e in events if e.request_id == pooling]
        assert "preempted" in [e.notice.kind for e in own if e.notice is not None]
        assert own[-1].embedding == expected


def test_a_cancelled_text_gives_its_blocks_back(tiny: Path) -> None:
    engine = load_engine(tiny, chunk=16).engine
    engine.submit(embed("one", text(200)))
    engine.step()
    engine.cancel("one")
    [event] = engine.step()
    assert event.finish_reason is FinishReason.CANCELLED and event.embedding is None
    engine.check_integrity()
    assert not engine.has_work() and engine.stats.kv_blocks["used"] == 0


def test_what_is_about_an_answer_is_refused(tiny: Path) -> None:
    engine = load_engine(tiny).engine
    digits = ConstraintSpec(ConstraintKind.REGEX, "[0-9]+")
    for field, value in (
        ("num_samples", 2),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("constraint", digits),
        ("kv_policy", "window"),
    ):
        with pytest.raises(BadInputError, match=field):
            engine.submit(embed("one", text(9), **{field: value}))
    with pytest.raises(BadInputError, match="pooling must be mean or last, not 'max'"):
        engine.submit(embed("one", text(9), "max"))
    with pytest.raises(BadInputError, match="the context holds"):
        engine.submit(embed("one", text(5000)))
