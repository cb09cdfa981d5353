"""AWQ: factors for the channels of a linear's input that make rounding cost less, by the output's error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm_quantize.grids import Grid
from edgellm_quantize.rounding import importance_of, round_nearest

if TYPE_CHECKING:
    import torch

_WIDEST = 64.0
"""Factors lie in [1 / 64, 64]: f16 scales of the layer before, which are divided by them, stay in range."""
_MOST_ROWS = 384
"""Rows on which factors are compared, evenly taken from all: a factor serves a column, so a sample of its
weights shows its worth, and the search costs less than the rounding."""


@dataclass(frozen=True)
class ScaleSearch:
    """What the search found."""

    scales: torch.Tensor
    """f32 [channels]: the weights' columns are multiplied by these; ones where nothing was better."""
    error: float
    """tr(E H E^T) of rounding the rows that were looked at to nearest, with these factors ..."""
    identity_error: float
    """... and without any."""


def search_scales(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    grid: Grid,
    *,
    ratios: int = 20,
    share: tuple[int, int] = (1, 1),
) -> ScaleSearch:
    """Factors s for the columns of ``weights`` [N, K] each, which share an input with ``hessian`` [K, K].

    Tried are s = a^r and a^r / w^(1 - r) with r from 0 to 1 (AWQ, arXiv 2306.00978), where a is the size of
    the input's channels and w that of the weights' columns within their groups, and the identity, which
    neither contains; then smaller steps of r around the best. The loss is the output error of rounding
    (W s) and dividing by s again.

    ``share`` (heads, kv_heads) makes query heads that read the same value head share its factors: the result
    has K * kv_heads / heads channels.
    """
    import torch

    columns = weights[0].shape[1]
    heads, kv_heads = share
    dim, repeat = columns // heads, heads // kv_heads

    def reduced(values: torch.Tensor) -> torch.Tensor:
        return values.view(kv_heads, repeat, dim).mean(1).flatten()

    def expanded(values: torch.Tensor) -> torch.Tensor:
        return values.view(kv_heads, 1, dim).expand(-1, repeat, -1).reshape(-1)

    joined = torch.cat([part.float() for part in weights])
    weights = [joined[:: max(1, -(-len(joined) // _MOST_ROWS))]]
    diagonal = hessian.diagonal()
    activation = reduced(importance_of(diagonal)).sqrt()
    weight = reduced(_column_size(weights, grid.span(columns)))

    def loss(scales: torch.Tensor) -> float:
        wide = expanded(scales)
        inner = importance_of(diagonal / wide.square())
        total = 0.0
        for part in weights:
            scaled = part.float() * wide
            error = (scaled - round_nearest(scaled, grid, inner, 0).values) / wide
            total += float(((error @ hessian) * error).sum())
        return total

    ones = torch.ones_like(activation)
    identity = loss(ones)
    best, best_error, found = ones, identity, None
    for candidate, scales in _candidates(activation, weight, [i / ratios for i in range(ratios + 1)]):
        error = loss(scales)
        if error < best_error:
            best, best_error, found = scales, error, candidate
    for fraction in (0.5, 0.25):
        if found is None:
            break
        make, ratio = found
        for near in (ratio - fraction / ratios, ratio + fraction / ratios):
            scales = _bounded(make(min(max(near, 0.0), 1.0)))
            error = loss(scales)
            if error < best_error:
                best, best_error, found = scales, error, (make, near)
    return ScaleSearch(best, best_error, identity)


_Made = tuple[Callable[[float], "torch.Tensor"], float]


def _candidates(
    activation: torch.Tensor, weight: torch.Tensor, ratios: Sequence[float]
) -> Iterator[tuple[_Made, torch.Tensor]]:
    """Both kinds of factors for every ratio, with what made them."""

    def alone(ratio: float) -> torch.Tensor:
        return activation**ratio

    def both(ratio: float) -> torch.Tensor:
        scales: torch.Tensor = activation**ratio / weight ** (1 - ratio)
        return scales

    for ratio in ratios:
        if ratio > 0:
            yield (alone, ratio), _bounded(alone(ratio))
        yield (both, ratio), _bounded(both(ratio))


def _bounded(scales: torch.Tensor) -> torch.Tensor:
    """Centred on 1 and kept in range; a channel of zeros gets a finite factor like any other."""
    scales = scales.clamp(1e-6, 1e6)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return scales.clamp(1 / _WIDEST, _WIDEST)


def _column_size(weights: Sequence[torch.Tensor], span: int) -> torch.Tensor:
    """Mean |w| of each column over its group's largest, over all rows: [K], positive."""
    import torch

    total = torch.zeros(weights[0].shape[1])
    rows = 0
    for weight in weights:
        grouped = weight.float().abs().view(len(weight), -1, span)
        peak = grouped.amax(-1, keepdim=True).clamp(min=1e-12)
        total += (grouped / peak).sum(0).flatten()
        rows += len(weight)
    return (total / rows).clamp(min=1e-4)
