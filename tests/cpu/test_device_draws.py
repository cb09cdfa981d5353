"""Rows drawn together where the logits lie get the ids that the sampler draws row by row."""

from __future__ import annotations

import random

import pytest
import torch

from edgellm.contracts import SamplingParams, SequenceStart
from edgellm.runner.sampler import Sampler
from edgellm.speculative.acceptance import COUPLED, REJECTION

VOCAB = 701


def settings(count: int) -> list[SamplingParams]:
    """All filters alone and together, and what only the row-by-row way does."""
    random_ = random.Random(3)
    made = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, typical_p=0.8),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=2.0, top_p=1e-9),
    ]
    while len(made) < count:
        made.append(
            SamplingParams(
                temperature=random_.choice((0.3, 0.7, 1.0, 1.9)),
                top_k=random_.choice((0, 0, 2, 40, 5000)),
                top_p=random_.choice((1.0, 0.95, 0.5)),
                min_p=random_.choice((0.0, 0.0, 0.05, 1.0)),
            )
        )
    return made


def samplers(params: list[SamplingParams], rule: str = COUPLED) -> list[Sampler]:
    made = []
    for on_device in (True, False):
        sampler = Sampler(VOCAB, spec_rule=rule, on_device=on_device)
        for index, sampling in enumerate(params):
            sampler.start(SequenceStart(index, (1, 2, 3), sampling, seed=index * 2**40 - 5, sample=index % 3))
        made.append(sampler)
    return made


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_ids_as_row_by_row(ties: bool) -> None:
    """Smooth rows, and rows of few values, where the filters cut among equals."""
    torch.manual_seed(1)
    params = settings(60)
    there, here = samplers(params)
    for position in range(6):
        logits = torch.randn(len(params), VOCAB) * 3
        if ties:
            logits = logits.round() / 2
        logits[5, : VOCAB - 3] = float("-inf")
        logits[7, 9], logits[8, 3] = float("nan"), float("inf")
        ids, positions = list(range(len(params))), [position + i for i in range(len(params))]
        ours = there.sample(logits, ids, positions)
        theirs = here.sample(logits, ids, positions)
        assert [draw.token_id for draw in ours] == [draw.token_id for draw in theirs]
        assert [draw.error for draw in ours] == [draw.error for draw in theirs]
        assert ours[7].error is not None and ours[8].error is not None
        assert len({draw.token_id for draw in ours}) > 20


@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
def test_drafts_and_masks(rule: str) -> None:
    """Rows behind drafted tokens get the noise of their own positions; a masked row obeys its mask."""
    torch.manual_seed(2)
    params = settings(12)
    there, here = samplers(params, rule)
    logits = torch.randn(len(params) * 3, VOCAB) * 0.5
    drafts = [(5, 6)] * len(params)
    # Each first drafted token is nearly certain, so that second rows are drawn from too.
    logits[::3, 5] += 30.0
    mask = bytes([255] * 3)
    masks = [mask if row % 5 == 0 else None for row in range(len(logits))]
    found = [
        sampler.verify(logits, list(range(len(params))), [100] * len(params), drafts, masks)
        for sampler in (there, here)
    ]
    assert found[0] == found[1]
    assert {len(run) for run in found[0]} >= {2}
