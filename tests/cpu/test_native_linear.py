"""The native linears against torch decoders and f64 products: weights' bits, error bounds, rows' bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.linear_native import embed, gate_up, linear, lm_head
from edgellm_kernels.linear_torch import linear as linear_torch
from edgellm_kernels.native_library import NativeError
from edgellm_kernels.operands import Prepared
from edgellm_kernels.ops import KernelUnavailableError, load_kernels
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, DenseWeight, StackedWeight, prepare
from tests.support.native import BLOCK_TYPES, DENSE_TYPES, Native, backends, decoded, native, random_rows

ROWS = (1, 2, 3, 5, 8, 16, 65)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Bounds on rounding are checked on the same numbers in every run."""
    torch.manual_seed(0)


def width(type_name: str, blocks: int) -> int:
    """Dense rows may have any width: here one with no block of 32 at its end."""
    unit = GGML_TYPES_BY_NAME[type_name].block_elements
    return 32 * blocks + 13 if unit == 1 else unit * blocks


@pytest.fixture(scope="module", params=backends())
def threads(request: pytest.FixtureRequest) -> Iterator[list[Native]]:
    """One back end with 1, 2 and 3 threads."""
    with ExitStack() as stack:
        yield [stack.enter_context(native(request.param, count)) for count in (1, 2, 3)]


@pytest.mark.parametrize("type_name", [*BLOCK_TYPES, *DENSE_TYPES])
@pytest.mark.parametrize("n", [8, 77])
def test_a_packed_weight_has_the_file_s_bits_and_size(threads: list[Native], type_name: str, n: int) -> None:
    k = width(type_name, 3)
    rows = random_rows(type_name, n, k)
    packed = threads[1].pack(type_name, rows, n, k)
    assert packed.numel() == -(-n // 8) * 8 * GGML_TYPES_BY_NAME[type_name].row_bytes(k)
    ours, reference = threads[2].decode(type_name, packed, n, k), decoded(type_name, rows, k)
    assert torch.equal(ours.view(torch.int32), reference.view(torch.int32))


@pytest.mark.parametrize("type_name", [*BLOCK_TYPES, *DENSE_TYPES])
def test_products_keep_their_bounds_and_a_row_its_bits(threads: list[Native], type_name: str) -> None:
    """Exact: f32 rounding. Integers: half a step, max / 65534 of each block of 32, per activation. A row has
    the same bits alone, among others, and with any number of threads.
    """
    one = threads[0]
    is_block = type_name in BLOCK_TYPES
    n, k = 77, width(type_name, 3 if GGML_TYPES_BY_NAME[type_name].block_elements == 256 else 19)
    rows = random_rows(type_name, n, k)
    packed, weight = one.pack(type_name, rows, n, k), decoded(type_name, rows, k).double()
    x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(1))
    x[:, :32] *= 1000  # one loud block must not coarsen the others
    bias, add = torch.randn(n), torch.randn(max(ROWS), n)
    want = x.double() @ weight.t() + bias + add
    size = x.double().abs() @ weight.abs().t() + bias.abs() + add.abs()
    exact = one.linear(type_name, packed, n, x, exact=True, bias=bias, add=add)
    assert ((exact - want).abs() <= 3e-6 * size).all()
    results = [(True, exact)]
    if is_block:
        steps = x.view(len(x), -1, 32).abs().amax(2).double() / 65534
        bound = steps.repeat_interleave(32, 1) @ weight.abs().t()
        integers = one.linear(type_name, packed, n, x, bias=bias, add=add)
        error = (integers - want).abs()
        assert (error <= 1.001 * bound + 3e-6 * size).all()
        assert error.max() > 0 and not torch.equal(integers, exact)
        results.append((False, integers))
    for mode, whole in results:
        for count in ROWS:
            for run in threads:
                part = run.linear(type_name, packed, n, x[:count], exact=mode, bias=bias, add=add)
                assert torch.equal(part, whole[:count]), (mode, count)
        last = one.linear(type_name, packed, n, x[-1:], exact=mode, bias=bias, add=add[-1:].contiguous())
        assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "Q6_K", "F16"])
def test_wide_weights(backend: str, type_name: str) -> None:
    """Shapes of real models: more blocks than a panel holds, rows and chunks that do not end with one."""
    n, k = 2032, 3840 if type_name == "Q6_K" else 3968
    rows = random_rows(type_name, n, k)
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(2))
    weight = decoded(type_name, rows, k)
    with native(backend, 2) as run:
        packed = run.pack(type_name, rows, n, k)
        whole = run.linear(type_name, packed, n, x)
        for count in (1, 7, 9):
            assert torch.equal(run.linear(type_name, packed, n, x[:count]), whole[:count])
    size = (x.abs() @ weight.abs().t()).double()
    assert ((whole - x.double() @ weight.double().t()).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize("backend", backends())
def test_the_largest_codes_and_activations_do_not_overflow(backend: str) -> None:
    """Every product of a block of 32 at its extreme and of one sign: exact in 32 bits."""
    k = 64
    row = torch.tensor([0, 0x3C, *[0x80] * 32], dtype=torch.uint8).repeat(k // 32)  # d = 1, q = -128
    rows = row.expand(8, -1).contiguous()
    x = torch.cat((torch.full((1, k), 3.0), torch.full((1, k), -3.0)))
    with native(backend) as run:
        packed = run.pack("Q8_0", rows, 8, k)
        for count in (1, 2):
            out = run.linear("Q8_0", packed, 8, x[:count])
            assert torch.allclose(out, (-128.0 * x.sum(1)[:count, None]).expand(-1, 8), rtol=1e-6)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(backend: str, bad: float) -> None:
    rows = random_rows("Q4_1", 8, 64)
    x = torch.randn(5, 64)
    good = x.clone()
    x[2, 40] = bad
    with native(backend) as run:
        packed = run.pack("Q4_1", rows, 8, 64)
        out, expected = run.linear("Q4_1", packed, 8, x), run.linear("Q4_1", packed, 8, good)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("backend", backends())
def test_quiet_activations_keep_their_precision(backend: str) -> None:
    """Blocks of zeros give zeros; tiny ones (down to 1e-29) as many digits as others."""
    rows = random_rows("Q5_0", 8, 64)
    x = torch.randn(3, 64)
    x[1] = 0
    with native(backend) as run:
        packed = run.pack("Q5_0", rows, 8, 64)
        out, tiny = run.linear("Q5_0", packed, 8, x), run.linear("Q5_0", packed, 8, x * 1e-29)
    assert (out[1] == 0).all()
    assert torch.allclose(tiny[0] * 1e29, out[0], rtol=1e-3, atol=1e-4)


def test_bad_shapes_are_refused_before_memory_is_touched() -> None:
    with native("portable") as run:
        rows = random_rows("Q4_0", 8, 64)
        packed = run.pack("Q4_0", rows, 8, 64)
        call, out = run.library.call, torch.empty(8)
        with pytest.raises(NativeError, match="edgellm_pack: bad argument"):
            call("edgellm_pack", run.pool, 2, rows.data_ptr(), 8, 64, packed.data_ptr(), packed.numel() - 1)
        with pytest.raises(NativeError, match="bad argument"):
            call("edgellm_pack", run.pool, 2, rows.data_ptr(), 8, 63, packed.data_ptr(), packed.numel())
        with pytest.raises(NativeError, match="bad argument"):
            call("edgellm_quantize", run.pool, out.data_ptr(), 1, 8, packed.data_ptr())
        for row in (-1, 8):
            ids = torch.tensor([row])
            with pytest.raises(NativeError, match="edgellm_decode_rows: bad argument"):
                call(
                    "edgellm_decode_rows",
                    *(run.pool, 2, packed.data_ptr(), 8, 64, ids.data_ptr(), 1, 1.0, out.data_ptr()),
                )


# --- the ops, with the library of this processor ---


def block_weight(type_name: str, n: int, k: int, seed: int, bias: bool = False) -> BlockQuantWeight:
    data = random_rows(type_name, n, k, seed)
    return BlockQuantWeight(data, BlockLayout[type_name], k, torch.randn(n) if bias else None)


@pytest.mark.parametrize("second", ["Q4_K", "Q6_K"])
def test_stacked_parts_of_equal_and_of_mixed_types(second: str) -> None:
    """q, k and v of one type become one matrix; Q4_K_M mixes them; 20 rows end within a tile."""
    parts = (
        block_weight("Q4_K", 24, 256, 1, bias=True),
        block_weight(second, 20, 256, 2),
        block_weight("Q4_K", 16, 256, 3),
    )
    packed = prepare(StackedWeight(parts), hold="native")
    groups = len(packed.parts) if isinstance(packed, StackedWeight) else 1
    assert groups == (2 if second == "Q4_K" else 3)
    noise = torch.Generator().manual_seed(5)
    x = Prepared(torch.randn(3, 256, generator=noise))
    add = torch.randn(3, 60, generator=noise)
    want = linear_torch(x, StackedWeight(parts), add.clone())
    assert torch.allclose(linear(x, packed, add, exact=True), want, rtol=1e-4, atol=1e-4)
    # Sums of 256 products of up to some hundreds: 16-bit activations cost them thousandths.
    assert torch.allclose(linear(x, packed, add), want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("half", [32, 44])
def test_gate_up_is_its_torch_twin(activation: str, half: int) -> None:
    weight = StackedWeight((block_weight("Q4_1", half, 64, 1), block_weight("Q4_1", half, 64, 2)))
    x = Prepared(torch.randn(9, 64))
    reference = load_kernels(preferred="torch").gate_up(x, weight, activation).values
    packed = prepare(weight, op="gate_up", hold="native")
    exact = gate_up(x, packed, activation, exact=True)
    assert torch.allclose(exact.values, reference, rtol=1e-5, atol=1e-5) and exact.quantized is None
    ours = gate_up(x, packed, activation)
    assert torch.allclose(ours.values, reference, rtol=1e-3, atol=1e-3)
    assert (ours.quantized is not None) == (half % 32 == 0)
    alone = gate_up(Prepared(x.values[4:5]), packed, activation)
    assert torch.equal(alone.values, ours.values[4:5])


def test_head_and_embedding_share_a_packed_matrix() -> None:
    weight = block_weight("Q8_0", 77, 64, 4)
    table = prepare(weight, op="lm_head", hold="native")
    torch_kernels = load_kernels(preferred="torch")
    ids = torch.tensor([76, 0, 33, 33])
    assert torch.equal(embed(ids, table, 3.0), torch_kernels.embed(ids, weight, 3.0))
    x = Prepared(torch.randn(2, 64, generator=torch.Generator().manual_seed(3)) * 10)
    want = torch_kernels.lm_head(x, weight, 5.0)
    # Scores of hundreds before the cap: 16-bit activations cost them up to some thousandths.
    assert torch.allclose(lm_head(x, table, 5.0), want, rtol=1e-3, atol=5e-3)


def test_the_native_kernels_are_chosen_and_named() -> None:
    chosen = load_kernels()
    assert {chosen.chosen[op] for op in ("linear", "gate_up", "lm_head", "embed")} == {"native"}
    assert chosen.activations == "int16" and load_kernels(activations="exact").activations == "exact"
    assert load_kernels(preferred="torch").activations == "exact"
    with pytest.raises(KernelUnavailableError, match="int16 activations need the native or triton kernels"):
        load_kernels(preferred="torch", activations="int16")
    with pytest.raises(KernelUnavailableError, match="int8 activations need the triton kernels on a GPU"):
        load_kernels(activations="int8")
    with pytest.raises(KernelUnavailableError, match="activations cannot be 'int4'"):
        load_kernels(activations="int4")
    packed = prepare(DenseWeight(torch.randn(8, 32)), hold="native")
    with pytest.raises(TypeError, match="packed for the native kernels"):
        linear_torch(Prepared(torch.randn(1, 32)), packed)
