"""Triton norms, rotary embedding and KV writes against their torch twins."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from edgellm_kernels import norm_torch, norm_triton, rope_torch, rope_triton
from edgellm_kernels.batch import GroupTables, KVStorage
from edgellm_kernels.kv_pages_triton import e4m3_code, e4m3_value
from edgellm_kernels.operands import HeadShape
from tests.support import e4m3
from tests.support.native_cases import poisoned_pages


@pytest.mark.parametrize("n", [70, 576])
def test_add_rms_norm(n: int, device: torch.device) -> None:
    """With and without something to add, with Gemma's norm of what is added; values of 1e5 in the stream."""
    x, residual, weight, post = torch.randn(3, n), torch.randn(3, n) * 1e5, torch.randn(n), torch.randn(n)
    for added, post_norm in ((x, None), (None, None), (x, post)):
        expected, total = norm_torch.add_rms_norm(added, residual, weight, 1e-5, post_norm)
        moved = [None if t is None else t.to(device) for t in (added, residual, weight, post_norm)]
        got, got_total = norm_triton.add_rms_norm(moved[0], moved[1], moved[2], 1e-5, moved[3])  # type: ignore[arg-type]
        torch.testing.assert_close(got.values.cpu(), expected.values, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_total.cpu(), total, rtol=1e-6, atol=1e-6)


def moved(kv: KVStorage, device: torch.device) -> KVStorage:
    parts = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
    return KVStorage(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def steps(codes: torch.Tensor) -> torch.Tensor:
    """int32: neighbouring values are one apart, zeros of both signs are equal."""
    bits = codes.cpu().view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits) if codes.dtype == torch.float8_e4m3fn else bits


@pytest.mark.parametrize(
    "kv_type", [("f32", "f16"), ("bf16", "bf16"), ("int8", "f32"), ("int8", "int8"), ("fp8", "fp8")]
)
@pytest.mark.parametrize("dims", [(80, 64), (64, 112)])
def test_qk_norm_rope_store(kv_type: tuple[str, str], dims: tuple[int, int], device: torch.device) -> None:
    """The stored bytes are torch's, the poison of other slots stays; partial rotation, both norms."""
    shape = HeadShape(4, 2, *dims)
    slots = torch.tensor([3, -1, 77, 40])
    qkv = torch.randn(4, shape.qkv_width)
    qkv[3] = 0.0
    cos, sin = rope_torch.rope_angles(torch.tensor([0, 5, 9, 1]), torch.rand(24), 1.0)
    gain = torch.randn(dims[0])
    for q_norm, k_norm in ((None, None), (gain, gain.flip(0))):
        ours, theirs = (poisoned_pages(5, 16, shape, kv_type) for _ in range(2))
        ours = moved(ours, device)
        empty = torch.empty(0)
        expected = rope_torch.qk_norm_rope_store(
            qkv, shape, q_norm, k_norm, 1e-6, cos, sin, theirs, 1, GroupTables(empty, empty, slots, empty)
        )
        gains = [None if gain is None else gain.to(device) for gain in (q_norm, k_norm)]
        tables = GroupTables(empty, empty, slots.to(device), empty)
        got = rope_triton.qk_norm_rope_store(
            qkv.to(device), shape, gains[0], gains[1], 1e-6, cos.to(device), sin.to(device), ours, 1, tables
        )
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)
        for page, twin in zip(ours.pages(), theirs.pages(), strict=True):
            if twin.dtype in (torch.int8, torch.float8_e4m3fn):  # a norm's last bit may move a code by one
                assert int((steps(page) - steps(twin)).abs().max()) <= 1
            else:  # NOTE: the interpreter cuts bf16 off, the GPU rounds
                rtol = (
                    2**-7 if twin.dtype == torch.bfloat16 else 1e-3 if twin.dtype == torch.float16 else 1e-5
                )
                torch.testing.assert_close(page.cpu(), twin, rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_rows_that_are_not_finite_show(kv: str, device: torch.device) -> None:
    """NaN and infinity in a quantized row reach its scale, as with torch; too large a row saturates."""
    shape = HeadShape(1, 1, 64, 64)
    qkv = torch.randn(3, shape.qkv_width)
    qkv[0, 70], qkv[1, 70], qkv[2, 70] = float("nan"), float("inf"), 1e9
    ours, theirs = (poisoned_pages(1, 16, shape, (kv, kv)) for _ in range(2))
    ours, empty, slots = moved(ours, device), torch.empty(0), torch.tensor([0, 1, 2])
    cos, sin = torch.ones(3, 32), torch.zeros(3, 32)
    rope_torch.qk_norm_rope_store(
        qkv, shape, None, None, 1e-6, cos, sin, theirs, 0, GroupTables(empty, empty, slots, empty)
    )
    tables = GroupTables(empty, empty, slots.to(device), empty)
    rope_triton.qk_norm_rope_store(
        qkv.to(device), shape, None, None, 1e-6, cos.to(device), sin.to(device), ours, 0, tables
    )
    assert ours.key_scales is not None and theirs.key_scales is not None
    torch.testing.assert_close(
        ours.key_scales.cpu()[0, 0, :3], theirs.key_scales[0, 0, :3], equal_nan=True, rtol=0, atol=0
    )
    written = (pages.keys.cpu().view(torch.int8)[0, 0, :3] for pages in (ours, theirs))
    assert torch.equal(*written)


@triton.jit
def codes_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, e4m3_code(tl.load(x + at)))


@triton.jit
def values_kernel(codes, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, e4m3_value(tl.load(codes + at)))


def test_every_e4m3_code_is_read_as_the_format_says(device: torch.device) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8, device=device), torch.empty(256, device=device)
    values_kernel[(1,)](codes.view(torch.int8), out, BLOCK=256)
    got = (out.cpu() * 256).tolist()
    for code in range(256):
        if code & 127 != 127:  # never stored
            assert got[code] == float(e4m3.value(code)), code
    assert math.copysign(1.0, got[128]) == -1.0


def test_numbers_become_the_nearest_e4m3_halves_to_even(device: torch.device) -> None:
    """At every value and midpoint, and beside them, down to the smallest f32: as the format and torch say."""
    x = e4m3.telling_values()
    padded = torch.zeros(-(-len(x) // 1024) * 1024)
    padded[: len(x)] = x
    out = torch.empty(len(padded), dtype=torch.int8, device=device)
    codes_kernel[(len(padded) // 1024,)](padded.to(device), out, BLOCK=1024)
    got = out.cpu().view(torch.uint8)[: len(x)]
    assert torch.equal(got, e4m3.nearest_codes(x.tolist()))
    assert torch.equal(got, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_an_fp8_row_has_the_bytes_of_the_torch_twin(device: torch.device) -> None:
    """Values go to their pages as they are: every byte and scale is equal, whatever their size."""
    shape = HeadShape(1, 1, 64, 64)
    qkv = torch.randn(40, shape.qkv_width) * torch.exp2(torch.arange(40.0) - 20)[:, None]
    qkv[7, 128:], qkv[8, 150], qkv[9, 128:] = 0.0, 1e30, 2e-7
    ours, theirs = (poisoned_pages(3, 16, shape, ("fp8", "fp8")) for _ in range(2))
    ours, empty, slots = moved(ours, device), torch.empty(0), torch.arange(40)
    cos, sin = torch.ones(40, 32), torch.zeros(40, 32)
    for op, kv, where in ((rope_torch, theirs, torch.device("cpu")), (rope_triton, ours, device)):
        tables = GroupTables(empty, empty, slots.to(where), empty)
        turn = cos.to(where), sin.to(where)
        op.qk_norm_rope_store(qkv.to(where), shape, None, None, 1e-6, *turn, kv, 0, tables)
    for page, twin in zip(ours.pages(), theirs.pages(), strict=True):
        assert torch.equal(page.cpu().view(torch.uint8), twin.view(torch.uint8))
