"""Sums of perplexity and KL divergence against f64 arithmetic over whole distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edgellm.evaluate.evaluation import summarize
from edgellm.evaluate.measures import Divergence, Perplexity, encode_rows, kl_rows
from edgellm_models.errors import EngineError

ROWS, VOCAB = 37, 900


def logits(seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale + 7


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_perplexity_and_its_error_in_pieces() -> None:
    rows, targets = logits(0), torch.arange(ROWS) * 5
    nll = -rows.double().log_softmax(-1)[torch.arange(ROWS), targets].numpy()
    found = Perplexity()
    for start, end in ((0, 1), (1, 20), (20, ROWS)):
        found.add(rows[start:end], targets[start:end])
    assert found.count == ROWS
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    # The error of a mean, carried through exp: std(ddof=1) / sqrt(n).
    error = nll.std(ddof=1) / math.sqrt(ROWS)
    assert found.stderr == pytest.approx(found.perplexity * error, rel=1e-6)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-7), (1e-3, 1e-7), (0.05, 1e-5), (2.0, 1e-3)])
def test_kl_is_that_of_whole_f64_distributions(noise: float, tolerance: float) -> None:
    """From equal models, whose KL is the noise of the codes and no more, to models of nothing in common."""
    p = logits(1)
    q = p + noise * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) + 100.0
    found = kl_rows(encode_rows(p).codes, q)
    assert np.abs(found - exact_kl(p, q).numpy()).max() < tolerance


def test_codes_hold_logits_to_a_quarter_of_a_thousandth_and_drop_only_what_is_nothing() -> None:
    p = logits(3, scale=20.0)
    codes = encode_rows(p).codes.astype(np.float64)
    below = (p.max(-1, keepdim=True).values - p).double().numpy()
    near = below < 31.99
    assert np.abs(codes / 2048 - below)[near].max() <= 1 / 4096 + 1e-5
    assert (codes[below > 32.01] == 65535).all() and (below > 32.01).any()


def test_divergence_summarizes_rows_and_counts_equal_best_tokens() -> None:
    p, q = logits(4), logits(5)
    q[: ROWS - 10] = p[: ROWS - 10]
    divergence = Divergence()
    reference = encode_rows(p)
    divergence.add(q, reference)
    found, exact = summarize(divergence), exact_kl(p, q).numpy()
    assert found.mean_kld == pytest.approx(exact.mean(), rel=1e-5)
    assert found.mean_kld_stderr == pytest.approx(exact.std(ddof=1) / math.sqrt(ROWS), rel=1e-5)
    assert found.median_kld == pytest.approx(0.0, abs=1e-7)
    assert found.p99_kld == pytest.approx(np.quantile(exact, 0.99), rel=1e-4)
    assert found.max_kld == pytest.approx(exact.max(), rel=1e-4)
    same = (p.argmax(-1) == q.argmax(-1)).sum().item()
    assert ROWS - 10 <= same < ROWS and found.top1_agreement == same / ROWS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_an_error_not_a_mean(bad: float) -> None:
    rows = logits(6)
    rows[20, 3] = bad
    with pytest.raises(EngineError, match="not all finite"):
        Perplexity().add(rows, torch.zeros(ROWS, dtype=torch.int64))
    with pytest.raises(EngineError, match="not all finite"):
        encode_rows(rows)
