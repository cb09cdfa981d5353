"""Measures speculation: greedy answers with and without it in alternating pairs, by class of prompt."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm.contracts import (
    DraftCounts,
    GenerationEngine,
    GenerationRequest,
    RequestTimings,
    SamplingParams,
)
from edgellm_models.errors import EngineError

FEWEST_TOKENS = 16
"""Of a shorter answer nothing can be said."""
MAX_REPEATS = 3
"""Of one 8-gram in the last half of an answer: with more it repeats itself and is drafted too easily."""

_numbers = itertools.count()


@dataclass
class ClassTally:
    """What one class of prompts brought in one mode."""

    ratios: list[float] = field(default_factory=list)
    """Of each pair, tokens per second with speculation over those without."""
    plain_tokens_per_s: list[float] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    different: int = 0
    """Pairs whose texts differ: none should."""
    left_out: int = 0
    """Answers that repeat themselves or are too short."""

    def report(self) -> dict[str, Any]:
        """Plain types; the ratio is the median, None where every answer was left out."""
        return {
            "ratio": statistics.median(self.ratios) if self.ratios else None,
            "plain_tokens_per_s": statistics.median(self.plain_tokens_per_s) if self.ratios else None,
            "pairs": len(self.ratios),
            "drafted": self.proposed,
            "accepted": self.accepted,
            "tokens_per_step": self.tokens / (self.tokens - self.accepted) if self.tokens else None,
            "different": self.different,
            "left_out": self.left_out,
        }


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether the last half repeats one 8-gram more than ``MAX_REPEATS`` times."""
    half = token_ids[len(token_ids) // 2 :]
    grams = Counter(tuple(half[start : start + 8]) for start in range(len(half) - 7))
    return max(grams.values(), default=0) > MAX_REPEATS


def greedy_answer(
    engine: GenerationEngine, prompt: Sequence[int], max_tokens: int, *, speculate: bool
) -> tuple[list[int], RequestTimings, DraftCounts]:
    """One answer. Each has a salt of its own: no run sees what another one said. EngineError."""
    name = f"bench-spec-{next(_numbers)}"
    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_tokens)
    engine.submit(
        GenerationRequest(
            name,
            tuple(prompt),
            sampling,
            speculate=speculate,
            cache_salt=name,
            arrival_time=time.monotonic(),
        )
    )
    found: list[int] = []
    last = None
    while engine.has_work():
        for event in engine.step():
            if event.error is not None:
                raise EngineError(event.error)
            found += event.token_ids
            last = event if event.finish_reason is not None else last
    assert last is not None and last.timings is not None and last.draft is not None
    return found, last.timings, last.draft


def measure(
    engine: GenerationEngine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    pairs: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> ClassTally:
    """Alternating pairs of every prompt; the first of a prompt without speculation is not timed."""
    tally = ClassTally()
    for number, prompt in enumerate(prompts, start=1):
        plain, _, _ = greedy_answer(engine, prompt, max_tokens, speculate=False)
        if len(plain) < FEWEST_TOKENS or repeats(plain):
            tally.left_out += 1
            continue
        for pair in range(pairs):
            on_progress(f"prompt {number} of {len(prompts)}, pair {pair + 1} of {pairs}")
            runs = {}
            for speculate in (True, False) if pair % 2 else (False, True):
                runs[speculate] = greedy_answer(engine, prompt, max_tokens, speculate=speculate)
            (ids, with_times, counts), (plain_ids, plain_times, _) = runs[True], runs[False]
            tally.different += ids != plain_ids
            tally.ratios.append(with_times.decode_tokens_per_s / plain_times.decode_tokens_per_s)
            tally.plain_tokens_per_s.append(plain_times.decode_tokens_per_s)
            tally.proposed += counts.proposed
            tally.accepted += counts.accepted
            tally.steps += counts.steps
            tally.tokens += len(ids)
    return tally
