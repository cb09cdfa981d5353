"""Triton linears against the products of the decoded file, in every format and for every number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from edgellm_kernels import linear_torch, linear_triton
from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.gpu_configs import kernel_for_rows, splits_of_k
from edgellm_kernels.int_groups import dequantize_groups, int_weight
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import (
    BlockLayout,
    BlockQuantWeight,
    DenseWeight,
    IntWeight,
    LinearPart,
    StackedWeight,
    prepare,
)
from tests.support.native import random_rows

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 1e-3}
"""Of the largest output: f32 sums in another order; f16 operands (11 bits) where the compute type is bf16."""


def blocks(name: str, n: int, k: int, seed: int = 0) -> BlockQuantWeight:
    return BlockQuantWeight(random_rows(name, n, k, seed), BlockLayout[name], k)


def decoded(weight: LinearPart) -> torch.Tensor:
    if isinstance(weight, BlockQuantWeight):
        return dequantize(weight.data, weight.layout, weight.in_features)
    return weight.data.float() if isinstance(weight, DenseWeight) else dequantize_groups(weight)


def grid(n: int, k: int, group: int, bits: int = 4, act_order: bool = False) -> IntWeight:
    groups = k // group
    codes = torch.randint(0, 1 << bits, (n, k)).to(torch.uint8)
    zeros = torch.randint(0, 1 << bits, (n, groups)).to(torch.uint8)
    index = (torch.arange(k) // group)[torch.randperm(k)].int() if act_order else None
    scales = (torch.randn(n, groups) * 0.01).half()
    return int_weight(codes, scales, bits=bits, group_size=group, zeros=zeros, group_index=index)


def check(
    weight: LinearPart, rows: int, device: torch.device, dtype: torch.dtype, twice: bool = False
) -> None:
    """The product is what the decoded weight gives; with ``twice`` the same bits again."""
    n, k = weight.shape
    bias, add = torch.randn(n), torch.randn(rows, n)
    x = torch.randn(rows, k)
    expected = functional.linear(x, decoded(weight), bias) + add
    held = prepare(replace(weight, bias=bias), device, hold="planes", dtype=dtype)
    add = add.to(device)
    got = linear_triton.linear(Prepared(x.to(device)), held, add, dtype=dtype)
    if twice:
        again = linear_triton.linear(Prepared(x.to(device)), held, add, dtype=dtype)
        assert torch.equal(got, again)
    error = float((got.cpu() - expected).abs().max() / expected.abs().max())
    assert error < (ERRORS[dtype] if kernel_for_rows(rows) != "dense" else 2e-2), error


@pytest.mark.parametrize("layout", [layout.value for layout in BlockLayout])
def test_every_gguf_type(layout: str, device: torch.device) -> None:
    """One row and few rows, with a tail of blocks and of rows (768 = 24 blocks, 37 rows)."""
    for rows, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        check(blocks(layout, 37, 768), rows, device, dtype)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_integer_grids(group: int, device: torch.device) -> None:
    """GPTQ and AWQ: zero points, groups, act-order, 8 bits."""
    for weight in (grid(19, 384, group, 4, group == 64), grid(19, 384, group, 8)):
        for rows in (1, 5):
            check(weight, rows, device, torch.float32)


@pytest.mark.parametrize("rows", [1, 3, 5, 16, 65])
def test_odd_shapes(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long K that no step divides (and that small products split), and many rows of a short one."""
    check(blocks("Q4_0", 23, 3968), rows, device, torch.bfloat16, twice=rows == 5)
    large = {"tokens": 16, "blocks": 4, "warps": 4, "stages": 2, "rows": 128}  # fewer programs to interpret
    sizes = {"gemv": large, "dot16": large, "dot16_f32": large}
    monkeypatch.setattr(linear_triton, "configurations", lambda gpu: sizes)
    if rows in (1, 5):
        check(blocks("Q4_1", 2032, 96), rows, device, torch.float32)


def test_many_rows_are_decoded_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the border the weight becomes floats, some rows at a time, act-order included."""
    monkeypatch.setattr(linear_triton, "_SCRATCH_ELEMENTS", 10 * 256)
    for dtype in (torch.float32, torch.bfloat16):
        check(blocks("Q6_K", 37, 256), 257, device, dtype)
        check(grid(37, 256, 64, 4, True), 257, device, dtype)


def test_huge_and_damaged_activations(device: torch.device) -> None:
    """Sums beyond f16 stay finite where operands are f16; a row of NaN stays NaN and touches no other."""
    weight = blocks("Q4_0", 20, 64)
    held = prepare(weight, device, hold="planes")
    x = torch.randn(4, 64)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2, 5] = float("nan")
    got = linear_triton.linear(Prepared(x.to(device)), held, dtype=torch.bfloat16).cpu()
    expected = x @ decoded(weight).T
    assert bool(got[2].isnan().all())
    for row in (0, 1, 3):
        torch.testing.assert_close(got[row] / x[row].abs().max(), expected[row] / x[row].abs().max(),
                                   rtol=1e-2, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up(rows: int, activation: str, device: torch.device) -> None:
    """In one launch, in two, and where gate and up have different forms; and a saturated gate."""
    for second in ("Q4_K", "Q6_K"):
        weight = StackedWeight((blocks("Q4_K", 21, 256), blocks(second, 21, 256, seed=1)))
        x = torch.randn(rows, 256)
        if rows:
            x[0] *= 1e4
        expected = linear_torch.gate_up(Prepared(x), weight, activation).values
        held = prepare(weight, device, "gate_up", "planes")
        got = linear_triton.gate_up(Prepared(x.to(device)), held, activation).values.cpu()
        scale = expected.abs().amax(dim=1, keepdim=True) if rows else 1.0
        torch.testing.assert_close(got / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_head_embedding_and_mixed_parts(device: torch.device) -> None:
    """A tied matrix gives rows with the bits of the file; parts of several forms, one of them dense."""
    table = blocks("Q6_K", 33, 256)
    held = prepare(table, device, "lm_head", "planes")
    ids = torch.tensor([32, 0, 7])
    rows = linear_triton.embed(ids.to(device), held, 2.0)  # type: ignore[arg-type]
    assert torch.equal(rows.cpu(), decoded(table)[ids] * 2.0)
    x = torch.randn(2, 256)
    logits = linear_triton.lm_head(Prepared(x.to(device)), held, 3.0).cpu()
    torch.testing.assert_close(logits, linear_torch.lm_head(Prepared(x), table, 3.0), rtol=1e-4, atol=1e-5)
    mixed = StackedWeight((table, DenseWeight(torch.randn(5, 256)), blocks("Q4_0", 7, 256)))
    expected = torch.cat([x @ decoded(part).T for part in mixed.parts], dim=1)  # type: ignore[arg-type]
    got = linear_triton.linear(Prepared(x.to(device)), prepare(mixed, device, hold="planes"))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_selection_by_rows() -> None:
    assert [kernel_for_rows(rows) for rows in (1, 2, 16, 17, 33, 256, 257)] == [
        "gemv", "dot16", "dot16", "dot32", "dot64", "dot64", "dense",
    ]  # fmt: skip
    assert splits_of_k(1000, 1000) == 1 and splits_of_k(1, 1000) == 8 and splits_of_k(1, 20) == 2
