"""Grids of the core: known figures, exact decoding, hard groups (zeros, one sign, outliers, underflow)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from edgellm_kernels.ggml_blocks import dequantize as dequantize_blocks
from edgellm_kernels.ggml_blocks import encode_q8_0
from edgellm_kernels.weights import BlockLayout
from edgellm_models.errors import BadInputError
from edgellm_quantize.block_grids import GRIDS
from edgellm_quantize.grids import SMALLEST_SCALE, BlockTypeGrid, IntegerGrid, dequantize
from edgellm_quantize.kquant_codec import encode
from edgellm_quantize.packed_layouts import pack_linear, packed_shapes
from edgellm_quantize.recipe import QuantizeRecipe
from edgellm_quantize.rounding import round_nearest


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W36_WEIGHTS = (-0.8, -0.2, 0.1, 0.5, 0.9)
W36_CODES = [-113, -28, 14, 71, 127]


def test_w36_five_weights_by_the_largest() -> None:
    """W36, as Q8_0 stores it: the scale is the figure in f16, values and errors are those of that scale."""
    weights = torch.zeros(1, 32)
    weights[0, :5] = torch.tensor(W36_WEIGHTS)
    block = encode_q8_0(weights).numpy()[0]
    assert float(block[:2].view(np.float16)[0]) == float(np.float16(0.0070866))
    assert block[2:7].view(np.int8).tolist() == W36_CODES
    values = dequantize_blocks(torch.from_numpy(block[None]), BlockLayout("Q8_0"), 32)[0, :5]
    assert values.tolist() == pytest.approx([-0.80079, -0.19843, 0.09921, 0.50315, 0.9], rel=2**-11)
    assert float((values - weights[0, :5]).abs().max()) == pytest.approx(0.00315, abs=0.5 * 2**-11)


@pytest.mark.parametrize("grid", [IntegerGrid(8, 5), BlockTypeGrid("Q8_0")], ids=["integers", "Q8_0"])
def test_w36_five_weights_by_a_grids_own_fit(grid: IntegerGrid | BlockTypeGrid) -> None:
    """W36: the same codes, of either sign, at a scale as near as that of 255 steps instead of 254; what a
    search finds has no larger error."""
    span = 5 if isinstance(grid, IntegerGrid) else 32
    weights = torch.zeros(span, 1)
    weights[:5, 0] = torch.tensor(W36_WEIGHTS)
    fit = grid.fit(weights, None, 0)
    sign = 1 if float(fit.scale[0, 0]) > 0 else -1
    assert sign * float(fit.scale[0, 0]) == pytest.approx(0.0070866, rel=0.005)
    codes = fit.codes(weights)
    assert (sign * (codes[:5, 0] - 128)).tolist() == W36_CODES
    found = grid.fit(weights, None, 60)
    error = (found.decode(found.codes(weights)) - weights).square().sum()
    w36 = torch.tensor(W36_CODES) * 0.0070866 - torch.tensor(W36_WEIGHTS)
    assert float(error) < float(w36.square().sum())


def test_w37_w38_true_bits_per_weight() -> None:
    """W37, W38: scales, zeros and group indices count, in written tensors and in what is planned."""
    bytes_of = {"I32": 4, "F16": 2}

    def parts(form: str, bits: int, group: int, *, symmetric: bool = False) -> dict[str, int]:
        recipe = QuantizeRecipe(format=form, bits=bits, group_size=group, symmetric=symmetric)
        shapes = packed_shapes(recipe, (4096, 4096))
        return {
            name: math.prod(shape) * bytes_of[kind] for name, (kind, shape) in shapes.items() if kind != "I64"
        }

    def bits_of(found: dict[str, int]) -> float:
        return 8 * sum(found.values()) / 4096**2

    symmetric = parts("compressed-tensors", 4, 128, symmetric=True)
    assert symmetric == {"weight_packed": 8 << 20, "weight_scale": 262_144}
    assert symmetric["weight_scale"] / symmetric["weight_packed"] == 0.03125
    assert bits_of(symmetric) == 4.125 == IntegerGrid(4, 128).bits_per_weight(4096)
    assert bits_of(parts("awq", 4, 128)) == 4.15625
    assert bits_of(parts("gptq", 4, 128)) == 4.1640625
    assert IntegerGrid(4, 128, symmetric=False).bits_per_weight(4096, group_index_rows=4096) == 4.1640625
    assert bits_of(parts("awq", 4, 64)) == 4.3125 and bits_of(parts("awq", 4, 32)) == 4.625
    three = parts("gptq", 3, 128)
    assert three.pop("g_idx") == 4 * 4096 and round(bits_of(three), 4) == 3.1484
    assert round(IntegerGrid(3, 128, symmetric=False).bits_per_weight(4096), 4) == 3.1484


@pytest.mark.parametrize(("form", "bits", "group"), [("gptq", 4, 32), ("gptq", 3, 32), ("awq", 4, 64)])
def test_planned_shapes_are_those_of_packed_codes(form: str, bits: int, group: int) -> None:
    """What W37 and W38 count is what packing makes of codes that a grid has chosen."""
    recipe = QuantizeRecipe(format=form, bits=bits, group_size=group, symmetric=False)
    grid = IntegerGrid(bits, group, symmetric=False)
    packed = pack_linear(recipe, round_nearest(_normal(64, 128), grid, candidates=0).weight, "x")
    shapes = packed_shapes(recipe, (64, 128))
    assert {name: values.shape for name, values in packed.items()} == {
        name: shape for name, (_, shape) in shapes.items()
    }


@pytest.mark.parametrize(
    ("bits", "group", "usual", "searched"),
    [(4, 128, 0.1109, 0.0967), (4, 32, 0.0949, 0.0812), (3, 128, 0.2376, 0.1860), (2, 128, 0.551, 0.364)],
)
def test_search_against_the_usual_grid_on_normal_weights(
    bits: int, group: int, usual: float, searched: float
) -> None:
    """Relative errors of the grid 2 absmax / (2^b - 1) and of a search over signed scales, as published
    for unit-variance data (61 scales, both signs).
    """
    weight = _normal(512, 8 * group)
    grid = IntegerGrid(bits, group)
    plain = round_nearest(weight, grid, candidates=0).values
    best = round_nearest(weight, grid).values
    assert float((plain - weight).square().mean().sqrt()) == pytest.approx(usual, rel=0.01)
    assert float((best - weight).square().mean().sqrt()) < searched * 1.01


def test_the_search_finds_what_trying_everything_finds() -> None:
    """Two bits, groups of four: against all scales of a fine grid, weighted."""
    values, importance = _normal(4, 50, seed=3), torch.tensor([4.0, 1.0, 0.1, 2.0])
    grid = IntegerGrid(2, 4)
    fit = grid.fit(values, importance, 100)
    found = (importance[:, None] * (fit.decode(fit.codes(values)) - values).square()).sum(0)
    best = torch.full_like(found, float("inf"))
    for scale in torch.linspace(-3, 3, 2001):
        if abs(float(scale)) > 1e-3:
            codes = (values / scale + 2).round().clamp(0, 3)
            error = (importance[:, None] * ((codes - 2) * scale - values).square()).sum(0)
            best = torch.minimum(best, error)
    assert float((found / best).mean()) < 1.02


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_hard_groups_stay_finite(bits: int, symmetric: bool) -> None:
    """E09: all-zero groups, 1e-8, 6e4, one huge channel: scales are normal f16, nothing is NaN."""
    weight = _normal(8, 128, seed=5)
    weight[0] = 0
    weight[1, :32] = 0
    weight[2] *= 1e-8
    weight[3] = 6e4
    weight[4] = -6e4
    weight[5, 7] = 6e4
    weight[6] = 1e-30
    importance = torch.ones(128)
    importance[:40] = 0
    importance[50] = 1e8
    for candidates in (0, 24):
        found = round_nearest(weight, IntegerGrid(bits, 32, symmetric), importance, candidates)
        scales = found.weight.scales
        assert torch.isfinite(scales).all() and bool((scales.abs() >= SMALLEST_SCALE).all())
        assert torch.equal(scales, scales.half().float())
        assert torch.equal(dequantize(found.weight), found.values) or torch.allclose(
            dequantize(found.weight), found.values, rtol=1e-5, atol=1e-9
        )
        assert bool((found.values[0] == 0).all())


@pytest.mark.parametrize("kind", sorted(GRIDS))
def test_a_fit_holds_what_a_block_stores_and_no_row_per_weight(kind: str) -> None:
    """All fits of a matrix are held while it is rounded: a scale per weight would be 8 bytes for each."""
    grid = GRIDS[kind]
    values = _normal(grid.elements, 6, seed=1)
    fit = BlockTypeGrid(kind).fit(values, None)
    assert fit.scale.shape == fit.shift.shape == (grid.elements // grid.sub_elements, 6)
    scale, shift, inverse = fit.by_weight(grid.elements)
    assert scale.shape == shift.shape == inverse.shape == values.shape
    codes = ((values - shift) * inverse).round().clamp(fit.low, fit.high)
    assert torch.equal(fit.codes(values), codes)
    assert torch.equal(fit.decode(codes), scale * codes + shift)


def test_groups_of_one_sign_with_asymmetric_zeros() -> None:
    """E02: the zero of an all-positive group would be 0, which GPTQ readers disagree on; the error stays
    within half a step where a zero of 0 is allowed, and the stored zero is never 0 where it is not.
    """
    weight = _normal(16, 64).abs() + 0.5
    free = round_nearest(weight, IntegerGrid(4, 32, False, min_zero=0), candidates=0)
    step = free.weight.scales.repeat_interleave(32, dim=1)
    assert bool(((free.values - weight).abs() <= step / 2 * 1.001).all())
    assert bool((free.weight.zeros == 0).all())
    for candidates in (0, 60):
        kept = round_nearest(weight, IntegerGrid(4, 32, False, min_zero=1), candidates=candidates)
        assert int(kept.weight.zeros.min()) >= 1


def test_group_size_that_does_not_divide_says_which_does() -> None:
    with pytest.raises(BadInputError, match="128 does not divide rows of 576 weights: take 64 or 32"):
        IntegerGrid(4, 128).span(576)
    assert IntegerGrid(4, -1).span(576) == 576
    with pytest.raises(BadInputError, match="bits must be 2, 3, 4 or 8, not 5"):
        IntegerGrid(5, 128)


@pytest.mark.parametrize("type_name", sorted(GRIDS))
def test_block_types_decode_as_readers_do_and_match_their_encoder(type_name: str) -> None:
    """Rounded to nearest without feedback, a row is what the encoder makes of it."""
    weight = _normal(6, 512, seed=8)
    importance = torch.rand(512, generator=torch.Generator().manual_seed(1)) + 0.1
    found = round_nearest(weight, BlockTypeGrid(type_name), importance)
    assert torch.allclose(dequantize(found.weight), found.values, rtol=1e-6, atol=1e-6)
    elements = GRIDS[type_name].elements
    tiled = np.concatenate(
        [
            encode(
                weight[:, start : start + elements].numpy(),
                type_name,
                importance[start : start + elements].numpy(),
            )
            for start in range(0, 512, elements)
        ],
        axis=1,
    )
    ours = found.weight.data.numpy()
    assert (tiled == ours).mean() > 0.995  # ties of rounding may fall differently


def test_fits_of_many_groups_equal_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _normal(32, 300)
    weights = torch.rand(32, 300, generator=torch.Generator().manual_seed(2))
    for symmetric, per_group in itertools.product((True, False), (True, False)):
        grid = IntegerGrid(4, 32, symmetric)
        importance = weights if per_group else weights[:, 0]
        whole = grid.fit(values, importance, 24)
        one = grid.fit(values[:, 7:8], importance[:, 7:8] if per_group else importance, 24)
        assert torch.equal(whole.scale[:, 7:8], one.scale) and torch.equal(whole.shift[:, 7:8], one.shift)
