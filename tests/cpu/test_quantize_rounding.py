"""Error feedback against a plain reading of the papers, and what it must never do."""

from __future__ import annotations

import pytest
import torch

from edgellm_quantize.block_grids import GRIDS
from edgellm_quantize.grids import BlockTypeGrid, Grid, IntegerGrid, dequantize
from edgellm_quantize.rounding import (
    RoundingOptions,
    asymmetric_target,
    column_order,
    gptq,
    importance_of,
    output_error,
    round_nearest,
)


def _problem(
    rows: int = 48, columns: int = 128, tokens: int = 600, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """A weight and correlated inputs [tokens, columns] with channels of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(tokens, 16, generator=draw) @ torch.randn(16, columns, generator=draw)
    inputs = (0.5 * shared + torch.randn(tokens, columns, generator=draw)) * torch.exp(
        0.7 * torch.randn(columns, generator=draw)
    )
    return torch.randn(rows, columns, generator=draw), inputs


def _obq_in_a_fixed_order(
    weight: torch.Tensor, hessian: torch.Tensor, group: int, damping: float
) -> torch.Tensor:
    """The paper's recursion read literally (arXiv 2210.17323, eq. 2 and 3): after each column the remaining
    weights move along its row of the inverse, and the column is eliminated from the inverse; f64, no blocks.
    """
    work, out = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    size = len(hessian)
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(
        size, dtype=torch.float64
    )
    inverse = torch.linalg.inv(damped)
    for column in range(size):
        if column % group == 0:
            largest = work[:, column : column + group].float().abs().amax(1)
            scale = (2 * largest / 15).half().double()
        code = (work[:, column] / scale).round().clamp(-8, 7)
        out[:, column] = code * scale
        error = (work[:, column] - out[:, column]) / inverse[column, column]
        work[:, column:] -= error[:, None] * inverse[column, column:]
        inverse = (
            inverse - inverse[:, column : column + 1] @ inverse[column : column + 1] / inverse[column, column]
        )
    return out.float()


def test_feedback_is_the_papers() -> None:
    """Blocks, the Cholesky form and lazy updates change nothing: all but a few codes at ties are the same."""
    weight, inputs = _problem()
    hessian = inputs.t() @ inputs
    options = RoundingOptions(candidates=0, damping=0.05, ordered=False)
    found = gptq(weight, hessian, IntegerGrid(4, 32), options)
    wanted = _obq_in_a_fixed_order(weight, hessian, 32, 0.05)
    same = ((found.values - wanted).abs() < 1e-4).float().mean()
    assert float(same) > 0.99
    assert output_error(weight, found.values, hessian) == pytest.approx(
        output_error(weight, wanted, hessian), rel=0.02
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_each_step_lowers_the_output_error(bits: int, group: int, symmetric: bool) -> None:
    """Nearest > feedback > feedback with a search and order > the same with coordinate descent."""
    weight, inputs = _problem(seed=bits)
    hessian = inputs.t() @ inputs
    grid = IntegerGrid(bits, group, symmetric)
    searched = round_nearest(weight, grid, importance_of(hessian.diagonal()), 40).values
    plain = gptq(weight, hessian, grid, RoundingOptions(candidates=0, ordered=False)).values
    best = gptq(weight, hessian, grid, RoundingOptions(candidates=40))
    descended = gptq(weight, hessian, grid, RoundingOptions(candidates=40, descent_passes=2))
    errors = [output_error(weight, values, hessian) for values in (searched, best.values, descended.values)]
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[1] < 0.95 * output_error(weight, plain, hessian)
    for found in (best, descended):
        assert found.method == "gptq" and found.notices == ()
        assert torch.allclose(dequantize(found.weight), found.values, rtol=1e-5, atol=1e-6)
        assert int(found.weight.codes.max()) <= 2**bits - 1


@pytest.mark.parametrize("type_name", sorted(GRIDS))
def test_feedback_on_block_types_beats_their_weighted_search(type_name: str) -> None:
    """Same bytes per weight, on k-quant grids and on the types that stand in for them on other rows."""
    weight, inputs = _problem(rows=32, columns=512, tokens=1500, seed=4)
    hessian = inputs.t() @ inputs
    grid: Grid = BlockTypeGrid(type_name, "fast")
    searched = round_nearest(weight, grid, importance_of(hessian.diagonal()))
    found = gptq(weight, hessian, grid, RoundingOptions(descent_passes=1))
    assert found.weight.data.shape == searched.weight.data.shape
    assert torch.allclose(dequantize(found.weight), found.values, rtol=1e-6, atol=1e-6)
    bound = 0.8 if type_name != "Q8_0" else 0.95
    assert output_error(weight, found.values, hessian) < bound * output_error(
        weight, searched.values, hessian
    )


def test_dead_inputs_and_few_tokens_are_survived() -> None:
    """Fewer tokens than inputs, inputs that are always 0, two that are equal: finite codes, and notices."""
    weight, inputs = _problem(tokens=20)
    inputs[:, 5] = 0
    inputs[:, 40] = inputs[:, 41]
    hessian = inputs.t() @ inputs
    found = gptq(weight, hessian, IntegerGrid(4, 32), RoundingOptions(descent_passes=1))
    assert torch.isfinite(found.values).all()
    assert [notice.kind for notice in found.notices] == ["dead_inputs"]
    assert "1 of 128" in found.notices[0].detail
    # A dead input's weights are kept near what they were: the calibration has not seen everything.
    assert float((found.values[:, 5] - weight[:, 5]).abs().mean()) < 0.2


def test_a_hessian_that_needs_more_damping_says_so() -> None:
    weight, inputs = _problem()
    hessian = inputs.t() @ inputs
    hessian -= 0.3 * hessian.diagonal().mean() * torch.eye(len(hessian))  # indefinite
    found = gptq(weight, hessian, IntegerGrid(4, 32), RoundingOptions(damping=0.05))
    kinds = [notice.kind for notice in found.notices]
    assert kinds == ["damping_raised"] and "instead of 0.05" in found.notices[0].detail
    assert torch.isfinite(found.values).all()


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_a_useless_hessian_falls_back_to_nearest_and_says_so(broken: float) -> None:
    weight, _ = _problem()
    found = gptq(weight, torch.full((128, 128), broken), IntegerGrid(4, 32))
    assert found.method == "rtn" and found.notices[0].kind == "rounded_to_nearest"
    assert torch.isfinite(found.values).all()
    nearest = round_nearest(weight, IntegerGrid(4, 32), torch.ones(128)).values
    assert float((found.values - weight).square().mean()) < 1.05 * float((nearest - weight).square().mean())


def test_columns_run_by_size_within_groups_and_stay_in_their_groups() -> None:
    diagonal = torch.tensor([1.0, 3.0, 2.0, 2.0, 9.0, 0.0, 9.0, 4.0])
    assert column_order(diagonal, 4).tolist() == [4, 6, 7, 5, 1, 2, 3, 0]
    assert column_order(diagonal, 4, ordered=False).tolist() == list(range(8))
    assert column_order(diagonal, 8).tolist() == [4, 6, 7, 1, 2, 3, 0, 5]


def test_asymmetric_target_is_the_least_squares_solution() -> None:
    """With share 1 and hardly any damping W' Xq = W X is solved as torch's least squares solves it."""
    weight, original = _problem(rows=8, columns=32, tokens=400)
    quantized = original + 0.1 * torch.randn(original.shape, generator=torch.Generator().manual_seed(1))
    hessian, cross = quantized.t() @ quantized, (original - quantized).t() @ quantized
    found = asymmetric_target(weight, hessian, cross, 1.0, 1e-9)
    wanted = torch.linalg.lstsq(quantized.double(), (original @ weight.t()).double()).solution.t().float()
    assert torch.allclose(found, wanted, atol=1e-4)
    half = asymmetric_target(weight, hessian, cross, 0.5, 1e-9)
    assert torch.allclose(half, (weight + wanted) / 2, atol=1e-4)


def test_the_same_input_gives_the_same_codes() -> None:
    weight, inputs = _problem()
    hessian = inputs.t() @ inputs
    kept = hessian.clone()
    first = gptq(weight, hessian, IntegerGrid(3, 32), RoundingOptions(descent_passes=1))
    second = gptq(weight, hessian, IntegerGrid(3, 32), RoundingOptions(descent_passes=1))
    assert torch.equal(first.weight.codes, second.weight.codes) and torch.equal(hessian, kept)
