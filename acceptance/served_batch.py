"""Many requests of all lengths through a few slots, beside generate() one by one and in padded batches.

Ours without speculation, kernels against kernels, and as users get it, with speculation where it pays.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from acceptance.harness import Figure, version
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
REQUESTS = int(os.environ.get("EDGELLM_TEST_SERVED_REQUESTS", "64"))
LONGEST = int(os.environ.get("EDGELLM_TEST_SERVED_LONGEST", "400"))
REPEAT = int(os.environ.get("EDGELLM_TEST_SERVED_REPEAT", "1"))
SHORTEST = 10
SLOTS = 16
PROMPT_TOKENS = (16, 96)


def run() -> Iterator[Figure]:
    import torch

    from edgellm.bench.natural_text import natural_ids
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from tests.support.transformers_oracle import transformers_model

    threads = len(os.sched_getaffinity(0))
    path = real_model(MODEL)
    longest_context = PROMPT_TOKENS[1] + LONGEST
    settings = EngineConfig(device="cpu", threads=threads, ctx=longest_context).resolve(environ={})
    runtime = load_runtime(settings, path, MODEL, full_contexts=SLOTS)
    model = transformers_model(path)
    model.set_attn_implementation("sdpa")  # what its users get
    torch.set_num_threads(threads)
    rng = random.Random(16)
    prompts = [
        natural_ids(
            runtime.tokenizer.encode, ("prose", "code", "chat")[i % 3], rng.randint(*PROMPT_TOKENS), i
        )
        for i in range(REQUESTS)
    ]
    # From the shortest to the longest in even steps, in an order of their own.
    lengths = [SHORTEST + (LONGEST - SHORTEST) * i // max(1, REQUESTS - 1) for i in range(REQUESTS)]
    rng.shuffle(lengths)
    serve(runtime.core, prompts[:2], [4, 4], "warm", speculate=True)
    generate(model, prompts[:1], [4])
    times: dict[str, list[float]] = {"plain": [], "drafting": [], "alone": [], "padded": []}
    for turn in range(REPEAT):
        sides = [
            *(
                (
                    name,
                    lambda name=name, turn=turn: serve(
                        runtime.core, prompts, lengths, f"{name}{turn}", speculate=name == "drafting"
                    ),
                )
                for name in ("plain", "drafting")
            ),
            ("alone", lambda: sum(generate(model, [p], [n]) for p, n in zip(prompts, lengths, strict=True))),
            (
                "padded",
                lambda: sum(
                    generate(model, prompts[i : i + SLOTS], lengths[i : i + SLOTS])
                    for i in range(0, REQUESTS, SLOTS)
                ),
            ),
        ]
        for name, side in sides if turn % 2 == 0 else reversed(sides):
            times[name].append(side())
    backend = runtime.core.stats.kernel_backend
    runtime.close()
    wanted = sum(lengths)
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = [(ours, theirs) for ours in ("plain", "drafting") for theirs in ("alone", "padded")]
    for ours, name in pairs:
        words = "one by one" if name == "alone" else f"in padded batches of {SLOTS}"
        how = "no speculation" if ours == "plain" else "speculation where it pays"
        yield Figure(
            name=f"{MODEL}, {how}: {REQUESTS} answers of {SHORTEST} to {LONGEST} tokens, peer {words}",
            value=medians[name] / medians[ours],
            unit=f"times our time (ours {wanted / medians[ours]:.1f} tok/s, {backend}, {SLOTS} slots)",
            promise="none",
            met=True,
            peer=f"transformers {version('transformers')}, f32, sdpa: {wanted / medians[name]:.1f} tok/s",
            detail={"seconds": times, "tokens": wanted, "threads": threads},
        )


def serve(
    engine: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], name: str, *, speculate: bool
) -> float:
    """Seconds until the last of all requests, submitted at once, has its tokens."""
    from edgellm.contracts import GenerationRequest, SamplingParams

    begin = time.monotonic()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
        # A salt of its own: no request is served from another run's cache.
        request_id = f"{name}-{index}"
        engine.submit(
            GenerationRequest(request_id, tuple(prompt), sampling, cache_salt=request_id, speculate=speculate)
        )
    count = 0
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            count += len(event.token_ids)
    assert count == sum(lengths), f"{count} tokens of {sum(lengths)}"
    return time.monotonic() - begin


def generate(model: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Seconds of one generate() call, padded on the left and run to the longest answer of the batch."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    count = max(lengths)
    begin = time.monotonic()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert out.shape[1] == width + count
    return time.monotonic() - begin
