"""GPTQ and AWQ grids on the native kernels: bits, sizes and products of what is packed as in the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from edgellm_kernels import native_packing
from edgellm_kernels.int_groups import dequantize_groups, int_weight
from edgellm_kernels.linear_native import gate_up, linear
from edgellm_kernels.linear_torch import gate_up as gate_up_torch
from edgellm_kernels.native_grids import GRID_TYPES, GridType, column_order, grid_rows, grid_type
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import Int4Weight, Int8Weight, NativeWeight, StackedWeight, prepare
from tests.support.native import Native, backends, native
from tests.support.native_cases import needs_native, one_thread

__all__ = ["one_thread"]
pytestmark = needs_native
ROWS = (1, 2, 3, 5, 9, 65)


def grid(
    bits: int,
    group: int,
    rows: int = 21,
    columns: int = 384,
    *,
    zeros: bool = True,
    order: int | None = None,
    seed: int = 0,
) -> Int4Weight | Int8Weight:
    """A random weight; ``order`` is the seed of its act-order."""
    rng = np.random.default_rng(seed)
    groups = columns // group
    index = np.arange(columns) // group
    if order is not None:
        np.random.default_rng(order).shuffle(index)
    scales = rng.uniform(0.01, 0.1, (rows, groups)) * rng.choice([-1, 1], (rows, groups))
    return int_weight(
        torch.from_numpy(rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)),
        torch.from_numpy(scales.astype(np.float16)),
        bits,
        group,
        torch.from_numpy(rng.integers(0, 1 << bits, (rows, groups), dtype=np.uint8)) if zeros else None,
        None if order is None else torch.from_numpy(index.astype(np.int32)),
        torch.from_numpy(rng.standard_normal(rows).astype(np.float32)),
    )


@pytest.fixture(scope="module", params=backends())
def pools(request: pytest.FixtureRequest) -> Iterator[list[Native]]:
    """One back end with 1, 2 and 3 threads."""
    with ExitStack() as stack:
        yield [stack.enter_context(native(request.param, count)) for count in (1, 2, 3)]


def pack(run: Native, kind: GridType, weight: Int4Weight | Int8Weight) -> torch.Tensor:
    n, k = weight.shape
    rows = grid_rows(weight, kind, column_order(weight))
    out = torch.empty(-(-n // 8) * 8 * kind.row_bytes(k), dtype=torch.uint8)
    arguments = (kind.type_id, rows.data_ptr(), n, k, out.data_ptr(), out.numel())
    run.library.call("edgellm_pack", run.pool, *arguments)
    return out


def multiply(
    run: Native, kind: GridType, packed: torch.Tensor, n: int, x: torch.Tensor, exact: bool
) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape[0], n)
    blocks = None if exact else run.quantize(x)
    run.library.call(
        "edgellm_linear", run.pool, kind.type_id, packed.data_ptr(), n, x.shape[1], None, x.data_ptr(),
        None if blocks is None else blocks.data_ptr(), x.shape[0], out.data_ptr(), n, None,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", GRID_TYPES, ids=lambda kind: f"{kind.bits}x{kind.unit}")
def test_packed_grids_keep_bits_bounds_and_a_row_s_bits(pools: list[Native], kind: GridType) -> None:
    """Decoded: the reference's f32 bits. Products: within half a step of each activation. A row: the same
    bits alone, among others, and with any number of threads.
    """
    weight = grid(kind.bits, kind.unit)
    assert grid_type(weight) == kind
    n, k = weight.shape
    values = dequantize_groups(weight)
    packed = pack(pools[1], kind, weight)
    ids, decoded = torch.arange(n), torch.empty(n, k)
    arguments = (kind.type_id, packed.data_ptr(), n, k, ids.data_ptr(), n, 1.0, decoded.data_ptr())
    pools[2].library.call("edgellm_decode_rows", pools[2].pool, *arguments)
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))
    x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(1))
    x[:, :32] *= 1000  # one loud block must not coarsen the others
    want = x.double() @ values.double().t()
    size = x.double().abs() @ values.double().abs().t()
    # In integers codes and zero points are added up apart.
    apart = x.double().abs().sum(1, keepdim=True) * weight.scales.double().abs().amax(1) * (1 << kind.bits)
    steps = x.view(len(x), -1, 32).abs().amax(2).double() / 65534
    bound = steps.repeat_interleave(32, 1) @ values.double().abs().t()
    for exact in (True, False):
        whole = multiply(pools[0], kind, packed, n, x, exact)
        error = (whole - want).abs()
        assert (error <= 3e-6 * size + (0 if exact else 1.001 * bound + 3e-7 * apart)).all()
        for count in ROWS:
            for run in pools:
                assert torch.equal(multiply(run, kind, packed, n, x[:count], exact), whole[:count])
        assert torch.equal(multiply(pools[0], kind, packed, n, x[-1:], exact), whole[-1:])


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "order", "bits_per_weight"),
    [
        (4, 128, True, None, 4.19),
        (4, 128, False, 7, 4.19),
        (4, 64, True, None, 4.38),
        (4, 64, False, 7, 4.38),
        (4, 32, False, None, 4.5),
        (4, 32, True, 7, 4.75),
        (4, 384, True, None, 4.19),
        (3, 128, True, 7, 4.19),
        (2, 64, False, None, 4.38),
        (8, 128, True, None, 8.19),
        (8, 64, True, 7, 8.75),
        (8, 32, False, None, 8.5),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_ops_take_grids_of_about_the_file_s_size(
    bits: int, group: int, zeros: bool, order: int | None, bits_per_weight: float, exact: bool
) -> None:
    """Every width, group and order against the torch op; three projections, two of them in one order."""
    parts = tuple(
        grid(bits, group, rows, zeros=zeros, order=None if order is None else order + (rows == 24), seed=rows)
        for rows in (16, 32, 24)
    )
    held = prepare(StackedWeight(parts), hold="native")
    matrices = held.parts if isinstance(held, StackedWeight) else (held,)
    assert len(matrices) == (1 if order is None else 2)
    assert all(isinstance(matrix, NativeWeight) for matrix in matrices)
    rows, columns = held.shape
    assert sum(matrix.data.nbytes for matrix in matrices) * 8 <= bits_per_weight * rows * columns + 8 * 64
    x = torch.randn((3, columns), generator=torch.Generator().manual_seed(3))
    values = torch.cat([dequantize_groups(part) for part in parts])
    bias = torch.cat([part.bias for part in parts if part.bias is not None])
    rounding = (1e-6 if exact else 1e-4) * float((x.abs() @ values.abs().t()).max())
    got = linear(Prepared(x), held, exact=exact)
    torch.testing.assert_close(got, x @ values.t() + bias, rtol=1e-3, atol=rounding)
    add = torch.randn(got.shape)
    assert torch.equal(linear(Prepared(x[1:2]), held, add[1:2], exact=exact), (got + add)[1:2])
    pair = StackedWeight((parts[1], parts[1]))
    got = gate_up(Prepared(x), prepare(pair, hold="native"), "silu", exact=exact).values
    want = gate_up_torch(Prepared(x), prepare(pair), "silu").values
    torch.testing.assert_close(got, want, rtol=1e-2, atol=rounding * float(want.abs().max()))


def test_what_no_grid_holds_exactly_stays_f32() -> None:
    """Uneven groups in act-order, groups of no whole unit, and scales beyond f16."""
    uneven = grid(4, 64)
    index = torch.arange(384, dtype=torch.int32) // 64
    index[0] = 5
    codes = torch.randint(0, 16, (8, 384), dtype=torch.uint8)
    scales = torch.full((8, 6), 0.5, dtype=torch.float16)
    for weight in (
        int_weight(codes, scales, 4, 64, group_index=index),
        int_weight(codes[:, :240], scales[:, :3], 4, 80),
        int_weight(codes, torch.full((8, 6), 1.0 + 2**-12), 4, 64),
    ):
        assert grid_type(weight) is None
        held = native_packing.pack_weight(weight)
        assert isinstance(held, NativeWeight) and held.type_id == 0 and held.order is None
        x = torch.randn((2, weight.shape[1]))
        want = x @ dequantize_groups(weight).t()
        torch.testing.assert_close(linear(Prepared(x), held, exact=True), want, rtol=1e-4, atol=1e-3)
    assert grid_type(uneven) is not None
