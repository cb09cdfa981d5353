"""Runs requests together through an engine and notes when their tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgellm.bench.latency import Timeline
from edgellm.contracts import GenerationEngine, GenerationRequest, SamplingParams
from edgellm_models.errors import EngineError


class BenchEngine(GenerationEngine, Protocol):
    """What is measured: the synchronous engine, so that no thread hands over between step and clock."""

    context_length: int


def run_together(
    engine: BenchEngine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    extra_tokens: int = 0,
    kv_policy: str = "stop",
    name: str = "bench",
    clock: Callable[[], float] = time.monotonic,
) -> list[Timeline]:
    """Submits all prompts at once and runs until each has ``new_tokens``; a timeline for each, in order.

    Greedy, behind end tokens too. Those that began early go on, up to ``extra_tokens`` more, until the last
    has its tokens, so that there is a time in which all decode. EngineError when a request fails or ends
    short of ``new_tokens``.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens + extra_tokens, ignore_eos=True)
    begin = clock()
    times: dict[str, list[float]] = {}
    prefill: dict[str, float] = {}
    ids = [f"{name}-{i}" for i in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        times[request_id] = []
        engine.submit(
            GenerationRequest(request_id, tuple(prompt), sampling, arrival_time=begin, kv_policy=kv_policy)
        )
    ended = False
    while engine.has_work():
        events = engine.step()
        now = clock()
        for event in events:
            if event.error is not None:
                raise EngineError(f"a measured request failed: {event.error}")
            times[event.request_id] += [now] * len(event.token_ids)
            if event.timings is not None:
                prefill[event.request_id] = event.timings.prefill_s
        if not ended and all(len(found) >= new_tokens for found in times.values()):
            ended = True
            for request_id in ids:
                engine.cancel(request_id)
    short = min(len(found) for found in times.values())
    if short < new_tokens:
        raise EngineError(f"a measured request ended after {short} of {new_tokens} tokens")
    return [
        Timeline(begin, tuple(times[request_id]), len(prompt), prefill.get(request_id, 0.0))
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]
