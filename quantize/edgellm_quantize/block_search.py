"""The search for the scales of a block in numpy: the twin that says what the native encoder must compute.

Arrays are [sub-blocks, weights of a sub-block, blocks]: a block's numbers meet only numbers of the same
block, so the native encoder gives each SIMD lane a block and reaches the same bits. All arithmetic is f32 in
the order written here; sums run from the first weight to the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_quantize.block_grids import F16_MAX, GRIDS, Array, BlockGrid, BlockParams

_MAGIC = np.float32(12582912.0)
"""Added and taken away again it rounds to the nearest whole number, ties to even (1.5 * 2^23)."""
_TINY = np.float32(1e-30)
"""Ranges below this are zero: their inverse would not be finite."""
LARGEST = np.float32(2.0**28)
"""Greater magnitudes are cut to this: it is beyond every type's range, and its square is far from f32's."""


@dataclass(frozen=True)
class SearchPlan:
    """Which scales are tried. The same numbers go to the native encoder."""

    steps: tuple[float, ...]
    """Inverse scales of a sub-block: the greatest value gets the code ``max_code + step`` before clipping."""
    mirrored: tuple[float, ...]
    """The same with the opposite sign of the scale (grids without offsets)."""
    descents: int
    """Least-squares rounds of a sub-block's scale with its codes, after the best step."""
    d_factors: tuple[float, ...]
    """Super-scales, as factors of the one that just reaches the greatest sub-block scale."""
    dmin_factors: tuple[float, ...]
    """The same for offsets."""
    radius: int
    """Neighbouring integer scales and minima that are tried on each side."""
    polishes: int
    """Least-squares rounds of the super-scales with codes and integers fixed; each is followed by a search of
    the neighbours."""

    def as_array(self) -> Array:
        """What the native encoder reads: counts, radius and rounds, then the numbers; f32."""
        dmin_factors = self.dmin_factors or (1.0,)
        counts = (len(self.steps), len(self.mirrored), self.descents, len(self.d_factors), len(dmin_factors))
        numbers = (*self.steps, *self.mirrored, *self.d_factors, *dmin_factors)
        return np.array((*counts, self.radius, self.polishes, *numbers), dtype=np.float32)


def _range(start: float, stop: float, count: int) -> tuple[float, ...]:
    return tuple(round(start + (stop - start) * i / (count - 1), 4) for i in range(count))


def search_plan(type_name: str, effort: str, *, weighted: bool) -> SearchPlan:
    """The plan of a type under an effort (fast, default, best), with or without importance."""
    return _PLANS[effort](GRIDS[type_name], weighted)


def _reached(grid: BlockGrid, count: int) -> tuple[float, ...]:
    """Factors under which the greatest sub-block scale is an integer still: the greatest, one less ...

    Super-scales between them lose on the sub-block that counts most; measured, these find more than a grid.
    """
    assert grid.scale_range is not None
    most = max(abs(bound) for bound in grid.scale_range)
    return tuple(most / (most - step) for step in range(count))


def _fast(grid: BlockGrid, weighted: bool) -> SearchPlan:
    if grid.type_name == "Q8_0":
        return SearchPlan((0.0,), (), 0, (1.0,), (), 0, 1)
    if grid.scale_range is None:
        if weighted:
            return SearchPlan(_range(-0.9, 0.9, 10), (), 2, (1.0,), (), 0, 2)
        return SearchPlan((0.0,), (), 0, (1.0,), (), 0, 0)
    if grid.has_offset:
        return SearchPlan(_range(-0.9, 0.9, 10), (), 1, (1.0,), (1.0,), 1, 1)
    return SearchPlan(_range(-0.9, 0.9, 7), (), 1, (1.0,), (), 1, 1)


def _default(grid: BlockGrid, weighted: bool) -> SearchPlan:
    if grid.type_name == "Q8_0":
        return SearchPlan((0.0,), (), 0, (1.0,), (), 0, 1)
    if grid.scale_range is None:
        if weighted:
            return SearchPlan(_range(-1.8, 1.8, 19), _range(-0.9, 0.9, 7), 3, (1.0,), (), 0, 2)
        return SearchPlan(_range(-0.9, 0.6, 4), (), 0, (1.0,), (), 0, 1)
    steps = _range(-1.8, 1.8, 25)
    if grid.has_offset:
        factors = _reached(grid, 3)
        return SearchPlan(steps, (), 3, factors, factors, 1, 3)
    return SearchPlan(steps, (-0.5, 0.0, 0.5), 2, _reached(grid, 6), (), 1, 2)


def _best(grid: BlockGrid, weighted: bool) -> SearchPlan:
    if grid.type_name == "Q8_0":
        return SearchPlan(_range(-1.0, 1.0, 9), (), 1, (1.0,), (), 0, 2)
    steps, mirrored = _range(-2.4, 2.4, 49), _range(-2.0, 2.0, 17)
    if grid.scale_range is None:
        return SearchPlan(steps, mirrored, 4, (1.0,), (), 0, 3)
    if grid.has_offset:
        factors = _reached(grid, 7)
        return SearchPlan(steps, (), 4, factors, factors, 1, 6)
    return SearchPlan(steps, mirrored, 4, _reached(grid, 16), (), 2, 4)


_PLANS = {"fast": _fast, "default": _default, "best": _best}


@dataclass
class _Choice:
    """The best so far of every block: arrays end in [blocks]."""

    error: Array
    d: Array
    dmin: Array
    scales: Array
    minima: Array
    codes: Array


def fit(
    blocks: Array, importance: Array | None, type_name: str, plan: SearchPlan
) -> tuple[BlockParams, Array]:
    """Scales and codes of blocks: ``blocks`` f32 [n, elements], ``importance`` the same shape or None.

    Minimises the sum of importance * (weight - decoded)^2 of each block. Returns the scales and the codes
    uint8 [n, elements]. Magnitudes beyond what f16 scales reach are clipped.
    """
    grid = GRIDS[type_name]
    shape = (grid.sub_blocks, grid.sub_elements, len(blocks))
    x = np.ascontiguousarray(np.clip(blocks, -LARGEST, LARGEST).T).reshape(shape)
    w = np.ones((1, 1, 1), np.float32) if importance is None else np.ascontiguousarray(importance.T)
    if importance is not None:
        w = w.reshape(shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        if grid.has_offset:
            scale, offset = _fit_affine(x, w, grid, plan)
        else:
            scale, offset = _fit_symmetric(x, w, grid, plan), np.zeros(1, np.float32)
        if grid.scale_range is None:
            best = _one_level(x, w, scale, offset, grid, plan)
        else:
            best = _two_levels(x, w, scale, offset, grid, plan)
    params = BlockParams(
        type_name,
        best.d,
        best.dmin,
        np.ascontiguousarray(best.scales.T).astype(np.int16),
        np.ascontiguousarray(best.minima.T).astype(np.int16),
    )
    codes = best.codes.reshape(grid.elements, len(blocks)).T + np.float32(grid.zero)
    return params, np.ascontiguousarray(codes).astype(np.uint8)


def _sum(values: Array) -> Array:
    """Over the weights of a sub-block, first to last: [s, l, b] -> [s, b]."""
    total = values[:, 0].copy()
    for index in range(1, values.shape[1]):
        total += values[:, index]
    return total


def _total(values: Array) -> Array:
    """Over the sub-blocks, first to last: [s, b] -> [b]."""
    total: Array = values[0].copy()
    for row in values[1:]:
        total += row
    return total


def _nearest(values: Array, low: float | np.float32, high: float | np.float32) -> Array:
    rounded: Array = (np.maximum(np.minimum(values, np.float32(high)), np.float32(low)) + _MAGIC) - _MAGIC
    return rounded


def _inverse(values: Array) -> Array:
    """1 / values, 0 where that would not be finite."""
    return np.where(np.abs(values) > _TINY, np.float32(1) / values, np.float32(0))


def _half(values: Array) -> Array:
    """Rounded to f16 and clipped to its range, without a negative zero."""
    clipped = np.maximum(np.minimum(values, F16_MAX), -F16_MAX)
    rounded: Array = clipped.astype(np.float16).astype(np.float32) + np.float32(0)
    return rounded


def _bounds(grid: BlockGrid) -> tuple[float, float]:
    """Least and greatest code, counted from the zero code."""
    low = -127 if grid.type_name == "Q8_0" else -grid.zero
    return float(low), float(grid.max_code - grid.zero)


def _fit_affine(x: Array, w: Array, grid: BlockGrid, plan: SearchPlan) -> tuple[Array, Array]:
    """Real-valued scale and offset of every sub-block, each [s, b]."""
    high = np.float32(grid.max_code)
    two_levels = grid.scale_range is not None
    low_value = x.min(axis=1)
    if two_levels:
        low_value = np.minimum(low_value, np.float32(0))
    span = x.max(axis=1) - low_value
    y = x - low_value[:, None]
    wy = w * y
    sum_w = _sum(np.broadcast_to(w, x.shape))
    sum_y = _sum(wy)
    best_scale, best_offset = span / high, np.zeros_like(span)
    best_gain = np.full_like(span, -np.inf)

    def consider(codes: Array) -> None:
        nonlocal best_scale, best_offset, best_gain
        wq = w * codes
        sum_q, sum_qq, sum_yq = _sum(wq), _sum(wq * codes), _sum(wy * codes)
        det = sum_w * sum_qq - sum_q * sum_q
        inverse = _inverse(det)
        scale = (sum_w * sum_yq - sum_y * sum_q) * inverse
        offset = (sum_qq * sum_y - sum_q * sum_yq) * inverse
        if two_levels:
            # The file holds offsets of 0 and less only.
            above = low_value + offset > 0
            offset = np.where(above, -low_value, offset)
            scale = np.where(above, (sum_yq + low_value * sum_q) * _inverse(sum_qq), scale)
        linear = scale * sum_yq + offset * sum_y
        square = (
            (scale * scale) * sum_qq + (offset * offset) * sum_w + ((scale * offset) * sum_q) * np.float32(2)
        )
        gain = linear * np.float32(2) - square
        better = (gain > best_gain) & (det > _TINY) & (scale > 0)
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, scale, best_scale)
        best_offset = np.where(better, offset, best_offset)

    inverse_span = _inverse(span)
    for step in plan.steps:
        inverse = (high + np.float32(step)) * inverse_span
        consider(_nearest(y * inverse[:, None], 0, high))
    for _ in range(plan.descents):
        inverse = _inverse(best_scale)
        consider(_nearest((y - best_offset[:, None]) * inverse[:, None], 0, high))
    return best_scale, best_offset + low_value


def _fit_symmetric(x: Array, w: Array, grid: BlockGrid, plan: SearchPlan) -> Array:
    """Real-valued signed scale of every sub-block, [s, b]."""
    low, high = _bounds(grid)
    top, bottom = x.max(axis=1), x.min(axis=1)
    extreme = np.where(top >= -bottom, top, bottom)
    inverse_extreme = _inverse(extreme)
    wx = w * x
    best_scale: Array = extreme * np.float32(1 / low)
    best_gain = np.full_like(extreme, -np.inf)

    def consider(inverse: Array) -> None:
        nonlocal best_scale, best_gain
        codes = _nearest(x * inverse[:, None], low, high)
        sum_xq, sum_qq = _sum(wx * codes), _sum((w * codes) * codes)
        scale = sum_xq * _inverse(sum_qq)
        gain = scale * sum_xq
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, scale, best_scale)

    for step in plan.steps:
        consider((np.float32(low) - np.float32(step)) * inverse_extreme)
    for step in plan.mirrored:
        consider((np.float32(high) + np.float32(step)) * inverse_extreme)
    for _ in range(plan.descents):
        consider(_inverse(best_scale))
    return best_scale


def _codes_and_error(
    x: Array, w: Array, scale: Array, offset: Array | None, grid: BlockGrid
) -> tuple[Array, Array]:
    """Nearest codes [s, l, b] for decoded scales and offsets [s, b], and the error [s, b] that they leave."""
    low, high = _bounds(grid)
    inverse = _inverse(scale)
    if offset is None:
        codes = _nearest(x * inverse[:, None], low, high)
        rest = x - scale[:, None] * codes
    else:
        codes = _nearest((x - offset[:, None]) * inverse[:, None], low, high)
        rest = x - (scale[:, None] * codes + offset[:, None])
    return codes, _sum((w * rest) * rest)


def _keep(choice: _Choice, better: Array, other: _Choice) -> None:
    for name in ("error", "d", "dmin", "scales", "minima", "codes"):
        setattr(choice, name, np.where(better, getattr(other, name), getattr(choice, name)))


def _one_level(x: Array, w: Array, scale: Array, offset: Array, grid: BlockGrid, plan: SearchPlan) -> _Choice:
    """Types whose scales are f16 as they are: one sub-block."""
    ones, zeros = np.ones_like(scale), np.zeros_like(scale)

    def evaluate(d: Array, dmin: Array) -> _Choice:
        codes, error = _codes_and_error(x, w, d, dmin if grid.has_offset else None, grid)
        return _Choice(error[0], d[0], dmin[0], ones, zeros, codes)

    best = evaluate(_half(scale), _half(offset) if grid.has_offset else zeros)
    for _ in range(plan.polishes):
        d, dmin = _least_squares(x, w, best, grid)
        other = evaluate(_half(d)[None], _half(dmin)[None])
        _keep(best, other.error < best.error, other)
    return best


def _two_levels(
    x: Array, w: Array, scale: Array, offset: Array, grid: BlockGrid, plan: SearchPlan
) -> _Choice:
    """Types whose sub-block scales are integers times a super-scale."""
    assert grid.scale_range is not None
    least, greatest = grid.scale_range
    if grid.has_offset:
        d0 = scale.max(axis=0) * np.float32(1 / greatest)
        dmin0 = (-offset).max(axis=0) * np.float32(1 / greatest)
    else:
        top, bottom = scale.max(axis=0), scale.min(axis=0)
        d0 = np.where(top >= -bottom, top, bottom) * np.float32(1 / least)
        dmin0 = np.zeros_like(d0)
    best: _Choice | None = None
    for d_factor in plan.d_factors:
        d = _half(d0 * np.float32(d_factor))
        start = _nearest(scale * _inverse(d), least, greatest)
        for dmin_factor in plan.dmin_factors if grid.has_offset else (1.0,):
            dmin = _half(dmin0 * np.float32(dmin_factor))
            minima = (
                _nearest(-offset * _inverse(dmin), 0, greatest) if grid.has_offset else np.zeros_like(start)
            )
            other = _neighbours(x, w, d, dmin, start, minima, grid, plan.radius)
            if best is None:
                best = other
            else:
                _keep(best, other.error < best.error, other)
    assert best is not None
    for _ in range(plan.polishes):
        d, dmin = _least_squares(x, w, best, grid)
        other = _neighbours(x, w, _half(d), _half(dmin), best.scales, best.minima, grid, plan.radius)
        _keep(best, other.error < best.error, other)
    return best


def _neighbours(
    x: Array, w: Array, d: Array, dmin: Array, scales: Array, minima: Array, grid: BlockGrid, radius: int
) -> _Choice:
    """The best integers of each sub-block within ``radius`` of the given ones, super-scales fixed."""
    assert grid.scale_range is not None
    least, greatest = grid.scale_range
    best_error = np.full(scales.shape, np.inf, dtype=np.float32)
    best_scales, best_minima, best_codes = scales, minima, np.zeros_like(x)
    steps = range(-radius, radius + 1)
    for scale_step in steps:
        tried_scales = np.clip(scales + np.float32(scale_step), np.float32(least), np.float32(greatest))
        for minimum_step in steps if grid.has_offset else (0,):
            tried_minima = np.clip(minima + np.float32(minimum_step), np.float32(0), np.float32(greatest))
            offset = -(dmin * tried_minima) if grid.has_offset else None
            codes, error = _codes_and_error(x, w, d * tried_scales, offset, grid)
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best_scales = np.where(better, tried_scales, best_scales)
            best_minima = np.where(better, tried_minima, best_minima)
            best_codes = np.where(better[:, None], codes, best_codes)
    return _Choice(_total(best_error), d, dmin, best_scales, best_minima, best_codes)


def _least_squares(x: Array, w: Array, choice: _Choice, grid: BlockGrid) -> tuple[Array, Array]:
    """The d and dmin [b] that fit best with integers and codes fixed; the old ones where none do."""
    scales, minima = np.atleast_2d(choice.scales), np.atleast_2d(choice.minima)
    a = scales[:, None] * choice.codes
    wa = w * a
    sum_aa, sum_ax = _total(_sum(wa * a)), _total(_sum(wa * x))
    if not grid.has_offset:
        return np.where(sum_aa > _TINY, sum_ax * _inverse(sum_aa), choice.d), choice.dmin
    # The offset is -dmin * minimum, or dmin itself in types of one level.
    b = -minima if grid.scale_range is not None else np.ones_like(minima)
    w = np.broadcast_to(w, x.shape)
    sum_w, sum_wa, sum_wx = _sum(w), _sum(wa), _sum(w * x)
    sum_bb, sum_ab, sum_bx = _total((b * b) * sum_w), _total(b * sum_wa), _total(b * sum_wx)
    det = sum_aa * sum_bb - sum_ab * sum_ab
    inverse = _inverse(det)
    d = (sum_bb * sum_ax - sum_ab * sum_bx) * inverse
    dmin = (sum_aa * sum_bx - sum_ab * sum_ax) * inverse
    solved = det > sum_aa * sum_bb * np.float32(1e-6)
    # Without offsets there is nothing to solve for dmin: d alone, with dmin as it is.
    alone = (sum_ax - choice.dmin * sum_ab) * _inverse(sum_aa)
    single = sum_aa > _TINY
    if grid.scale_range is not None:
        solved &= (d > 0) & (dmin >= 0)
        single &= alone > 0
    d = np.where(solved, d, np.where(single, alone, choice.d))
    return d, np.where(solved, dmin, choice.dmin)
