"""Weights in planes for the GPU: decoding them gives the bits of the file, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edgellm_kernels import gpu_layouts, linear_torch
from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.gpu_layouts import FORMS, decode_planes
from edgellm_kernels.int_groups import dequantize_groups, int_weight
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import (
    BlockLayout,
    BlockQuantWeight,
    DenseWeight,
    IntWeight,
    PlaneWeight,
    StackedWeight,
    prepare,
)
from tests.support.native import random_rows


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def grid(
    bits_: int, n: int, k: int, group: int, *, zeros: bool = True, act_order: bool = False, seed: int = 0
) -> IntWeight:
    """A weight on an integer grid with random codes, some scales negative."""
    rng = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits_, (n, k), generator=rng).to(torch.uint8)
    scales = (torch.randn((n, groups), generator=rng) * 0.01).half()
    points = torch.randint(0, 1 << bits_, (n, groups), generator=rng).to(torch.uint8) if zeros else None
    index = None
    if act_order:
        index = (torch.arange(k) // group)[torch.randperm(k, generator=rng)].int()
    return int_weight(codes, scales, bits=bits_, group_size=group, zeros=points, group_index=index)


@pytest.mark.parametrize("layout", list(BlockLayout), ids=lambda layout: layout.value)
def test_every_gguf_type_keeps_its_bits(layout: BlockLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of rows, packed in several pieces; the size is the file's, or a little more."""
    k, n = 768, 37
    monkeypatch.setattr(gpu_layouts, "_CHUNK_ELEMENTS", 10 * k)
    data = random_rows(layout.value, n, k)
    packed = prepare(BlockQuantWeight(data, layout, k), hold="planes")
    assert isinstance(packed, PlaneWeight) and packed.form == layout.value and packed.shape == (n, k)
    assert torch.equal(bits(decode_planes(packed)), bits(dequantize(data, layout, k)))
    assert torch.equal(bits(decode_planes(packed, 5, 9)), bits(dequantize(data[5:9], layout, k)))
    assert data.nbytes <= packed.nbytes <= 1.03 * data.nbytes + n * k // 128
    assert packed.codes.shape[1] % (8 if FORMS[packed.form].low_bits == 2 else 16) == 0


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 384])
@pytest.mark.parametrize("bits_", [2, 4, 8])
def test_integer_grids_keep_their_bits(bits_: int, group: int, act_order: bool) -> None:
    for zeros in (False, True):
        weight = grid(bits_, 11, 384, group, zeros=zeros, act_order=act_order and group < 384)
        packed = prepare(weight, hold="planes")
        assert isinstance(packed, PlaneWeight)
        assert (packed.order is not None) == (weight.group_index is not None)
        assert torch.equal(bits(decode_planes(packed)), bits(dequantize_groups(weight)))


def test_scales_that_f16_cannot_hold_stay_f32() -> None:
    weight = grid(4, 3, 64, 32)
    weight = replace(weight, scales=torch.full((3, 2), 1e-9))
    packed = prepare(weight, hold="planes")
    assert isinstance(packed, PlaneWeight) and packed.scales.dtype == torch.float32
    assert torch.equal(bits(decode_planes(packed)), bits(dequantize_groups(weight)))


@pytest.mark.parametrize(("k", "group"), [(80, 16), (96, 64), (48, 48)])
def test_groups_that_are_no_whole_blocks_become_floats(k: int, group: int) -> None:
    weight = grid(4, 5, k, group)
    if (k, group) == (96, 64):  # a last group of fewer columns is a whole block here
        packed = prepare(weight, hold="planes")
        assert isinstance(packed, PlaneWeight)
        assert torch.equal(decode_planes(packed), dequantize_groups(weight))
        return
    held = prepare(weight, hold="planes")
    assert isinstance(held, DenseWeight) and torch.equal(held.data, dequantize_groups(weight))


def test_parts_of_one_form_become_one_matrix() -> None:
    """Rows one after another with any subset of biases; other forms stay apart, and torch reads them all."""
    k = 256
    first, second, third = (
        BlockQuantWeight(random_rows(name, n, k, seed=n), BlockLayout[name], k)
        for name, n in (("Q4_K", 6), ("Q4_K", 4), ("Q6_K", 5))
    )
    second = replace(second, bias=torch.randn(4))
    dense = DenseWeight(torch.randn(3, k))
    held = prepare(StackedWeight((first, second, third, dense)), hold="planes")
    assert isinstance(held, StackedWeight)
    assert [part.shape[0] for part in held.parts] == [10, 5, 3]
    x = torch.randn(2, k)
    expected = linear_torch.linear(Prepared(x), StackedWeight((first, second, third, dense)))
    torch.testing.assert_close(linear_torch.linear(Prepared(x), held), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="share in_features"):
        prepare(StackedWeight((dense, DenseWeight(torch.randn(3, 64)))), hold="planes")
    orders = [grid(4, 4, 128, 32, act_order=True, seed=seed) for seed in (0, 1)]
    apart = prepare(StackedWeight(tuple(orders)), hold="planes")
    assert isinstance(apart, StackedWeight) and len(apart.parts) == 2
