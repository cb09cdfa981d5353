"""Many requests of all lengths through a few slots, beside generate() one by one and in padded batches.

Ours without speculation, kernels against kernels, and as users get it, with speculation where it pays. The
peer's side takes ten times as long as ours and more: it is run in rounds, sixteen requests one by one and a
padded batch of the same sixteen, with a whole run of ours before the first round, behind every second one
and at the end, so that noise meets both. The seconds of every finished call of the peer are kept in build/:
a run that was ended, or whose time was up, is taken up where it stopped, with runs of ours beside the new
rounds.

EDGELLM_TEST_SERVED_MODEL, _REQUESTS, _LONGEST  a smaller run
EDGELLM_TEST_SERVED_MINUTES                     no round begins after so many (default: 9)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acceptance.harness import ROOT, Figure, machine, version
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
REQUESTS = int(os.environ.get("EDGELLM_TEST_SERVED_REQUESTS", "64"))
LONGEST = int(os.environ.get("EDGELLM_TEST_SERVED_LONGEST", "400"))
MINUTES = float(os.environ.get("EDGELLM_TEST_SERVED_MINUTES", "9"))
SHORTEST = 10
SLOTS = 16
PROMPT_TOKENS = (16, 96)


class PeerSeconds:
    """Seconds of the peer's calls by name, kept in a file of this machine and this set of requests."""

    def __init__(self, *, requests: object) -> None:
        about = json.dumps([requests, machine(), version("transformers"), version("torch")])
        name = hashlib.blake2b(about.encode(), digest_size=6).hexdigest()
        self._path = Path(ROOT / "build" / f"served_batch-{name}.json")
        self._path.parent.mkdir(exist_ok=True)
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else "{}"
        self.found: dict[str, float] = json.loads(text)
        self.was_there = len(self.found)

    def __setitem__(self, name: str, seconds: float) -> None:
        self.found[name] = seconds
        part = self._path.with_suffix(".tmp")
        part.write_text(json.dumps(self.found), encoding="utf-8")
        part.replace(self._path)

    def total(self, kind: str) -> float:
        """Of all calls of a kind."""
        return sum(seconds for name, seconds in self.found.items() if name.startswith(kind))

    def forget(self) -> None:
        """The next run begins anew."""
        self._path.unlink(missing_ok=True)


def run() -> Iterator[Figure]:
    import torch

    from edgellm.bench.natural_text import natural_ids
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from tests.support.transformers_oracle import transformers_model

    began = time.monotonic()
    threads = len(os.sched_getaffinity(0))
    path = real_model(MODEL)
    longest_context = PROMPT_TOKENS[1] + LONGEST
    settings = EngineConfig(device="cpu", threads=threads, ctx=longest_context).resolve(environ={})
    runtime = load_runtime(settings, path, MODEL, full_contexts=SLOTS, max_running=SLOTS)
    model = transformers_model(path)
    model.set_attn_implementation("sdpa")  # what its users get
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
    ours: dict[str, list[float]] = {"plain": [], "drafting": []}

    def run_ours() -> None:
        torch.set_num_threads(1)  # as the engine does: its own threads compute
        for name, seconds in ours.items():
            salt = f"{name}{len(seconds)}"
            seconds.append(serve(runtime.core, prompts, lengths, salt, speculate=name == "drafting"))
        torch.set_num_threads(threads)

    serve(runtime.core, prompts[:2], [4, 4], "warm", speculate=True)
    torch.set_num_threads(threads)
    generate(model, prompts[:1], [4])
    peer = PeerSeconds(requests=[MODEL, [list(prompt) for prompt in prompts], lengths])
    run_ours()
    firsts = range(0, REQUESTS, SLOTS)
    for turn, first in enumerate(firsts):
        members = range(first, min(first + SLOTS, REQUESTS))
        calls = {f"padded {first}": list(members)} | {f"alone {i}": [i] for i in members}
        calls = {name: who for name, who in calls.items() if name not in peer.found}
        if calls and time.monotonic() - began > 60 * MINUTES:
            left = REQUESTS + len(firsts) - len(peer.found)
            print(f"time is up: {left} calls of the peer are left for the next run of this script")
            runtime.close()
            return
        for name, who in calls.items():
            peer[name] = generate(model, [prompts[i] for i in who], [lengths[i] for i in who])
        if calls and (turn % 2 == 1 or first == firsts[-1]):
            run_ours()
    backend = runtime.core.stats.kernel_backend
    runtime.close()
    wanted = sum(lengths)
    for side, seconds in ours.items():
        median = statistics.median(seconds)
        for kind in ("alone", "padded"):
            words = "one by one" if kind == "alone" else f"in padded batches of {SLOTS}"
            how = "no speculation" if side == "plain" else "speculation where it pays"
            theirs = peer.total(kind)
            yield Figure(
                name=f"{MODEL}, {how}: {REQUESTS} answers of {SHORTEST} to {LONGEST} tokens, peer {words}",
                value=theirs / median,
                unit=f"times our time (ours {wanted / median:.1f} tok/s, {backend}, {SLOTS} slots)",
                promise="none",
                met=True,
                peer=f"transformers {version('transformers')}, f32, sdpa: {wanted / theirs:.1f} tok/s",
                detail={
                    "ours_s": ours,
                    "peer_s": peer.found,
                    "peer_calls_of_earlier_runs": peer.was_there,
                    "tokens": wanted,
                    "threads": threads,
                },
            )
    peer.forget()


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
