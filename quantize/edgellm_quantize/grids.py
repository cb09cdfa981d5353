"""Integer grids: which values a group of weights can take, and the search for the scale that fits it best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edgellm_models.errors import BadInputError, Notice

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight, LinearPart
    from edgellm_quantize.recipe import QuantizedLinear

SMALLEST_SCALE = 2.0**-14
"""Least normal f16: a smaller scale is a denormal that kernels flush to zero, and 0 would give NaN."""
LARGEST_SCALE = 65504.0
_CLIPPING = {2: (0.45, 2.2), 3: (0.6, 1.6), 4: (0.6, 1.3), 8: (0.97, 1.03)}
"""bits -> range of candidates: the codes that the largest weight would get over those that one side has.
Above 1 it is clipped, which pays the more the fewer codes there are."""
_CHUNK = 2048
"""Groups that are fitted at once: with 64 weights each the scratch stays in the second-level cache."""


@dataclass(frozen=True)
class Fit:
    """The values that some groups can take: ``scale * code + shift`` for codes ``low`` .. ``high``.

    Tensors have the shape [parts, groups], f32, exactly as a reader decodes them: the weights of a group are
    as many runs of equal length. Many fits are held at once, so what its weights share is stored once.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    low: int
    high: int
    fields: Any
    """What the format stores of the groups; meaningful to the grid that made the fit."""

    def by_weight(self, weights: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scale, shift and 1 / scale [weights, groups]; 0 for the last where a format's scale is 0: all codes
        mean the same there."""
        import torch

        inverse = torch.where(self.scale != 0, 1 / self.scale, torch.zeros_like(self.scale))
        return _spread(self.scale, weights), _spread(self.shift, weights), _spread(inverse, weights)

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest code of every value [weights, groups], as f32."""
        _, shift, inverse = self.by_weight(len(values))
        return (values - shift).mul_(inverse).round_().clamp_(self.low, self.high)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return _spread(self.scale, len(codes)) * codes + _spread(self.shift, len(codes))


def _spread(parts: torch.Tensor, weights: int) -> torch.Tensor:
    """[parts, groups] for each weight [weights, groups]; a view where all share one."""
    if len(parts) == 1:
        return parts.expand(weights, -1)
    return parts.repeat_interleave(weights // len(parts), dim=0)


class Grid(Protocol):
    """A weight format as rounding sees it: spans of a row that share their parameters."""

    @property
    def label(self) -> str:
        """What messages call the format."""
        ...

    @property
    def reach(self) -> float:
        """The greatest magnitude that a weight can have: scales are f16 numbers."""
        ...

    def span(self, in_features: int) -> int:
        """Weights of a row that are fitted together. BadInputError for rows that the format cannot hold."""
        ...

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None, candidates: int) -> Fit:
        """The best parameters for the columns of ``values`` [span, groups], weighted by ``importance``

        ([span] or [span, groups], not negative; None weighs all alike). ``candidates`` bounds the search; 0
        takes the format's usual scales without one.
        """
        ...

    def rescaled(self, fit: Fit, scale: torch.Tensor) -> Fit | None:
        """The fit with the nearest scales [groups] that can be stored; None where they are not free."""
        ...

    def assemble(self, fits: list[Fit], codes: torch.Tensor) -> QuantizedLinear | BlockQuantWeight:
        """The tensor of codes [N, K] (f32) and the fit of each span, in order, whose groups are the rows."""
        ...


def dequantize(weight: QuantizedLinear | LinearPart) -> torch.Tensor:
    """f32 [N, K], as readers of the format decode it."""
    from edgellm_kernels.weights import DenseWeight, prepare
    from edgellm_quantize.recipe import QuantizedLinear

    if not isinstance(weight, QuantizedLinear):
        dense = prepare(weight, op="linear", hold="dense")
        assert isinstance(dense, DenseWeight)
        return dense.data
    rows, columns = weight.shape
    grouped = weight.codes.view(rows, -1, weight.group_size).float()
    zeros = 2.0 ** (weight.bits - 1) if weight.zeros is None else weight.zeros.float()[..., None]
    return ((grouped - zeros) * weight.scales[..., None]).view(rows, columns)


@dataclass(frozen=True)
class IntegerGrid:
    """Codes of ``bits`` bits with an f16 scale and an integer zero per group of a row (GPTQ, AWQ)."""

    bits: int
    group_size: int
    """Weights of a row that share a scale; -1 is the whole row."""
    symmetric: bool = True
    """The zero is 2^(bits - 1); scales have a sign, so that all 2^bits codes serve (AutoRound's full range).
    """
    min_zero: int = 1
    """1 in GPTQ files, where readers disagree on a zero of 0; 0 in AWQ files."""

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise BadInputError(f"bits must be 2, 3, 4 or 8, not {self.bits}")
        if self.group_size != -1 and self.group_size < 1:
            raise BadInputError(f"the group size must be -1 (a whole row) or positive, not {self.group_size}")

    @property
    def label(self) -> str:
        return f"{self.bits} bits with f16 scales"

    @property
    def reach(self) -> float:
        return LARGEST_SCALE * (self.middle if self.symmetric else self.high)

    @property
    def high(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def span(self, in_features: int) -> int:
        if self.group_size == -1:
            return in_features
        if in_features % self.group_size:
            fitting = [size for size in (128, 64, 32) if in_features % size == 0]
            way_out = " or ".join(str(size) for size in fitting) or "-1"
            raise BadInputError(
                f"the group size {self.group_size} does not divide rows of {in_features} weights: "
                f"take {way_out}"
            )
        return self.group_size

    def bits_per_weight(self, in_features: int, *, group_index_rows: int = 0) -> float:
        """Codes, scales and (unless symmetric) zeros; with ``group_index_rows`` a g_idx over so many rows."""
        group = self.span(in_features)
        zeros = 0.0 if self.symmetric else self.bits / group
        index = 32 / group_index_rows if group_index_rows else 0.0
        return self.bits + 16 / group + zeros + index

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None, candidates: int = 60) -> Fit:
        """See Grid.fit; without a search 2 absmax / (2^b - 1), or from min to max."""
        import torch

        parts = []
        for start in range(0, values.shape[1], _CHUNK):
            x = values[:, start : start + _CHUNK]
            weights = importance
            if weights is not None and weights.ndim == 2:
                weights = weights[:, start : start + _CHUNK]
            parts.append(_search(self, x, weights, candidates) if candidates else _usual(self, x))
        return self.fit_of(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))

    def rescaled(self, fit: Fit, scale: torch.Tensor) -> Fit:
        return self.fit_of(f16_scale(scale), fit.fields[1])

    def fit_of(self, scale: torch.Tensor, zero: torch.Tensor) -> Fit:
        """The fit with these scales [groups] (f32 with f16 values) and zeros."""
        shift = -scale * zero
        return Fit(scale[None], shift[None], 0, self.high, (scale, zero))

    def assemble(self, fits: list[Fit], codes: torch.Tensor) -> QuantizedLinear:
        import torch

        from edgellm_quantize.recipe import QuantizedLinear

        scales = torch.stack([fit.fields[0] for fit in fits], dim=1)
        zeros = None
        if not self.symmetric:
            zeros = torch.stack([fit.fields[1] for fit in fits], dim=1).to(torch.uint8)
        return QuantizedLinear(codes.to(torch.uint8), scales, zeros, codes.shape[1] // len(fits), self.bits)


@dataclass(frozen=True)
class BlockTypeGrid:
    """A GGUF block type; a span is one block."""

    type_name: str
    effort: str = "default"

    @property
    def label(self) -> str:
        return self.type_name

    @property
    def reach(self) -> float:
        from edgellm_quantize.kquant_codec import reach

        return reach(self.type_name)

    def span(self, in_features: int) -> int:
        from edgellm_quantize.block_grids import GRIDS

        elements = GRIDS[self.type_name].elements
        if in_features % elements:
            raise BadInputError(
                f"rows of {in_features} weights are no whole {self.type_name} blocks of {elements}"
            )
        return elements

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None, candidates: int = 60) -> Fit:
        """See Grid.fit. The search is the encoder's own; ``candidates`` has no part in it."""
        import numpy as np
        import torch

        from edgellm_quantize.kquant_codec import fit_blocks

        rows = np.ascontiguousarray(values.t().numpy())
        weights = None
        if importance is not None:
            weights = np.ascontiguousarray(
                importance.t().numpy() if importance.ndim == 2 else importance.numpy()
            )
        params = fit_blocks(rows, self.type_name, weights, self.effort)
        grid = params.grid
        scale = torch.from_numpy(params.sub_scales()).t()
        shift = torch.from_numpy(params.sub_offsets()).t()
        if not grid.has_offset:
            shift = -scale * grid.zero
        low = 1 if self.type_name == "Q8_0" else 0
        return Fit(scale.contiguous(), shift.contiguous(), low, grid.max_code, params)

    def rescaled(self, fit: Fit, scale: torch.Tensor) -> None:
        return None

    def assemble(self, fits: list[Fit], codes: torch.Tensor) -> BlockQuantWeight:
        import numpy as np
        import torch

        from edgellm_kernels.weights import BlockLayout, BlockQuantWeight
        from edgellm_quantize.block_grids import pack

        columns = codes.shape[1]
        span = columns // len(fits)
        numbers = codes.to(torch.uint8)
        packed = [
            pack(fit.fields, numbers[:, index * span : (index + 1) * span].numpy())
            for index, fit in enumerate(fits)
        ]
        data = torch.from_numpy(np.concatenate(packed, axis=1))
        return BlockQuantWeight(data, BlockLayout(self.type_name), columns)


def within_reach(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, int]:
    """The weights cut to what the grid can hold, and how many were cut. Without any it is ``weight`` itself.

    What is beyond would not only be lost: squares of it exceed f32, and no scale would seem better than
    another.
    """
    if max(float(weight.amax()), -float(weight.amin())) <= grid.reach:
        return weight, 0
    return weight.clamp(-grid.reach, grid.reach), int((weight.abs() > grid.reach).sum())


def clipped_notice(name: str, count: int, label: str) -> Notice:
    """Said of a tensor with weights beyond the range of its format."""
    what = "1 weight is" if count == 1 else f"{count:,} weights are"
    return Notice("weights_clipped", f"tensor {name}: {what} beyond the range of {label}: clipped")


def f16_scale(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to f16 and kept normal, as f32; the sign stays, 0 becomes the smallest scale."""
    import torch

    size = scale.abs().clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16).float()
    return torch.where(scale < 0, -size, size)


def _usual(grid: IntegerGrid, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The grids that the peers take: symmetric 2 absmax / (2^b - 1), or from min to max with 0 inside."""
    if grid.symmetric:
        scale = f16_scale(2 * x.abs().amax(0) / grid.high)
        return scale, scale.new_full(scale.shape, grid.middle)
    low, high = x.amin(0).clamp(max=0), x.amax(0).clamp(min=0)
    scale = f16_scale((high - low) / grid.high)
    return scale, (-low / scale).round().clamp(grid.min_zero, grid.high)


class _Trial:
    """Keeps the best scale and zero of each group over many candidates; scratch is allocated once."""

    def __init__(self, grid: IntegerGrid, x: torch.Tensor, importance: torch.Tensor | None) -> None:
        import torch

        self.grid, self.x, self.importance = grid, x, importance
        self.scratch = torch.empty_like(x)
        groups = x.shape[1]
        self.error = x.new_full((groups,), float("inf"))
        self.scale = x.new_full((groups,), SMALLEST_SCALE)
        self.zero = x.new_full((groups,), float(grid.middle))

    def _codes(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """code - zero, in the scratch."""
        import torch

        torch.mul(self.x, 1 / scale, out=self.scratch)
        return self.scratch.round_().clamp_(min=-zero, max=self.grid.high - zero)

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each group, weighted: [span, groups] -> [groups]."""
        if self.importance is None:
            return values.sum(0)
        if self.importance.ndim == 1:
            return self.importance @ values
        return (values * self.importance).sum(0)

    def add(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Try a scale and a zero for every group."""
        import torch

        scale = f16_scale(scale)
        error = self.weighted(self._codes(scale, zero).mul_(scale).sub_(self.x).square_())
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def refine(self) -> None:
        """The least-squares scale of the codes that the best candidate gives."""
        codes = self._codes(self.scale, self.zero).clone()
        below = self.weighted(codes * codes)
        above = self.weighted(codes * self.x)
        usable = (below > 0) & (above != 0)
        scale = above / below.where(usable, below.new_ones(()))
        self.add(scale.where(usable, self.scale), self.zero)


def _steps(
    grid: IntegerGrid, x: torch.Tensor, importance: torch.Tensor | None, candidates: int
) -> Iterator[torch.Tensor]:
    """Clipping factors [groups], two candidates each: evenly spaced in the logarithm.

    Where the largest weight matters little they reach up to those at which the one that matters most is the
    largest that is not clipped.
    """
    import torch

    least, most = _CLIPPING[grid.bits]
    reach = torch.ones_like(x[0])
    if importance is not None:
        weighted = (importance if importance.ndim == 2 else importance[:, None]) * x.square()
        foremost = x.gather(0, weighted.argmax(0, keepdim=True))[0].abs()
        reach = (foremost / x.abs().amax(0).clamp(min=1e-30)).clamp(0.05, 1.0)
    span = torch.log(most / reach / least)
    for place in torch.linspace(0, 1, max(2, candidates // 2)).tolist():
        yield least * torch.exp(place * span)


def _search(
    grid: IntegerGrid, x: torch.Tensor, importance: torch.Tensor | None, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero with the least weighted squared error: a grid of candidates, then least squares."""
    import torch

    trial = _Trial(grid, x, importance)
    if grid.symmetric:
        extreme = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
        zero = torch.full_like(extreme, grid.middle)
        for steps in _steps(grid, x, importance, candidates):
            scale = extreme / (steps * grid.middle)
            trial.add(-scale, zero)  # the largest weight lies at the end with one code more
            trial.add(scale, zero)
    else:
        low, high = x.amin(0).clamp(max=0), x.amax(0).clamp(min=0)
        middle, width = (low + high) / 2, (high - low) / grid.high
        for steps in _steps(grid, x, importance, candidates):
            scale = f16_scale(width / steps)
            centre = grid.high / 2 - middle / scale
            for zero in (centre.floor(), centre.floor() + 1):
                trial.add(scale, zero.clamp(grid.min_zero, grid.high))
    trial.refine()
    trial.refine()
    return trial.scale, trial.zero
