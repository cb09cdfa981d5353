"""The sampler against transformers' logits processors, its noise against its written definition, its
draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from edgellm.contracts import SamplingParams, SequenceStart
from edgellm.runner import filters
from edgellm.runner.candidates import Candidates
from edgellm.runner.logprobs import raw_logprob, raw_logprobs
from edgellm.runner.noise import gumbel_noise, hash32, places_of_noise, row_key
from edgellm.runner.penalties import LogitAdjuster
from edgellm.runner.sampler import Sampler, SamplerState
from edgellm.runner.token_mask import unpack_masks
from edgellm_models.errors import BadInputError

VOCAB = 600


def random_logits(count: int = 40, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """[count, vocab] f64 of many shapes: flat to peaked, shifted, some with removed tokens. No two are
    equal.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    rows = rows * torch.logspace(-2, 1.3, count).unsqueeze(1) + torch.linspace(-50, 50, count).unsqueeze(1)
    rows[::5, : vocab // 3] = float("-inf")
    return rows


def state_of(sampling: SamplingParams, prompt: tuple[int, ...] = (1,), seed: int = 1) -> SamplerState:
    return SamplerState(SequenceStart(0, prompt, sampling, seed), VOCAB)


def left_of(row: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and scores of what may be drawn. Candidates overwrite what they are given."""
    return Candidates(row.to(torch.float64, copy=True), sampling).left()


def kept_by_us(row: torch.Tensor, sampling: SamplingParams) -> set[int]:
    return set(left_of(row, sampling)[0].tolist())


def kept_by_them(row: torch.Tensor, *warpers: object) -> set[int]:
    scores = row.unsqueeze(0).to(torch.float64)
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)  # type: ignore[operator]
    return set(torch.nonzero(torch.isfinite(scores[0])).squeeze(1).tolist())


@pytest.mark.parametrize("k", [1, 2, 17, 599, 600, 10_000])
def test_top_k(k: int) -> None:
    for row in random_logits():
        assert kept_by_us(row, SamplingParams(top_k=k)) == kept_by_them(row, TopKLogitsWarper(k))


@pytest.mark.parametrize("p", [1e-9, 1e-3, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9])
def test_top_p(p: float) -> None:
    for row in random_logits():
        assert kept_by_us(row, SamplingParams(top_p=p)) == kept_by_them(row, TopPLogitsWarper(p))


@pytest.mark.parametrize("mass", [1e-9, 0.2, 0.5, 0.95, 0.999])
def test_typical_p(mass: float) -> None:
    for row in random_logits():
        assert kept_by_us(row, SamplingParams(typical_p=mass)) == kept_by_them(row, TypicalLogitsWarper(mass))


@pytest.mark.parametrize("share", [1e-12, 0.01, 0.1, 0.7, 1.0])
def test_min_p(share: float) -> None:
    for row in random_logits():
        assert kept_by_us(row, SamplingParams(min_p=share)) == kept_by_them(row, MinPLogitsWarper(share))


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.7, 100.0])
def test_temperature(temperature: float) -> None:
    warper = TemperatureLogitsWarper(temperature)
    for row in random_logits():
        ids, scores = left_of(row, SamplingParams(temperature=temperature))
        theirs = warper(None, row.unsqueeze(0).to(torch.float64))[0]  # type: ignore[arg-type]
        ours = torch.full_like(theirs, float("-inf"))
        ours[ids] = scores
        torch.testing.assert_close(torch.softmax(ours, 0), torch.softmax(theirs, 0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1e3])
def test_repetition_penalty(penalty: float) -> None:
    prompt, answer = (5, 7, 7, 599), (0, 7, 300)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    adjuster = LogitAdjuster(SamplingParams(repetition_penalty=penalty), prompt, VOCAB)
    for token_id in answer:
        adjuster.observe(token_id)
    for row in random_logits().to(torch.float64):
        theirs = processor(torch.tensor([prompt + answer]), row.unsqueeze(0).clone())[0]
        torch.testing.assert_close(adjuster.apply(row), theirs, rtol=1e-12, atol=0)


def test_presence_and_frequency_count_the_answer_only() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    adjuster = LogitAdjuster(sampling, (1, 2, 3), VOCAB)
    for token_id in (3, 9, 9, 9):
        adjuster.observe(token_id)
    row = torch.zeros(VOCAB, dtype=torch.float64)
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[3], expected[9] = -0.5 - 0.25, -0.5 - 3 * 0.25
    assert torch.equal(adjuster.apply(row), expected)


def test_the_whole_chain_in_its_order() -> None:
    """Penalties, bias, temperature, top-k, typical, top-p, min-p, each seeing what the ones before left."""
    sampling = SamplingParams(
        temperature=0.8,
        top_k=200,
        typical_p=0.9,
        top_p=0.8,
        min_p=0.02,
        repetition_penalty=1.3,
        logit_bias={4: 3.0},
    )
    prompt = tuple(range(50))
    warpers = [
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(200),
        TypicalLogitsWarper(0.9),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.02),
    ]
    state = state_of(sampling, prompt)
    for row in random_logits().to(torch.float64):
        theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt]), row.unsqueeze(0).clone())[0]
        theirs[4] += 3.0
        ids, _ = left_of(state.adjuster.apply(row), sampling)
        assert set(ids.tolist()) == kept_by_them(theirs, *warpers)


def test_order_matters_where_we_say_it_does() -> None:
    """top-k before top-p: the nucleus is of what top-k left, not of everything."""
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # After top-k 2 the shares are 4/7 and 3/7: 0.55 is reached by the first alone, of all it takes two.
    ids, _ = left_of(row, SamplingParams(top_k=2, top_p=0.55))
    assert ids.tolist() == [0]
    assert filters.top_p(row.to(torch.float64), 0.55).tolist() == [True, True, False, False]


def test_equal_logits_rank_by_id_and_counts_are_transformers() -> None:
    row = torch.zeros(VOCAB)
    assert kept_by_us(row, SamplingParams(top_k=7)) == set(range(7))
    for p in (1e-9, 0.25, 0.5):
        ours = kept_by_us(row, SamplingParams(top_p=p))
        assert ours == set(range(len(ours)))
        assert (
            abs(len(ours) - len(kept_by_them(row, TopPLogitsWarper(p)))) <= 1
        )  # p x 600 is whole: rounding decides
    assert kept_by_us(row, SamplingParams(min_p=1.0)) == set(range(VOCAB))
    assert kept_by_us(row, SamplingParams(typical_p=0.0999)) == set(range(60))


def test_limits_that_are_off_keep_everything() -> None:
    row = random_logits()[7]
    everything = set(torch.nonzero(torch.isfinite(row)).squeeze(1).tolist())
    assert kept_by_us(row, SamplingParams(top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)) == everything


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300, 1.7e308])
def test_no_temperature_overflows(temperature: float) -> None:
    row = torch.tensor([-1e4, 3.0, 2.0, float("-inf")])
    draw = draw_one(
        row, SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1, typical_p=0.9)
    )
    assert draw in ((1,) if temperature < 1 else (0, 1, 2))


def test_a_nucleus_wider_than_the_head_is_found() -> None:
    """The shortcut over the best few hundred scores changes nothing."""
    row = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * 0.1
    mask = filters.top_p(row.to(torch.float64), 0.7)
    assert int(mask.sum()) > filters._HEAD
    assert set(torch.nonzero(mask).squeeze(1).tolist()) == kept_by_them(row, TopPLogitsWarper(0.7))


@pytest.mark.parametrize("top_p", [1.0, 0.912345])
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_drawing_in_pieces_is_drawing_from_the_whole(spread: float, top_p: float) -> None:
    """Flat logits leave most of a vocabulary of several pieces, peaked ones a few: what is left and what is
    drawn are those of plain arithmetic over all of it."""
    vocab = 80_000
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    order = torch.argsort(logits, descending=True, stable=True)
    before = torch.cumsum(torch.softmax(logits, 0)[order], 0) - torch.softmax(logits, 0)[order]
    kept = order[before < top_p] if top_p < 1 else order
    left = Candidates(logits.clone(), SamplingParams(top_p=top_p))
    for position in range(3):
        key = row_key(1, 0, position)
        noisy = torch.full_like(logits, float("-inf"))
        noisy[kept] = logits[kept] + torch.from_numpy(gumbel_noise(key, kept.numpy()))
        assert left.draw(key) == int(torch.argmax(noisy))
    assert left.left()[0].tolist() == sorted(kept.tolist())


# --- drawing ---


def draw_one(
    row: torch.Tensor, sampling: SamplingParams, seed: int = 1, sample: int = 0, position: int = 5
) -> int:
    sampler = Sampler(row.numel())
    sampler.start(SequenceStart(0, (), sampling, seed, sample))
    return sampler.sample(row.unsqueeze(0), [0], [position])[0].token_id


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    row = torch.zeros(VOCAB)
    row[[40, 77, 500]] = 3.0
    assert draw_one(row, SamplingParams(temperature=0)) == 40
    assert draw_one(row, SamplingParams(temperature=0, logit_bias={40: -1.0})) == 77


def test_noise_is_as_it_is_written_down() -> None:
    """The definition in noise.py, carried out in plain Python integers."""

    def mix64(x: int) -> int:
        x %= 2**64
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % 2**64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def fmix32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    golden = 0x9E3779B97F4A7C15
    ids = np.array([0, 1, 2, 49151, 262143, 2**31 - 1])
    for seed, sample, position in ((0, 0, 0), (1, 0, 7), (2**64 - 1, 3, 32767), (-5, 1, 131071)):
        key = mix64(mix64(mix64(seed + golden) ^ (sample + golden)) ^ (position + golden))
        assert row_key(seed, sample, position) == key
        hashes = [fmix32(fmix32(i ^ (key % 2**32)) ^ (key >> 32)) for i in ids.tolist()]
        assert hash32(key, ids).tolist() == hashes
        expected = [-math.log(-math.log((h + 0.5) / 2**32)) for h in hashes]
        np.testing.assert_allclose(gumbel_noise(key, ids), expected, rtol=1e-12)


@pytest.mark.parametrize("least", [-900.0, -4.0, -1.0, 0.3, 5.0, 9.0, 22.0, 40.0])
def test_ids_of_much_noise_are_found_by_their_hashes(least: float) -> None:
    """None that has it is missing, and hardly another is there."""
    key, ids = row_key(7, 1, 99), np.arange(1000, 101_000)
    noise = gumbel_noise(key, ids)
    found = places_of_noise(key, ids, least)
    assert set(np.flatnonzero(noise >= least).tolist()) <= set(found.tolist())
    assert len(found) <= np.count_nonzero(noise >= least) + 2


@pytest.mark.parametrize("distance", [7.5, 8.5, 30.0])
def test_a_crowd_far_below_the_best_wins_as_often_as_it_should(distance: float) -> None:
    """One token stands above 60,000 others: what is drawn is what noise over all of them says."""
    logits = torch.full((60_000,), -distance, dtype=torch.float64)
    logits[12_345] = 0.0
    crowd = 0
    for position in range(60):
        key = row_key(3, 0, position)
        drawn = Candidates(logits.clone(), SamplingParams()).draw(key)
        assert drawn == int(np.argmax(logits.numpy() + gumbel_noise(key, np.arange(60_000))))
        crowd += drawn != 12_345
    assert {7.5: crowd > 50, 8.5: 40 < crowd < 60, 30.0: crowd == 0}[distance]


def test_noise_depends_on_all_four_and_nothing_else() -> None:
    row = torch.zeros(VOCAB)
    sampling = SamplingParams()
    base = [draw_one(row, sampling, 1, 0, p) for p in range(50)]
    assert base == [draw_one(row, sampling, 1, 0, p) for p in range(50)]
    assert len(set(base)) > 30
    for seed, sample in ((2, 0), (1, 1)):
        other = [draw_one(row, sampling, seed, sample, p) for p in range(50)]
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 5
    torch.manual_seed(99)
    assert base == [draw_one(row, sampling, 1, 0, p) for p in range(50)]


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    rows = random_logits(6)
    settings = [SamplingParams(temperature=t, top_p=0.9) for t in (0, 0.5, 1.0, 1.5, 0, 2.0)]
    sampler = Sampler(VOCAB)
    for i, sampling in enumerate(settings):
        sampler.start(SequenceStart(i, (), sampling, seed=i))
    together = [d.token_id for d in sampler.sample(rows.float(), range(6), [10 + i for i in range(6)])]
    alone = [draw_one(rows[i].float(), settings[i], seed=i, position=10 + i) for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("axis", ["seed", "position", "sample"])
def test_draws_have_the_right_distribution(axis: str) -> None:
    """Chi-square over 20,000 draws with consecutive seeds, positions or samples: a weak hash would show."""
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02], dtype=torch.float64)
    scores = torch.log(probabilities)
    ids = torch.arange(7) * 7001
    count = 20_000
    seen = Counter[int]()
    for i in range(count):
        key = row_key(*{"seed": (i, 0, 5), "position": (1, 0, i), "sample": (1, i, 5)}[axis])
        seen[int(np.argmax(scores.numpy() + gumbel_noise(key, ids.numpy())))] += 1
    chi2 = sum((seen[j] - count * p) ** 2 / (count * p) for j, p in enumerate(probabilities.tolist()))
    assert chi2 < 22.46  # 99.9 % point with 6 degrees of freedom


def test_sampler_draws_from_what_the_filters_left() -> None:
    """Through the whole sampler, temperature and top-k included; positions are the trials."""
    row = torch.log(torch.tensor([0.05, 0.5, 0.1, 0.3, 0.05]))
    sampler = Sampler(5)
    sampler.start(SequenceStart(0, (), SamplingParams(temperature=2.0, top_k=3), 123))
    count = 4000
    seen = Counter(sampler.sample(row.unsqueeze(0), [0], [i])[0].token_id for i in range(count))
    weights = {1: 0.5**0.5, 3: 0.3**0.5, 2: 0.1**0.5}
    total = sum(weights.values())
    chi2 = sum((seen[j] - count * w / total) ** 2 / (count * w / total) for j, w in weights.items())
    assert set(seen) == {1, 2, 3} and chi2 < 13.82  # 99.9 % point with 2 degrees of freedom


def test_mixed_settings_in_one_batch() -> None:
    """F12: temperature 0; temperature 2 with top_k 1; temperature 1 with top_p 1e-9; a bias of +100 on one
    id.
    """
    rows = random_logits(4, seed=5).float() * 3
    settings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, logit_bias={421: 100.0}),
    ]
    sampler = Sampler(VOCAB)
    for i, sampling in enumerate(settings):
        sampler.start(SequenceStart(i, (), sampling, seed=i))
    for position in range(20):
        drawn = [d.token_id for d in sampler.sample(rows, range(4), [position] * 4)]
        assert drawn == [*rows[:3].argmax(1).tolist(), 421]


def test_biases_remove_and_force_whatever_the_logits() -> None:
    row = torch.zeros(VOCAB)
    row[3], row[5] = 1e6, 9e5
    assert draw_one(row, SamplingParams(logit_bias={3: -100.0})) == 5
    assert draw_one(row, SamplingParams(temperature=0, logit_bias={3: -1e9, 5: -100.0})) == 0
    assert draw_one(row, SamplingParams(logit_bias={9: 100.0, 3: 99.0})) == 9
    forced = {draw_one(row, SamplingParams(logit_bias={9: 100.0, 10: 100.0}), position=p) for p in range(30)}
    assert forced == {9, 10}
    with pytest.raises(BadInputError, match="600"):
        LogitAdjuster(SamplingParams(logit_bias={600: 1.0}), (), VOCAB)
    with pytest.raises(BadInputError, match="every"):
        LogitAdjuster(SamplingParams(logit_bias=dict.fromkeys(range(4), -100.0)), (), 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_error_of_their_row(bad: float, temperature: float) -> None:
    """F14: one NaN or infinity anywhere ends that sequence; the others draw as they would alone."""
    rows = random_logits(3, seed=2).float()
    rows[1, 17] = bad
    sampler = Sampler(VOCAB)
    for i in range(3):
        sampler.start(SequenceStart(i, (), SamplingParams(temperature=temperature), seed=i))
    first, broken, last = sampler.sample(rows, range(3), [8, 8, 8])
    assert broken.error is not None and "8" in broken.error and ("NaN" in broken.error)
    sampling = SamplingParams(temperature=temperature)
    assert (first.token_id, last.token_id) == (
        draw_one(rows[0], sampling, seed=0, position=8),
        draw_one(rows[2], sampling, seed=2, position=8),
    )


def test_nothing_left_to_draw_is_an_error() -> None:
    sampler = Sampler(4)
    sampler.start(SequenceStart(0, (), SamplingParams(), 1))
    assert "-inf" in (sampler.sample(torch.full((1, 4), float("-inf")), [0], [1])[0].error or "")
    sampler.start(SequenceStart(1, (), SamplingParams(logit_bias={0: 100.0}), 1))
    row = torch.tensor([[float("-inf"), 1.0, 2.0, 3.0]])
    assert "logit_bias" in (sampler.sample(row, [1], [1])[0].error or "")


def test_logprobs_are_of_the_raw_softmax_and_sorted() -> None:
    row = random_logits()[6].float()
    expected = torch.log_softmax(row.to(torch.float64), 0)
    sampler = Sampler(VOCAB)
    sampling = SamplingParams(temperature=3.0, repetition_penalty=2.0, top_k=50)
    sampler.start(SequenceStart(0, (1, 2), sampling, 1, logprobs=4))
    logprob = sampler.sample(row.unsqueeze(0), [0], [2])[0].logprob
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(expected[logprob.token_id]))
    best = torch.topk(expected, 4)
    assert [i for i, _ in logprob.top] == best.indices.tolist()
    assert [v for _, v in logprob.top] == pytest.approx(best.values.tolist())
    sparse = torch.tensor([0.0, float("-inf"), 0.0, 0.0])
    assert raw_logprob(sparse, 2, 4).top == tuple((i, pytest.approx(-math.log(3))) for i in (0, 2, 3))
    assert raw_logprob(sparse, 2, 0).top == ()


def test_logprobs_of_equal_tokens_are_the_lowest_ids() -> None:
    rows = torch.zeros(3, 40)
    rows[1, [7, 30, 31]] = 1.0
    rows[2, :] = torch.arange(40)
    found = raw_logprobs(rows, [5, 6, 7], 2)
    assert [[i for i, _ in f.top] for f in found] == [[0, 1], [7, 30], [39, 38]]
    assert found == [raw_logprob(row, i, 2) for row, i in zip(rows, (5, 6, 7), strict=True)]


# --- token masks ---


def mask_of(ids: Iterable[int], vocab: int = VOCAB) -> bytes:
    """Packed as contracts.PlannedSequence.token_masks says, bit by bit."""
    mask = bytearray(-(-vocab // 8))
    for token_id in ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 600, 4099])
def test_masks_unpack_bit_by_bit(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    expected = torch.rand(5, vocab, generator=generator) < 0.3
    masks = [mask_of(torch.nonzero(row).squeeze(1).tolist(), vocab) for row in expected]
    assert torch.equal(unpack_masks(masks, vocab), expected)
    assert torch.equal(unpack_masks([m + b"\xff\xff\xff" for m in masks], vocab), expected)
    short = [m[: len(m) // 2] for m in masks]
    expected[:, len(short[0]) * 8 :] = False
    assert torch.equal(unpack_masks(short, vocab), expected)
    assert not unpack_masks([b""], vocab).any()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1.0),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.2, min_p=0.3, typical_p=0.9),
        SamplingParams(temperature=0, logit_bias={3: 50.0, 400: 60.0}),
    ],
)
def test_nothing_outside_the_mask_is_drawn_and_filters_count_only_what_it_allows(
    sampling: SamplingParams,
) -> None:
    """The draw is that from a row in which every forbidden logit is -inf from the start."""
    for index, row in enumerate(random_logits(12, seed=9).float()):
        allowed = sorted({(index * 37 + k * k) % VOCAB for k in range(25)} | {3, 599})
        row[allowed] = row[allowed].clamp(min=-60)
        barred = torch.full_like(row, float("-inf"))
        barred[allowed] = row[allowed]
        sampler = Sampler(VOCAB)
        for i in (0, 1):
            sampler.start(SequenceStart(i, (1, 599), sampling, seed=index))
        masks = [mask_of(allowed), None]
        for position in range(3, 8):
            masked, expected = sampler.sample(torch.stack([row, barred]), [0, 1], [position] * 2, masks)
            assert masked.token_id == expected.token_id in allowed


def test_masked_and_free_rows_in_one_batch() -> None:
    """F12 with constraints: each row obeys its own mask and no other, in one batch as alone."""
    rows = random_logits(6, seed=4).float()
    rows[5, 100] = float("nan")
    settings = [SamplingParams(temperature=t) for t in (0, 0, 0, 1.0, 1.0, 0)]
    masks = [None, mask_of([17]), mask_of(range(250, 300)), mask_of([590, 7]), None, mask_of([3])]
    sampler = Sampler(VOCAB)
    for i, sampling in enumerate(settings):
        sampler.start(SequenceStart(i, (), sampling, seed=i, logprobs=2))
    draws = sampler.sample(rows, range(6), [9] * 6, masks)
    assert [d.token_id for d in draws[:3]] == [
        int(rows[0].argmax()),
        17,
        250 + int(rows[2, 250:300].argmax()),
    ]
    assert draws[3].token_id in (590, 7)
    assert draws[4].token_id == draw_one(rows[4], settings[4], seed=4, position=9)
    assert draws[5].error is not None and "NaN" in draws[5].error
    for row, draw in zip(rows[:5], draws[:5], strict=True):  # the mask does not reach the logprobs
        assert draw.logprob == raw_logprob(row, draw.token_id, 2)


def test_a_mask_that_leaves_nothing_is_an_error_of_its_row() -> None:
    rows = torch.zeros(4, 8)
    rows[2, 1] = float("-inf")
    sampler = Sampler(8)
    settings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={2: 100.0}),
    ]
    for i, sampling in enumerate(settings):
        sampler.start(SequenceStart(i, (), sampling, seed=i))
    masks = [mask_of([], 8), mask_of([], 8), mask_of([1], 8), mask_of([5], 8)]
    for draw in sampler.sample(rows, range(4), [6] * 4, masks):
        assert draw.error is not None and "constraint" in draw.error and "6" in draw.error


# --- prompt logprobs ---


def test_prompt_tokens_are_scored_over_chunks() -> None:
    prompt = (4, 9, 300, 2, 77)
    rows = random_logits(5, seed=6).float()
    sampler = Sampler(VOCAB)
    sampler.start(SequenceStart(0, prompt, SamplingParams(), 1, prompt_logprobs=3))
    first, error = sampler.score_prompt(rows[:2], 0, 0)
    second, other = sampler.score_prompt(rows[2:], 0, 2)
    assert error is None and other is None
    assert first + second == tuple(
        raw_logprob(row, i, 3) for row, i in zip(rows[:4], prompt[1:], strict=True)
    )
    assert sampler.score_prompt(rows, 0, 4) == ((), None)
    broken = rows.clone()
    broken[1, 5] = float("inf")
    assert "2" in (sampler.score_prompt(broken, 0, 0)[1] or "")
    sampler.start(SequenceStart(1, prompt, SamplingParams(), 1))
    assert sampler.score_prompt(rows, 1, 0) == ((), None)


def test_an_ended_sequence_is_forgotten() -> None:
    sampler = Sampler(4)
    sampler.start(SequenceStart(3, (), SamplingParams(), 1))
    sampler.end(3)
    sampler.end(3)
    with pytest.raises(KeyError):
        sampler.sample(torch.zeros(1, 4), [3], [0])
