"""Draws many rows at once where the logits lie: the same ids as the sampler's row by row, without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from edgellm.runner.noise import row_key
from edgellm_kernels.batch import sent
from edgellm_kernels.ops import DrawTables, draw_rows

if TYPE_CHECKING:
    from edgellm.runner.sampler import SamplerState

_M32 = 0xFFFFFFFF


def can_draw(state: SamplerState) -> bool:
    """Whether a sequence's rows are drawn by noise and a cut of the scores alone: no penalties, biases or
    typical-p. (A constraint's mask, too, is for the sampler.)"""
    return state.adjuster.is_idle and state.sampling.temperature > 0 and state.sampling.typical_p >= 1


def draw_many(
    logits: torch.Tensor, rows: Sequence[int], states: Sequence[SamplerState], positions: Sequence[int]
) -> torch.Tensor:
    """The ids int64 [rows] drawn from ``rows`` of the logits [all rows, vocab] f32, on their device: nothing
    waits for it. Of no sense where a row's largest element is not finite.

    ``positions``: of the drawn tokens.
    """
    device = logits.device
    everything = list(rows) == list(range(logits.shape[0]))
    chosen = logits if everything else logits.index_select(0, sent(torch.tensor(list(rows)), device))
    keys = [row_key(state.seed, state.sample, at) for state, at in zip(states, positions, strict=True)]
    cuts = torch.full((len(rows),), float("-inf"), dtype=torch.float64, device=device)
    last_ids = torch.full((len(rows),), logits.shape[1], dtype=torch.int64, device=device)
    for index, state in enumerate(states):
        found = _cut(chosen[index], state)
        if found is not None:
            cuts[index], last_ids[index] = found
    tables = DrawTables(
        temperatures=sent(
            torch.tensor([state.sampling.temperature for state in states], dtype=torch.float64), device
        ),
        keys=sent(torch.tensor([[key & _M32, key >> 32] for key in keys], dtype=torch.int64), device),
        cuts=cuts,
        last_ids=last_ids,
    )
    return draw_rows(chosen, tables)[0]


def _cut(logits: torch.Tensor, state: SamplerState) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The score below which top-k, min-p and top-p leave nothing, and the last id that may equal it: 0-d
    tensors on the device; None where nothing is filtered. As sampler.candidates has it.
    """
    sampling, n = state.sampling, logits.shape[0]
    limited = 0 < sampling.top_k < n
    if not limited and sampling.top_p >= 1 and sampling.min_p <= 0:
        return None
    scores = (logits.double() - logits.max().double()) / sampling.temperature
    cut = torch.full((), float("-inf"), dtype=torch.float64, device=logits.device)
    last = torch.full((), n, dtype=torch.int64, device=logits.device)
    if limited:
        cut, last = _best(scores, torch.topk(scores, sampling.top_k).values, sampling.top_k)
    if sampling.top_p >= 1:
        if sampling.min_p > 0:
            share = math.log(sampling.min_p)
            last = torch.where(cut < share, n, last)
            cut = cut.clamp_min(share)
        return cut, last
    ids = torch.arange(n, device=logits.device)
    kept = (scores > cut) | ((scores == cut) & (ids <= last))
    scores = torch.where(kept & torch.isfinite(scores), scores, float("-inf"))
    log_total = torch.logsumexp(scores, 0)
    if sampling.min_p > 0:
        scores = torch.where(scores >= math.log(sampling.min_p), scores, float("-inf"))
    best = torch.topk(scores, sampling.top_k).values if limited else scores.sort(descending=True).values
    reached = torch.cumsum(torch.exp(best - log_total), 0)
    # What was filtered before the nucleus is -inf and adds nothing: it is never needed to reach top_p, unless
    # nothing reaches it; then all that is finite stays.
    count = 1 + (reached[:-1] < sampling.top_p).sum()
    # At least one: nothing of a row of NaN is finite, and a place before the first is a fault of the device.
    count = torch.minimum(count, torch.isfinite(best).sum()).clamp_min(1)
    return _best(scores, best, count)


def _best(
    scores: torch.Tensor, ranked: torch.Tensor, count: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cut that leaves the ``count`` best, of equal scores the first. ranked: the largest, in order."""
    at = torch.as_tensor(count, device=scores.device) - 1
    cut = ranked.index_select(0, at.view(1))[0]
    ties = scores == cut
    room = count - (scores > cut).sum()
    last = (torch.cumsum(ties, 0) >= room).to(torch.uint8).argmax()
    return cut, last
