"""Requests of every setting, and what is compared of runs with drafts and without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from edgellm.contracts import ConstraintKind, ConstraintSpec, FinishReason, GenerationRequest, SamplingParams
from tests.support.engines import LoadedEngine, Result
from tests.support.native_cases import needs_native

BLOCK = 8
REPEATS = "one two three four five six one two three four five six one two three"
KINDS = [("torch", "f32"), *(pytest.param("native", kv, marks=needs_native) for kv in ("f32", "int8"))]
"""Kernels and types of the KV over which drafts change no token."""
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a","b"]}'


def mixed_requests(loaded: LoadedEngine, count: int = 12) -> list[GenerationRequest]:
    """One of every setting that decides what is drawn."""
    text = loaded.tokenizer.encode(REPEATS)
    rng = random.Random(3)
    other = [rng.randrange(3, 300) for _ in range(37)]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    warm = SamplingParams(temperature=1.0, seed=11, max_new_tokens=count)
    json = ConstraintSpec(ConstraintKind.JSON_SCHEMA, SCHEMA)
    cases: list[tuple[Sequence[int], SamplingParams, dict[str, object]]] = [
        (text, greedy, {}),
        (other, greedy, {"logprobs": 2}),
        (text, replace(warm, temperature=0.6, top_p=0.9, min_p=0.02), {"logprobs": 0}),
        (other, replace(warm, temperature=2.5, top_k=40, typical_p=0.95), {}),
        (text, replace(warm, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3), {}),
        (text, replace(greedy, repetition_penalty=1.2), {}),
        (other, replace(warm, logit_bias={5: 8.0, 7: -100.0}), {}),
        (text, replace(greedy, max_new_tokens=30, ignore_eos=False), {"constraint": json}),
        (text, replace(warm, temperature=0.8, max_new_tokens=30), {"constraint": json}),
        (other, warm, {"num_samples": 3}),
        (text, greedy, {"prediction_token_ids": tuple(other)}),
        (text, warm, {"speculate": False}),
        (text, replace(greedy, max_new_tokens=1), {}),
        (text, replace(warm, stop=("e", "zz"), max_new_tokens=30), {}),
    ]
    return [
        GenerationRequest(f"r{index}", tuple(ids), sampling, **fields)  # type: ignore[arg-type]
        for index, (ids, sampling, fields) in enumerate(cases)
    ]


def outcomes(results: Sequence[Result]) -> list[tuple[object, ...]]:
    """What a caller sees of answers, sample by sample; logprobs up to rounding."""
    found: list[tuple[object, ...]] = []
    for result in results:
        by_sample: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        reasons: dict[int, FinishReason] = {}
        probs: list[tuple[int, float]] = []
        for event in result.events:
            by_sample.setdefault(event.sample, []).extend(event.token_ids)
            texts[event.sample] = texts.get(event.sample, "") + event.text
            probs += [(p.token_id, round(p.logprob, 3)) for p in event.logprobs]
            if event.finish_reason is not None:
                reasons[event.sample] = event.finish_reason
                assert event.error is None
        found.append((by_sample, reasons, texts, probs))
    return found


def proposed(results: Sequence[Result]) -> tuple[int, int]:
    """(drafted, kept) of all."""
    counts = [e.draft for r in results for e in r.events if e.draft is not None]
    return sum(c.proposed for c in counts), sum(c.accepted for c in counts)


def check_rounds(loaded: LoadedEngine, load: Callable[[], LoadedEngine], *, exact: bool) -> int:
    """Runs sequence 0 to its end; after every step all its committed KV is that of a fresh prefill, bit for
    bit where it is ``exact``. How many steps were compared."""
    rounds = 0
    while loaded.engine.has_work():
        loaded.engine.step()
        if 0 not in loaded.engine._kv.sequences:
            break
        held = loaded.engine._kv.sequences[0]
        rounds += 1
        once = load()
        limit = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
        once.engine.submit(GenerationRequest("f", tuple(held.tokens), limit))
        once.engine.step()
        other = once.engine._kv.sequences[0]
        for group, pages in enumerate(once.storage):
            for layer in range(pages.keys.shape[0]):
                for ours, theirs in zip(
                    _rows(loaded, held.tables, group, layer, held.committed),
                    _rows(once, other.tables, group, layer, held.committed),
                    strict=True,
                ):
                    both = min(len(ours), len(theirs))  # of a window the last positions
                    assert both
                    if exact:
                        assert torch.equal(ours[-both:], theirs[-both:])
                    else:
                        assert torch.allclose(ours[-both:], theirs[-both:], atol=2e-4)
    return rounds


def _rows(
    loaded: LoadedEngine, tables: Sequence[Sequence[int]], group: int, layer: int, committed: int
) -> list[torch.Tensor]:
    """K and V, and their scales, of the committed positions that a group still holds."""
    slots = [
        (tables[group][position // BLOCK], position % BLOCK)
        for position in range(committed)
        if tables[group][position // BLOCK] >= 0
    ]
    blocks, offsets = torch.tensor(slots).unbind(1)
    return [part[layer, blocks, offsets] for part in loaded.storage[group].pages()]
