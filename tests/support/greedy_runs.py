"""Greedy ids of our engine beside those of transformers on the same weights, with ties told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.contracts import GenerationRequest, SamplingParams
from tests.support.transformers_oracle import greedy, transformers_model


@dataclass
class Outcome:
    """How many prompts gave equal ids; one that parts where transformers has a tie is counted apart."""

    equal: int = 0
    parted_at_ties: int = 0
    tokens: int = 0
    ties: int = 0
    longest_prompt: int = 0
    places: list[str] = field(default_factory=list)
    """Where ids parted, in words."""


def our_greedy(
    path: Path, prompts: Sequence[Sequence[int]], count: int, **settings: object
) -> list[list[int]]:
    """``count`` ids per prompt from the engine, end tokens ignored; f32 KV, torch kernels."""
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig

    settings = {"kernels": "torch", "kv_dtype": "f32", "device": "cpu"} | settings
    runtime = load_runtime(EngineConfig(**settings).resolve(environ={}), path, path.stem)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    answers = []
    try:
        for index, ids in enumerate(prompts):
            runtime.core.submit(GenerationRequest(str(index), tuple(ids), sampling))
            out: list[int] = []
            while runtime.core.has_work():
                for event in runtime.core.step():
                    assert event.error is None, event.error
                    out.extend(event.token_ids)
            answers.append(out)
    finally:
        runtime.close()
    return answers


def prompt_ids(path: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Ids by our tokenizer, special tokens parsed, BOS as the model wants it."""
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
    checkpoint.close()
    return [tokenizer.encode(prompt) for prompt in prompts]


def compare_greedy(path: Path, prompts: Sequence[str], count: int) -> Outcome:
    """Runs every prompt through both. A tie: transformers' top two within 1e-4 of the largest logit."""
    ids = prompt_ids(path, prompts)
    ours = our_greedy(path, ids, count)
    model = transformers_model(path)
    outcome = Outcome(longest_prompt=max(map(len, ids)))
    for prompt, mine, prompt_text in zip(ids, ours, prompts, strict=True):
        theirs, ties = greedy(model, prompt, count)
        outcome.tokens += count
        outcome.ties += sum(ties)
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is None:
            outcome.equal += 1
        else:
            outcome.parted_at_ties += ties[place]
            what = "tie" if ties[place] else "DIFFERENT"
            outcome.places.append(
                f"{prompt_text[:40]!r} token {place}: {what} {mine[place]} / {theirs[place]}"
            )
    return outcome
