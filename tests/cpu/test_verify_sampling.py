"""Verification in the sampler: equal to drawing one by one, and exact under both rules."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from edgellm.contracts import SamplingParams, SequenceStart
from edgellm.runner.sampler import Draw, Sampler
from edgellm.speculative.acceptance import COUPLED, REJECTION, num_kept

VOCAB = 24
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=1.5, frequency_penalty=1.0),
    SamplingParams(temperature=0.9, typical_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0, 5: -100.0}),
)


def one_by_one(
    rows: torch.Tensor, start: SequenceStart, draft: Sequence[int], masks: Sequence[bytes | None]
) -> list[Draw]:
    """What plain decoding draws from these rows, as long as they are the right ones."""
    sampler = Sampler(VOCAB)
    sampler.start(start)
    draws: list[Draw] = []
    for index in range(len(draft) + 1):
        [draw] = sampler.sample(rows[index : index + 1], [start.sequence_id], [7 + index], [masks[index]])
        if draw.error is not None and draws:
            break
        draws.append(draw)
        if index == len(draft) or draw.token_id != draft[index]:
            break
    return draws


def random_mask(rng: random.Random) -> bytes | None:
    if rng.random() < 0.6:
        return None
    return bytes(rng.choice((0xFF, 0x3C, 0x81)) for _ in range(VOCAB // 8))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_verification_draws_what_plain_decoding_draws(sampling: SamplingParams) -> None:
    """Over seeds, masks, broken rows and drafts that are right for a while; several sequences at once."""
    rng = random.Random(1)
    total = 0
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        sampler = Sampler(VOCAB)
        blocks, starts, drafts, masks, expected = [], [], [], [], []
        for sequence_id in range(3):
            length = rng.randint(0, 5)
            rows = torch.randn(length + 1, VOCAB, generator=generator) * 2
            if rng.random() < 0.2:
                rows[rng.randint(0, length), 4] = float("nan")
            start = SequenceStart(
                sequence_id, (1, 2, 3), sampling, seed, sequence_id, logprobs=rng.choice((None, 0, 2))
            )
            own = [random_mask(rng) for _ in range(length + 1)]
            # Mostly what plain decoding draws: found token by token.
            draft: list[int] = []
            for _ in range(length):
                drawn = one_by_one(rows, start, [*draft, 0], own)
                right = drawn[-1].token_id if len(drawn) == len(draft) + 1 else 0
                draft.append(right if rng.random() < 0.8 and right >= 0 else rng.randrange(VOCAB))
            sampler.start(start)
            blocks.append(rows)
            starts.append(start)
            drafts.append(draft)
            masks += own
            expected.append(one_by_one(rows, start, draft, own))
        ids = [start.sequence_id for start in starts]
        found = sampler.verify(torch.cat(blocks), ids, [7] * 3, drafts, masks)
        assert found == expected
        total += sum(num_kept(d, [one.token_id for one in f]) for d, f in zip(drafts, found, strict=True))
    assert total > 20


@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
def test_both_rules_draw_from_the_target(rule: str) -> None:
    """Pairs of tokens from rows of (.5, .3, .2) and, behind a drafted 1, (.1, .7, .2): chi-square, with a
    draft that is there or not by what came before. A drafted token is kept as often as it is likely."""
    first, second = (0.5, 0.3, 0.2), (0.1, 0.7, 0.2)
    rows = torch.log(torch.tensor([first, second, first]))
    sampler = Sampler(3, spec_rule=rule)
    draws, kept = 2000, 0
    seen: Counter[tuple[int, int]] = Counter()
    plain_too = True
    for seed in range(draws):
        start = SequenceStart(seed, (0,), SamplingParams(), seed)
        sampler.start(start)
        draft = (1, 1) if seed % 3 else (1,)
        [run] = sampler.verify(rows[: len(draft) + 1], [seed], [4], [draft])
        tokens = [one.token_id for one in run]
        kept += tokens[0] == 1
        if len(tokens) == 1:  # the second of a pair from its own row, drawn plainly
            [draw] = sampler.sample(rows[:1], [seed], [5])
            tokens.append(draw.token_id)
        seen[tokens[0], tokens[1]] += 1
        plain = Sampler(3)
        plain.start(start)
        plain_too &= plain.sample(rows[:1], [seed], [4])[0].token_id == tokens[0]
        sampler.end(seed)
    assert kept / draws == pytest.approx(0.3, abs=0.035)
    chi = 0.0
    for a, b in itertools.product(range(3), repeat=2):
        expected = draws * first[a] * (second if a == 1 else first)[b]
        chi += (seen[a, b] - expected) ** 2 / expected
    assert chi < 26.1  # 8 degrees of freedom, 99.9%
    assert plain_too == (rule == COUPLED)


def test_rejection_is_greedy_at_temperature_zero_and_keeps_to_the_filters() -> None:
    rows = torch.log(torch.tensor([[0.5, 0.3, 0.2]] * 2))
    sampler = Sampler(3, spec_rule=REJECTION)
    sampler.start(SequenceStart(1, (0,), SamplingParams(temperature=0.0), 1))
    assert [d.token_id for d in sampler.verify(rows, [1], [4], [(1,)])[0]] == [0]
    for seed in range(200):  # top-k 2 leaves 0 and 1: a drafted 2 is never kept
        sampler.start(SequenceStart(seed, (0,), replace(SamplingParams(), top_k=2), seed))
        [run] = sampler.verify(rows, [seed], [4], [(2,)])
        assert len(run) == 1 and run[0].token_id in (0, 1)
        assert run[0].error is None and not math.isnan(run[0].token_id)
