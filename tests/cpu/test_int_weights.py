"""Weights on integer grids: decoding, products and their form as GGUF blocks, against numpy and gguf."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from edgellm_kernels.int_groups import as_blocks, dequantize_groups, int_weight
from edgellm_kernels.operands import Prepared
from edgellm_kernels.ops import load_kernels
from edgellm_kernels.weights import BlockLayout, DenseWeight, Int4Weight, Int8Weight, StackedWeight, prepare
from tests.support.native_cases import needs_native

KERNELS = load_kernels("cpu", preferred="torch")
N, K = 10, 192


def example(
    bits: int, group: int, *, zeros: bool = False, shuffled: bool = False, seed: int = 0
) -> tuple[Int4Weight | Int8Weight, np.ndarray]:
    """A weight, and its values from the formula in f64 rounded once to f32."""
    rng = np.random.default_rng(seed)
    groups = -(-K // group)
    codes = rng.integers(0, 1 << bits, (N, K))
    scales = (rng.uniform(0.01, 0.1, (N, groups)) * rng.choice([-1, 1], (N, groups))).astype(np.float16)
    zero = rng.integers(0, 1 << bits, (N, groups)) if zeros else np.full((N, groups), 1 << (bits - 1))
    index = np.arange(K) // group
    if shuffled:
        rng.shuffle(index)
    values = scales.astype(np.float64)[:, index] * (codes - zero[:, index])
    weight = int_weight(
        torch.from_numpy(codes.astype(np.uint8)),
        torch.from_numpy(scales),
        bits,
        group,
        torch.from_numpy(zero.astype(np.uint8)) if zeros else None,
        torch.from_numpy(index.astype(np.int32)) if shuffled else None,
    )
    return weight, values.astype(np.float32)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 80, K])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_grid_decodes_to_the_formula(bits: int, group: int, zeros: bool, shuffled: bool) -> None:
    """E04, E07: every width, group, zero point and column order gives the formula's f32 bits."""
    weight, values = example(bits, group, zeros=zeros, shuffled=shuffled)
    assert weight.shape == (N, K) and isinstance(weight, Int8Weight if bits == 8 else Int4Weight)
    assert np.array_equal(dequantize_groups(weight).numpy(), values)
    x = torch.randn((3, K))
    bias = torch.randn(N)
    expected = x @ torch.from_numpy(values).t()
    # Sums in another order: by what is added up, not by what is left of it.
    rounding = 1e-6 * float((x.abs() @ torch.from_numpy(values).abs().t()).max())
    stacked = StackedWeight((weight, DenseWeight(torch.ones(2, K), torch.zeros(2))))
    for hold in ("dense", "blocks"):
        got = KERNELS.linear(Prepared(x), prepare(stacked, hold=hold))
        torch.testing.assert_close(got[:, :N], expected, rtol=1e-5, atol=rounding)
        biased = int_weight_with_bias(weight, bias)
        got = KERNELS.linear(Prepared(x), prepare(biased, hold=hold))
        torch.testing.assert_close(got, expected + bias, rtol=1e-5, atol=rounding)


def int_weight_with_bias(weight: Int4Weight | Int8Weight, bias: torch.Tensor) -> Int4Weight | Int8Weight:
    from dataclasses import replace

    return replace(weight, bias=bias)


@pytest.mark.parametrize("group", [32, 64, K])
@pytest.mark.parametrize(
    ("bits", "zeros", "layout"),
    [
        (2, False, BlockLayout.Q4_0),
        (3, False, BlockLayout.Q4_0),
        (4, False, BlockLayout.Q4_0),
        (2, True, BlockLayout.Q5_0),
        (3, True, BlockLayout.Q5_0),
        (4, True, BlockLayout.Q5_0),
        (8, False, BlockLayout.Q8_0),
    ],
)
def test_blocks_have_the_same_bits(bits: int, zeros: bool, layout: BlockLayout, group: int) -> None:
    """gguf's own decoder reads from the blocks what the formula says."""
    weight, values = example(bits, group, zeros=zeros)
    blocks = as_blocks(weight)
    assert blocks is not None and blocks.layout is layout
    kind = gguf.GGMLQuantizationType[layout.value]
    assert np.array_equal(gguf.quants.dequantize(blocks.data.numpy(), kind), values)


def test_what_blocks_cannot_hold_is_left_as_it_is() -> None:
    """Act-order, other groups, scales beyond f16 and wide differences have no exact blocks."""
    assert as_blocks(example(4, 64, shuffled=True)[0]) is None
    assert as_blocks(example(4, 80)[0]) is None
    assert as_blocks(example(8, 64, zeros=True)[0]) is None
    fine = torch.full((N, 1), 1.0 + 2**-12)
    assert as_blocks(int_weight(torch.zeros((N, K), dtype=torch.uint8), fine, 4, K)) is None


def test_parts_that_do_not_fit_are_refused() -> None:
    """E04: a group index out of range or of another length is never ignored."""
    codes, scales = torch.zeros((N, K), dtype=torch.uint8), torch.ones((N, 3))
    for arguments in (
        {"group_size": 32},
        {"group_size": 64, "zeros": torch.zeros((N, 2), dtype=torch.uint8)},
        {"group_size": 64, "group_index": torch.full((K,), 3, dtype=torch.int32)},
        {"group_size": 64, "group_index": torch.full((K,), -1, dtype=torch.int32)},
        {"group_size": 64, "group_index": torch.zeros(K - 1, dtype=torch.int32)},
    ):
        with pytest.raises(ValueError):
            int_weight(codes, scales, 4, **arguments)
    with pytest.raises(ValueError):
        int_weight(codes, scales, 5, 64)
    trivial = int_weight(codes, scales, 4, 64, group_index=torch.arange(K) // 64)
    assert trivial.group_index is None


@needs_native
def test_native_kernels_get_packed_grids() -> None:
    """Grids are packed, act-order too (with 8 bytes per column for the order), not held as f32."""
    from edgellm_kernels.weights import NativeWeight, dense_bytes

    native = load_kernels("cpu", preferred="native")
    x = torch.randn((3, K))
    for arguments, share in (
        ({"bits": 4, "group": 64}, 0.2),
        ({"bits": 3, "group": 32, "zeros": True}, 0.25),
        ({"bits": 8, "group": 64}, 0.35),
        ({"bits": 4, "group": 64, "shuffled": True}, 0.3),
    ):
        weight, values = example(**arguments)
        held = prepare(weight, hold="native")
        assert isinstance(held, NativeWeight) and held.nbytes < share * 1.7 * dense_bytes(weight)
        # Activations are 16-bit integers here: by what is added up, not by what is left of it.
        rounding = 1e-4 * float((x.abs() @ torch.from_numpy(values).abs().t()).max())
        torch.testing.assert_close(
            native.linear(Prepared(x), held), x @ torch.from_numpy(values).t(), rtol=1e-3, atol=rounding
        )
