"""Greedy ids of the torch kernels in f32 against transformers' on the same weights and prompt ids."""

from __future__ import annotations

from collections.abc import Iterator

from acceptance.harness import Figure, version
from tests.support.greedy_prompts import LONG_PROMPT, PROMPTS
from tests.support.real_models import REAL_MODELS, real_model

NEW_TOKENS = 64


def run() -> Iterator[Figure]:
    from tests.support.greedy_runs import compare_greedy

    for name in REAL_MODELS:
        prompts = [*PROMPTS[:19], LONG_PROMPT] if name == "gemma3-270m" else list(PROMPTS)
        outcome = compare_greedy(real_model(name), prompts, NEW_TOKENS)
        yield Figure(
            name=f"{name}: prompts of {len(prompts)} with equal greedy ids",
            value=f"{outcome.equal} of {len(prompts)}",
            unit=f"over {NEW_TOKENS} tokens, {outcome.tokens} in all",
            promise="all, but for ties of transformers' own top two",
            met=outcome.equal + outcome.parted_at_ties == len(prompts),
            peer=f"transformers {version('transformers')}, f32, eager",
            detail={
                "parted_at_ties": outcome.parted_at_ties,
                "ties_seen": outcome.ties,
                "longest_prompt_tokens": outcome.longest_prompt,
                "places": outcome.places,
            },
        )
