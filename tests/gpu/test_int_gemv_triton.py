"""The GEMV over integer activations against products that torch makes of the same integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edgellm_kernels import int_gemv_triton, linear_triton
from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.int_groups import dequantize_groups, int_weight
from edgellm_kernels.operands import Prepared
from edgellm_kernels.ops import load_kernels
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, StackedWeight, prepare
from tests.support.native import random_rows
from tests.support.triton_anywhere import serve_triton_anywhere

STEPS = {"int8": 127, "int16": 127 * 128}


def rounded(x: torch.Tensor, precision: str) -> torch.Tensor:
    """x [1, K] in whole steps of the largest of every 32, f64."""
    blocks = x.view(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / STEPS[precision]
    steps = (blocks / torch.where(scales == 0, torch.inf, scales)).round()
    return (steps.double() * scales.double()).view(x.shape)


def blocks_of(name: str, n: int, k: int) -> BlockQuantWeight:
    return BlockQuantWeight(random_rows(name, n, k, 0), BlockLayout[name], k)


def grid(n: int, k: int, group: int, bits: int, act_order: bool = False):
    codes = torch.randint(0, 1 << bits, (n, k)).to(torch.uint8)
    zeros = torch.randint(0, 1 << bits, (n, k // group)).to(torch.uint8)
    scales = (torch.randn(n, k // group) * 0.01).half()
    index = (torch.arange(k) // group)[torch.randperm(k)].int() if act_order else None
    return int_weight(codes, scales, bits=bits, group_size=group, zeros=zeros, group_index=index)


def check(weight, precision: str, device: torch.device) -> None:
    n, k = weight.shape
    x, add, bias = torch.randn(1, k), torch.randn(1, n), torch.randn(n)
    exact = (
        dequantize_groups(weight) if hasattr(weight, "bits") else dequantize(weight.data, weight.layout, k)
    )
    held = prepare(replace(weight, bias=bias), device, hold="planes")
    if held.order is not None:  # what is rounded together are the activations of one group
        order = held.order.cpu()
        x_rounded = torch.empty(1, k, dtype=torch.float64)
        x_rounded[:, order] = rounded(x[:, order], precision)
    else:
        x_rounded = rounded(x, precision)
    got = linear_triton.linear(Prepared(x.to(device)), held, add.to(device), activations=precision).cpu()
    expected = x_rounded @ exact.double().T + bias + add
    largest = float(expected.abs().max())
    assert float((got - expected).abs().max()) < 2e-6 * largest
    unrounded = float((got - (x.double() @ exact.double().T + bias + add)).abs().max()) / largest
    assert 0 < unrounded < {"int8": 3e-2, "int16": 3e-4}[precision], unrounded


@pytest.mark.parametrize("precision", int_gemv_triton.PRECISIONS)
@pytest.mark.parametrize("layout", [layout.value for layout in BlockLayout])
def test_every_gguf_type(layout: str, precision: str, device: torch.device) -> None:
    """With a tail of blocks and of rows."""
    check(blocks_of(layout, 37, 768), precision, device)


@pytest.mark.parametrize("precision", int_gemv_triton.PRECISIONS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_integer_grids(group: int, precision: str, device: torch.device) -> None:
    check(grid(19, 384, group, 4, act_order=group == 64), precision, device)
    check(grid(19, 384, group, 8), precision, device)


def test_odd_shapes(device: torch.device) -> None:
    check(blocks_of("Q4_0", 23, 3968), "int8", device)
    check(blocks_of("Q4_1", 2032, 96), "int16", device)
    check(blocks_of("Q8_0", 1, 32), "int8", device)


def test_zeros_and_damage(device: torch.device) -> None:
    """Zeros give zeros, very large and very small activations keep their share, NaN stays to be seen."""
    held = prepare(blocks_of("Q4_0", 20, 96), device, hold="planes")
    weight = dequantize(blocks_of("Q4_0", 20, 96).data, BlockLayout.Q4_0, 96)
    for precision in int_gemv_triton.PRECISIONS:
        x = torch.zeros(1, 96)
        zero = linear_triton.linear(Prepared(x.to(device)), held, activations=precision)
        assert not zero.any()
        for size in (1e30, 1e-30):
            x = torch.randn(1, 96) * size
            got = linear_triton.linear(Prepared(x.to(device)), held, activations=precision).cpu()
            expected = (rounded(x, precision) / size) @ weight.double().T
            torch.testing.assert_close(got.double() / size, expected, rtol=1e-4, atol=1e-4)
        for damage in (float("nan"), float("inf")):
            x[0, 40] = damage
            got = linear_triton.linear(Prepared(x.to(device)), held, activations=precision)
            assert bool(got.isnan().all())


def test_the_largest_sums_are_whole(device: torch.device) -> None:
    """Codes and activations at the end of their ranges: nothing overflows."""
    weight = grid(3, 64, 32, 8)
    weight = replace(weight, data=torch.full_like(weight.data, -1), zeros=torch.zeros_like(weight.zeros))
    held = prepare(weight, device, hold="planes")
    x = torch.full((1, 64), 5.0, device=device)
    for precision in int_gemv_triton.PRECISIONS:
        coarse, fine, scales = int_gemv_triton.quantize(x, True, precision)
        assert coarse.tolist() == [127] * 64 and scales.tolist() == pytest.approx([5 / STEPS[precision]] * 2)
        assert precision == "int8" or not fine.any()
        got = linear_triton.linear(Prepared(x), held, activations=precision).cpu()
        torch.testing.assert_close(got, x.cpu() @ dequantize_groups(weight).T, rtol=1e-5, atol=1e-5)


def test_only_on_request_and_only_single_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_triton_anywhere(monkeypatch, device)
    monkeypatch.setattr(int_gemv_triton, "configurations", linear_triton.configurations)
    weight = StackedWeight((blocks_of("Q4_K", 24, 256), blocks_of("Q6_K", 24, 256)))
    held = prepare(weight, device, hold="planes")
    chosen = {name: load_kernels(device, preferred="triton", activations=name)
              for name in ("auto", "exact", "int16", "int8")}  # fmt: skip
    assert [kernels.activations for kernels in chosen.values()] == ["exact", "exact", "int16", "int8"]
    one, two = Prepared(torch.randn(1, 256, device=device)), Prepared(torch.randn(2, 256, device=device))
    for op in ("linear", "lm_head"):
        alone = {name: getattr(kernels, op)(one, held) for name, kernels in chosen.items()}
        assert torch.equal(alone["auto"], alone["exact"])
        off = [float((alone[name] - alone["exact"]).abs().max()) for name in ("int16", "int8")]
        assert 0 < off[0] * 20 < off[1]
    gates = {name: kernels.gate_up(one, held, "silu").values for name, kernels in chosen.items()}
    assert not torch.equal(gates["int8"], gates["exact"])
    torch.testing.assert_close(
        gates["int16"], gates["exact"], rtol=1e-2, atol=1e-2 * float(gates["exact"].abs().max())
    )
    assert torch.equal(chosen["int8"].linear(two, held), chosen["exact"].linear(two, held))
