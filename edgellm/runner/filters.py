"""Filters of the sampler: each says which candidates stay, as transformers' warpers of the same name do.

Scores are logits over the temperature, [n] f64, finite, in order of token id; softmax of them is the
distribution that the filter sees, so every filter looks at what the filters before it left. The result is a
boolean mask [n].

Edges, the same for all: the token that crosses a limit stays; at least one stays; where equal scores straddle
the cut the lowest ids stay (transformers' top-k and typical keep all of them, its top-p whatever its sort
puts first); a limit that is off (top_k 0 or no fewer than there are candidates, top_p and typical_p 1, min_p
0) keeps everything.
"""

from __future__ import annotations

import math

import torch

_HEAD = 256
"""Most nuclei are small: this many best scores are looked at before everything is sorted."""


def keep_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the ``count`` largest scores; of equal ones the first."""
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    last = torch.topk(scores, count).values[-1]
    above = scores > last
    ties = scores == last
    room = count - above.sum()
    return above | (ties & (torch.cumsum(ties, 0) <= room))


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k most likely. 0 is off."""
    return keep_best(scores, k if k > 0 else scores.numel())


def top_p(scores: torch.Tensor, p: float, log_total: torch.Tensor | None = None) -> torch.Tensor:
    """The fewest most likely tokens whose probabilities reach p (arXiv 1904.09751). 1 is off.

    ``log_total`` is the logsumexp that makes scores probabilities, where ``scores`` are only the best of all.
    """
    if p >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    if log_total is None:
        log_total = torch.logsumexp(scores, 0)
    size = min(_HEAD, scores.numel())
    while True:
        best = torch.topk(scores, size).values
        reached = torch.cumsum(torch.exp(best - log_total), 0)
        if size == scores.numel() or reached[-1] >= p:
            return keep_best(scores, _count_until(reached, p))
        size = scores.numel()


def typical(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Tokens of information nearest to the entropy, until they reach ``mass`` (arXiv 2202.00666). 1 is
    off.
    """
    if mass >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    log_p = torch.log_softmax(scores, 0)
    p = torch.exp(log_p)
    entropy = -(p * log_p).sum()
    distance = torch.abs(-log_p - entropy)
    order = torch.sort(distance, stable=True).indices
    return keep_best(-distance, _count_until(torch.cumsum(p[order], 0), mass))


def min_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Tokens of at least ``share`` of the best one's probability (arXiv 2407.01082). 0 is off."""
    if share <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= scores.max() + math.log(share)


def _count_until(reached: torch.Tensor, limit: float) -> int:
    """How many leading tokens stay: those before which the limit was not reached, at least the first."""
    return 1 + int((reached[:-1] < limit).sum())
