"""Rounding a matrix to a grid: to nearest, or with GPTQ's error feedback. Pure functions of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm_models.errors import Notice
from edgellm_quantize.grids import Fit, Grid, within_reach

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight
    from edgellm_quantize.recipe import QuantizedLinear

_STRIP = 32
"""Columns whose errors are fed back one by one; those behind the strip get them in one product."""
_DOUBLE_LIMIT = 4096
"""Up to this many inputs the Hessian is factored in f64."""
_DAMPING_STEPS = 12
_SUMMED = 1 << 18
"""Values that are squared at once."""
_LEAST_IMPORTANCE = 1e-4
"""Share of the mean below which no input's importance falls: calibration has not seen all there is."""


@dataclass(frozen=True)
class RoundingOptions:
    """How codes are chosen."""

    candidates: int = 60
    """Scales that are tried per group; 0 takes the format's usual ones."""
    damping: float = 0.05
    """Share of the mean diagonal that is added to the Hessian's; doubled until it can be factored."""
    ordered: bool = True
    """Columns run by falling diagonal within each span, and spans by their largest: g_idx stays trivial."""
    descent_passes: int = 0
    """Passes of coordinate descent over scales and codes after error feedback."""


@dataclass(frozen=True)
class Rounded:
    """A rounded matrix."""

    weight: QuantizedLinear | BlockQuantWeight
    values: torch.Tensor
    """f32 [N, K]: what the codes stand for."""
    method: str
    """rtn or gptq."""
    notices: tuple[Notice, ...] = ()


def importance_of(diagonal: torch.Tensor) -> torch.Tensor:
    """Weights of the columns in a search: the diagonal [K] over its mean, floored to a share of that."""
    mean = diagonal.mean()
    if not bool(mean > 0):
        return diagonal.new_ones(diagonal.shape)
    return (diagonal / mean).clamp(min=_LEAST_IMPORTANCE)


def round_nearest(
    weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None = None, candidates: int = 60
) -> Rounded:
    """Every weight of [N, K] to the nearest value of its span's grid, fitted with ``importance`` [K]."""
    import torch

    weight, _ = within_reach(weight, grid)
    columns = weight.shape[1]
    span = grid.span(columns)
    fits, codes = [], torch.empty_like(weight, dtype=torch.float32)
    values = torch.empty_like(codes)
    for start in range(0, columns, span):
        part = weight[:, start : start + span].float().t().contiguous()
        weights = None if importance is None else importance[start : start + span]
        fit = grid.fit(part, weights, candidates)
        chosen = fit.codes(part)
        codes[:, start : start + span] = chosen.t()
        values[:, start : start + span] = fit.decode(chosen).t()
        fits.append(fit)
    return Rounded(grid.assemble(fits, codes), values, "rtn")


@dataclass(frozen=True)
class Factor:
    """The upper Cholesky factor U of the inverse of a damped Hessian, whose columns are in ``order``."""

    upper: torch.Tensor
    """f32 [K, K]: inverse(H) = U^T U"""
    order: torch.Tensor
    """int64 [K]: the column of the matrix that runs i-th."""
    damping: float
    """The share that was needed in the end."""


def factor_hessian(hessian: torch.Tensor, damping: float, order: torch.Tensor) -> Factor | None:
    """Factor H + damping * mean(diag H), columns permuted by ``order``; None where no damping up to 1 helps.

    Inputs that calibration never saw (a zero on the diagonal) get the damping alone, so they neither break
    the factorization nor feed back errors. U comes from one Cholesky of the reversed matrix: with J the
    reversal, J H J = L L^T gives H = (J L J)(J L J)^T, and U = (J L J)^-1 is upper triangular.
    """
    import torch

    size = len(hessian)
    dtype = torch.float64 if size <= _DOUBLE_LIMIT else torch.float32
    reverse = order.flip(0)
    mean = float(hessian.diagonal().to(dtype).mean())
    # A sum shows a NaN or an infinity without a mask as large as the matrix.
    if not mean > 0 or not math.isfinite(float(hessian.sum(dtype=torch.float64))):
        return None
    share = damping
    for _ in range(_DAMPING_STEPS):
        lower = _cholesky_in_place(_damped(hessian[reverse][:, reverse].to(dtype), share * mean))
        if lower is not None:
            inverse = torch.eye(size, dtype=dtype)
            torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
            del lower
            upper = inverse.flip(0, 1).float().contiguous()
            if bool(torch.isfinite(upper).all()):
                return Factor(upper, order, share)
        if share >= 1:
            return None
        share = min(1.0, 2 * share)
    return None


def _damped(matrix: torch.Tensor, added: float) -> torch.Tensor:
    """The symmetric matrix itself with ``added`` on its diagonal."""
    matrix.diagonal().add_(added)
    return matrix


def _cholesky_in_place(matrix: torch.Tensor) -> torch.Tensor | None:
    """The lower factor of a symmetric matrix, in its memory: at 14,336 inputs a copy is 0.8 GB.

    None where there is none; the matrix is spoiled then too.
    """
    import torch

    lower = matrix.t()  # the factorization works on columns that lie together
    info = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(lower, out=(lower, info))
    return lower if int(info) == 0 else None


def column_order(diagonal: torch.Tensor, span: int, ordered: bool = True) -> torch.Tensor:
    """In which order columns run: spans by their largest diagonal, and by the diagonal within a span.

    Ties keep their natural order, so the result is the same on every machine. (GPTQModel calls it GAR.)
    """
    import torch

    columns = len(diagonal)
    if not ordered:
        return torch.arange(columns)
    grouped = diagonal.view(-1, span)
    spans = torch.argsort(grouped.amax(1), descending=True, stable=True)
    within = torch.argsort(grouped, dim=1, descending=True, stable=True)
    return (within[spans] + spans[:, None] * span).flatten()


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, options: RoundingOptions | None = None
) -> Rounded:
    """Round [N, K] so that ||(W - Wq) X|| is small, where ``hessian`` [K, K] is any multiple of X X^T.

    Column by column; the error of each is made up for by those that follow (GPTQ, arXiv 2210.17323). The
    parameters of a span are fitted when its first column comes, to the compensated weights. Where the Hessian
    cannot be factored the matrix is rounded to nearest with the same search, and a notice says so.
    """
    import torch

    options = options or RoundingOptions()
    weight, _ = within_reach(weight, grid)
    columns = weight.shape[1]
    span = grid.span(columns)
    diagonal = hessian.diagonal()
    order = column_order(diagonal, span, options.ordered)
    factor = factor_hessian(hessian, options.damping, order)
    if factor is None:
        finite = torch.nan_to_num(diagonal, nan=0.0, posinf=0.0, neginf=0.0)
        found = round_nearest(weight, grid, importance_of(finite), options.candidates)
        notice = Notice(
            "rounded_to_nearest",
            "the calibration's Hessian cannot be factored, so error feedback was left out",
        )
        return Rounded(found.weight, found.values, "rtn", (notice,))
    notices = []
    if factor.damping > options.damping:
        detail = f"the Hessian needed damping of {factor.damping:g} instead of {options.damping:g}"
        notices.append(Notice("damping_raised", detail))
    if dead := int((diagonal == 0).sum()):
        notices.append(Notice("dead_inputs", f"{dead} of {columns} inputs were 0 in all of the calibration"))
    damping = factor.damping
    work = weight.float().t()[order].contiguous()  # [K, N], in the order of the columns
    codes, values, fits = _feedback(work, factor, grid, span, importance_of(diagonal), options)
    del factor, work  # the descent has no room beside the first: at 14,336 inputs it is 0.8 GB
    if options.descent_passes:
        _descend(weight, hessian, grid, (codes, values, fits), damping, options.descent_passes)
    by_place = [fit for _, fit in sorted(fits.items())]
    quantized = grid.assemble(by_place, codes.t().contiguous())
    return Rounded(quantized, values.t().contiguous(), "gptq", tuple(notices))


def _feedback(
    work: torch.Tensor,
    factor: Factor,
    grid: Grid,
    span: int,
    importance: torch.Tensor,
    options: RoundingOptions,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, Fit]]:
    """Codes and values [K, N] in natural column order, and the fit of each span by its index."""
    import torch

    columns = len(work)
    upper, order = factor.upper, factor.order
    codes, values = torch.empty_like(work), torch.empty_like(work)
    errors = torch.empty_like(work)
    fits: dict[int, Fit] = {}
    for first in range(0, columns, span):
        last = first + span
        places = order[first:last]
        which = int(places[0]) // span
        inside = places - which * span
        natural = torch.empty_like(work[first:last])
        natural[inside] = work[first:last]
        fit = fits[which] = grid.fit(
            natural, importance[which * span : which * span + span], options.candidates
        )
        scale, shift, inverse = fit.by_weight(span)
        for start in range(first, last, _STRIP):
            end = min(start + _STRIP, last)
            for column in range(start, end):
                place = int(inside[column - first])
                target = work[column]
                a, b = scale[place], shift[place]
                chosen = torch.sub(target, b).mul_(inverse[place]).round_().clamp_(fit.low, fit.high)
                value = chosen * a + b
                codes[which * span + place] = chosen
                values[which * span + place] = value
                error = torch.sub(target, value, out=errors[column]).div_(upper[column, column])
                if column + 1 < end:
                    work[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
            if end < last:
                work[end:last].addmm_(upper[start:end, end:last].t(), errors[start:end], alpha=-1)
        if last < columns:
            work[last:].addmm_(upper[first:last, last:].t(), errors[first:last], alpha=-1)
    return codes, values, fits


def _descend(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    state: tuple[torch.Tensor, torch.Tensor, dict[int, Fit]],
    damping: float,
    passes: int,
) -> None:
    """Coordinate descent on scales and codes, in place; no step raises tr(E H E^T) of the damped Hessian.

    With E = Wq - W and G = H E: the best value of column k is the one nearest to wq_k - G_k / H_kk, and the
    best scale of a span with its codes c held is larger by -(c G) / (c H c).
    """
    import torch

    codes, values, fits = state
    span = len(values) // len(fits)
    damped = hessian.float().clone()  # a copy: what is passed in stays as it is
    damped.diagonal().add_(damping * float(hessian.diagonal().mean()))
    gradient = damped @ (values - weight.float().t())  # [K, N]
    for _ in range(passes):
        for which in sorted(fits):
            first = which * span
            _rescale(damped, grid, gradient, state, which, span)
            fit = fits[which]
            scale, shift, inverse = fit.by_weight(span)
            for start in range(first, first + span, _STRIP):
                end = min(start + _STRIP, first + span)
                before = values[start:end].clone()
                for column in range(start, end):
                    place = column - first
                    wanted = values[column] - gradient[column] / damped[column, column]
                    chosen = wanted.sub_(shift[place]).mul_(inverse[place]).round_().clamp_(fit.low, fit.high)
                    value = chosen * scale[place] + shift[place]
                    if column + 1 < end:
                        gradient[column + 1 : end].addr_(
                            damped[column, column + 1 : end], value - values[column]
                        )
                    codes[column], values[column] = chosen, value
                changes = values[start:end] - before
                # Within the strip each column has had the changes of those before it only.
                gradient[start:end].addmm_(torch.triu(damped[start:end, start:end]), changes)
                gradient[:start].addmm_(damped[:start, start:end], changes)
                gradient[end:].addmm_(damped[end:, start:end], changes)


def _rescale(
    damped: torch.Tensor,
    grid: Grid,
    gradient: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor, dict[int, Fit]],
    which: int,
    span: int,
) -> None:
    """The best scale of one span with its codes held, where the format's scales are free."""
    import torch

    codes, values, fits = state
    fit, part = fits[which], slice(which * span, which * span + span)
    if grid.rescaled(fit, fit.scale[0]) is None:
        return
    # Grids whose scales are free share one among a span's weights.
    units = codes[part] + fit.shift / torch.where(fit.scale != 0, fit.scale, torch.ones_like(fit.scale))
    curvature = ((damped[part, part] @ units) * units).sum(0)
    slope = (units * gradient[part]).sum(0)
    scale = fit.scale[0]
    wanted = torch.where(curvature > 0, scale - slope / curvature.clamp(min=1e-30), scale)
    found = grid.rescaled(fit, wanted)
    assert found is not None
    step = found.scale[0] - scale
    better = 2 * step * slope + step * step * curvature < 0
    found = grid.rescaled(fit, torch.where(better, found.scale[0], scale))
    assert found is not None
    new = found.decode(codes[part])
    gradient.addmm_(damped[:, part], new - values[part])
    values[part] = new
    fits[which] = found


def asymmetric_target(
    weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, share: float, damping: float
) -> torch.Tensor:
    """Weights that, applied to the quantized model's inputs, come nearer to what the original computes.

    With ``hessian`` = Xq Xq^T and ``cross`` = (X - Xq) Xq^T the least-squares solution of W' Xq = W X is
    W' = W + W cross (hessian + damping)^-1; ``share`` of that step is taken, since it is fitted to the
    calibration (the objective of GPTAQ, arXiv 2504.02692, whose default share is 0.25).
    """
    import torch

    dtype = torch.float64 if len(hessian) <= _DOUBLE_LIMIT else torch.float32
    mean = float(hessian.diagonal().to(dtype).mean())
    lower = _cholesky_in_place(_damped(hessian.to(dtype, copy=True), damping * mean)) if mean > 0 else None
    if lower is None:
        return weight
    right = (cross.t() @ weight.t()).to(dtype)
    torch.linalg.solve_triangular(lower, right, upper=False, out=right)
    torch.linalg.solve_triangular(lower.t(), right, upper=True, out=right)
    return weight + share * right.t().float()


def output_error(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor | None) -> float:
    """tr(E H E^T) / tr(W H W^T) with E = W - values; squares without the Hessian. 0 where W X is 0.

    A number for all that is finite, however large.
    """
    weight = weight.float()
    error = weight - values
    if hessian is None:
        above, below = sum_of_squares(error), sum_of_squares(weight)
    else:
        above, below = _power(error, hessian), _power(weight, hessian)
        if not math.isfinite(above + below):
            # Beyond f32: the quotient of the same things made smaller.
            size = max(float(weight.abs().max()), float(error.abs().max()))
            hessian = hessian / float(hessian.diagonal().max())
            above, below = _power(error / size, hessian), _power(weight / size, hessian)
    return max(0.0, above / below) if below > 0 else 0.0


def sum_of_squares(values: torch.Tensor) -> float:
    """In f64, some of the values at a time: squares of what f32 holds may be too large or small for it."""
    import torch

    flat, total = values.flatten(), 0.0
    for start in range(0, flat.numel(), _SUMMED):
        total += float(flat[start : start + _SUMMED].to(torch.float64).square().sum())
    return total


def _power(rows: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(R H R^T)"""
    return float(((rows @ hessian) * rows).sum())
