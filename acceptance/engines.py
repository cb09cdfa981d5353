"""What the engine's figures share: a loaded runtime, greedy requests, and the time stamps of their events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams, TokenEvent
from tests.support.corpus import corpus_lines
from tests.support.real_models import real_model


def load(model: str, **settings: object) -> Runtime:
    """A real model on the torch kernels, f32 KV, no speculation unless told otherwise: a step is a token."""
    chosen = {"kernels": "torch", "kv_dtype": "f32", "device": "cpu", "spec": "off"} | settings
    resolved = EngineConfig(**chosen).resolve(environ={})  # type: ignore[arg-type]
    return load_runtime(resolved, real_model(model), model)


def tokens(runtime: Runtime, count: int, skip: int = 0) -> tuple[int, ...]:
    """``count`` ids of natural text, from the token after ``skip`` on."""
    ids: list[int] = []
    text = "\n".join(corpus_lines())
    while len(ids) < skip + count:
        ids += runtime.tokenizer.encode(text, add_special=False)
    return tuple(ids[skip : skip + count])


@dataclass
class Timeline:
    """When each request was submitted and when its tokens came, in monotonic seconds."""

    submitted: dict[str, float] = field(default_factory=dict)
    came: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, TokenEvent] = field(default_factory=dict)

    def submit(self, runtime: Runtime, name: str, ids: Sequence[int], count: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
        self.submitted[name] = time.monotonic()
        self.came[name] = []
        runtime.core.submit(GenerationRequest(name, tuple(ids), sampling))

    def step(self, runtime: Runtime) -> None:
        events = runtime.core.step()
        now = time.monotonic()
        for event in events:
            assert event.error is None, event.error
            self.came[event.request_id] += [now] * len(event.token_ids)
            if event.finish_reason is not None:
                self.last[event.request_id] = event

    def run(self, runtime: Runtime) -> None:
        while runtime.core.has_work():
            self.step(runtime)

    def ttft(self, name: str) -> float:
        return self.came[name][0] - self.submitted[name]

    def gaps(self, name: str, start: float, end: float) -> list[float]:
        """Seconds between two tokens, those that end in a span of time."""
        times = self.came[name]
        return [b - a for a, b in itertools.pairwise(times) if start <= b <= end]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ttft_of(runtime: Runtime, ids: Sequence[int], count: int = 1) -> tuple[float, int]:
    """Seconds to the first token of one request alone, and the tokens that it reused."""
    line = Timeline()
    line.submit(runtime, "one", ids, count)
    line.run(runtime)
    usage = line.last["one"].usage
    assert usage is not None
    return line.ttft("one"), usage.cached_tokens
