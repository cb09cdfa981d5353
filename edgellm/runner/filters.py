"""Filters of the sampler: each says which candidates stay, as transformers' warpers of the same name do.

Scores are logits over the temperature, [n] f64, in order of token id; softmax of them is the distribution
that the filter sees, so every filter looks at what the filters before it left: a token that was removed may
still stand there with -inf (but for ``typical``), and whatever a mask says of it has no meaning. The result
is a boolean mask [n].

Edges, the same for all: the token that crosses a limit stays; at least one stays; where equal scores straddle
the cut the lowest ids stay (transformers' top-k and typical keep all of them, its top-p whatever its sort
puts first); a limit that is off (top_k 0 or no fewer than there are candidates, top_p and typical_p 1, min_p
0) keeps everything.

Beside masks a filter holds one sorted or partly sorted copy of the scores: torch's topk would take two, and
ids that nobody reads (``typical`` needs the order itself, and takes three).
"""

from __future__ import annotations

import math

import numpy as np
import torch

_HEAD = 256
"""Most nuclei are small: this many best scores are looked at before everything is sorted."""
_PIECE = 1 << 13
"""Scores whose probabilities are held at once."""


def log_total(scores: torch.Tensor) -> torch.Tensor:
    """logsumexp of all scores, in pieces."""
    best = scores.max()
    total = torch.zeros((), dtype=scores.dtype)
    for piece in torch.split(scores, _PIECE):
        total += torch.exp(piece - best).sum()
    return total.log_().add_(best)


def count_true(mask: torch.Tensor) -> int:
    """torch's sum would widen the mask to eight bytes an entry first."""
    return int(np.count_nonzero(mask.numpy()))


def keep_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the ``count`` largest scores; of equal ones the first."""
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    first = scores.numel() - count
    return _from(scores, float(np.partition(scores.numpy(), first)[first]), count)


def _from(scores: torch.Tensor, last: float, count: int) -> torch.Tensor:
    """Mask of the ``count`` largest scores, of which ``last`` is the least."""
    keep = scores >= last
    excess = count_true(keep) - count
    if excess > 0:
        ties = torch.nonzero(scores == last).squeeze(1)
        keep[ties[ties.numel() - excess :]] = False
    return keep


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k most likely. 0 is off."""
    return keep_best(scores, k if k > 0 else scores.numel())


def top_p(scores: torch.Tensor, p: float, total: torch.Tensor | None = None) -> torch.Tensor:
    """The fewest most likely tokens whose probabilities reach p (arXiv 1904.09751). 1 is off.

    ``total`` is the log_total that makes scores probabilities, where ``scores`` are only the best of all.
    """
    if p >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    if total is None:
        total = log_total(scores)
    work = scores.numpy().copy()
    if len(work) > _HEAD:
        work.partition(len(work) - _HEAD)
        best = np.sort(work[-_HEAD:])
        count = _count_until(best, total, p)
        if count is not None:
            del work
            return _from(scores, float(best[-count]), count)
    work.sort()
    count = _count_until(work, total, p) or len(work)
    last = float(work[-count])
    del work
    return _from(scores, last, count)


def typical(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Tokens of information nearest to the entropy, until they reach ``mass`` (arXiv 2202.00666). 1 is
    off. All scores are finite.
    """
    if mass >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    log_p = scores - log_total(scores)
    entropy = 0.0
    for piece in torch.split(log_p, _PIECE):
        entropy -= float((torch.exp(piece) * piece).sum())
    distance = log_p.add_(entropy).abs_()
    order = torch.from_numpy(np.argsort(distance.numpy(), kind="stable"))
    total, carry, count = log_total(scores), 0.0, 0
    for places in torch.split(order, _PIECE):
        below, carry = _below(torch.exp(scores[places] - total), carry, mass)
        count += below
        if below < places.numel():
            break
    del order
    return keep_best(distance.neg_(), min(count + 1, scores.numel()))


def min_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Tokens of at least ``share`` of the best one's probability (arXiv 2407.01082). 0 is off."""
    if share <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= scores.max() + math.log(share)


def _count_until(ascending: np.ndarray, total: torch.Tensor, limit: float) -> int | None:
    """How many of the best scores stay: those before which the limit was not reached, at least the first;
    None where they all together do not reach it."""
    carry, count = 0.0, 0
    for end in range(len(ascending), 0, -_PIECE):
        piece = torch.from_numpy(ascending[max(0, end - _PIECE) : end][::-1].copy())
        below, carry = _below(torch.exp(piece.sub_(total)), carry, limit)
        count += below
        if below < piece.numel():
            return count + 1
    return None


def _below(p: torch.Tensor, carry: float, limit: float) -> tuple[int, float]:
    """How many running sums of ``p`` from ``carry`` on do not reach the limit, and the last sum. In order,
    so that pieces give the bits of the whole."""
    p[0] += carry
    reached = torch.cumsum(p, 0)
    return int((reached < limit).sum()), float(reached[-1])
