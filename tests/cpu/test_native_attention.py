"""Native attention, KV store, rope and norms against torch, and the bits of a row in any company."""

from __future__ import annotations

import ctypes
import math
import threading

import pytest
import torch

from edgellm_kernels import attention_native, attention_torch, norm_native, norm_torch, rope_torch
from edgellm_kernels.batch import GroupTables
from edgellm_kernels.native_library import NativeError, load_library
from edgellm_kernels.operands import HeadShape
from tests.support.native_cases import (
    PagedStories,
    Story,
    needs_native,
    one_thread,
    poisoned_pages,
    threads,
    with_slots,
)

__all__ = ["one_thread"]

pytestmark = needs_native

MIXED = [
    Story(300, 1, seed=1),
    Story(1, 1, seed=2),
    Story(137, 20, seed=3),
    Story(128, 3, seed=4),
    Story(260, 70, frozenset({0, 3, 9, 10}), seed=5),
]


def attend(stories: PagedStories, rows=None, *, padding=0, native=True, **options) -> torch.Tensor:
    q, batch, tables = stories.batch(rows, padding)
    module = attention_native if native else attention_torch
    options.setdefault("scale", 1 / math.sqrt(q.shape[2]))
    return module.paged_attention(q, stories.kv, 1, tables, batch, **options).values


class MallocCounts(ctypes.Structure):
    """What mallinfo2 says, in bytes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def bytes_in_use() -> int:
    """Of all of malloc's blocks."""
    counts = ctypes.CDLL(None).mallinfo2
    counts.restype = MallocCounts
    found = counts()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("kv_type", [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("int8", "int8")])
@pytest.mark.parametrize(
    "shape",
    [HeadShape(6, 2, 64, 64), HeadShape(4, 4, 80, 80), HeadShape(2, 1, 96, 96), HeadShape(8, 1, 112, 112),
     HeadShape(4, 2, 128, 128), HeadShape(4, 1, 256, 256)],
    ids=lambda s: f"{s.num_heads}x{s.num_kv_heads}x{s.k_dim}",
)  # fmt: skip
def test_ragged_batches_equal_torch(kv_type: tuple[str, str], shape: HeadShape) -> None:
    stories = PagedStories(MIXED, shape, kv_type)
    for options in ({}, {"window": 100}, {"softcap": 5.0, "window": 17}):
        expected = attend(stories, native=False, **options)
        torch.testing.assert_close(attend(stories, **options), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 200])
@pytest.mark.parametrize("shape", [HeadShape(3, 3, 8, 24), HeadShape(70, 1, 20, 12), HeadShape(5, 1, 13, 7)])
def test_odd_dims_and_block_sizes(block_size: int, shape: HeadShape) -> None:
    """Heads of no whole vector, more heads than a tile has rows, blocks across tile borders."""
    stories = PagedStories(
        [Story(150, 4, frozenset({0}), seed=1), Story(200, 9)], shape, ("f16", "int8"), block_size
    )
    for window in (None, 1, 50):
        expected = attend(stories, window=window, native=False)
        torch.testing.assert_close(attend(stories, window=window), expected, rtol=2e-5, atol=2e-6)


def test_rows_that_see_nothing_are_zero() -> None:
    """Rows behind the last sequence, and rows whose window lies in evicted blocks."""
    stories = PagedStories([Story(64, 4, frozenset({2, 3})), Story(20, 1)], HeadShape(4, 2, 64, 64))
    got = attend(stories, window=16, padding=3)
    assert torch.equal(got[:4], torch.zeros_like(got[:4])) and torch.equal(got[5:], torch.zeros_like(got[5:]))
    assert bool((got[4] != 0).any()) and bool(got.isfinite().all())


def test_huge_scores_and_damaged_queries() -> None:
    """Scores of 1e6 stay finite; a query of NaN gives NaN, and nobody else feels it."""
    stories = PagedStories([Story(200, 2), Story(100, 2, seed=7)], HeadShape(4, 2, 64, 64))
    expected = attend(stories, scale=1e6, native=False)
    torch.testing.assert_close(attend(stories, scale=1e6), expected, rtol=1e-4, atol=1e-5)
    whole = attend(stories)
    stories.queries[0][198] = float("nan")
    damaged = attend(stories)
    assert bool(damaged[0].isnan().all()) and torch.equal(damaged[1:], whole[1:])


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
@pytest.mark.parametrize("options", [{}, {"window": 150, "softcap": 20.0}], ids=["plain", "window"])
def test_a_row_has_the_same_bits_in_any_company(kv_type: str, options: dict[str, float]) -> None:
    """Alone, in batches of 2, 5 and 16, in chunks of 7, 64 and 512, with 1, 2 and 3 threads."""
    shape = HeadShape(6, 2, 64, 64)
    length = 700
    holes = frozenset({1, 20, 21})
    stories = PagedStories(
        [Story(length, 1, holes), *(Story(40 + 37 * i, 1 + i % 3, seed=i + 1) for i in range(15))],
        shape, (kv_type, kv_type),
    )  # fmt: skip
    with threads(1):
        alone = torch.cat([attend(stories, [(0, range(p, p + 1))], **options) for p in range(length)])
    assert bool(alone.isfinite().all())
    for count in (1, 2, 3):
        with threads(count):
            for chunk in (7, 64, 512):
                cut = [attend(stories, [(0, range(a, min(a + chunk, length)))], **options)
                       for a in range(0, length, chunk)]  # fmt: skip
                assert torch.equal(torch.cat(cut), alone)
            for size in (2, 5, 16):
                others = [(i, range(s.length - s.queries, s.length)) for i, s in enumerate(stories.stories)]
                rows = [*others[1:size], (0, range(650, 651))]
                assert torch.equal(attend(stories, rows, **options)[-1:], alone[650:651])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="reads the counts of glibc 2.33")
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_few_queries_at_a_long_context_take_bounded_memory(rows: int) -> None:
    """The tiles of one row are dealt out among the threads, the queries of several: a part per tile and query
    took 4.5 MB here, and grew with the context. The bits are those of one thread."""
    length = 12_000
    stories = PagedStories([Story(length, rows)], HeadShape(4, 1, 128, 128))
    with threads(1):
        expected = attend(stories)
    grown: list[int] = []

    def measure() -> None:  # its own thread: buffers are kept by thread
        before = bytes_in_use()
        assert torch.equal(attend(stories), expected)
        grown.append(bytes_in_use() - before)

    with threads(2):
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    parts = 4 * 4 * 130 * -(-length // 128) if rows == 1 else 1 << 19
    assert grown[0] < parts + 600_000, grown


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("pairs", [0, 5, 16, 32])
def test_stored_bytes_equal_torch(kv_type: str, pairs: int) -> None:
    """Without norms every operation rounds as torch's does: rotated q and pages are equal bit for bit."""
    shape = HeadShape(6, 2, 64, 72)
    rng = torch.Generator().manual_seed(pairs)
    qkv = torch.randn((9, shape.qkv_width), generator=rng) * torch.logspace(-9, 6, 9)[:, None]
    qkv[3, shape.q_width : shape.q_width + 64] = 0.0
    qkv[4, -1] = float("nan")
    qkv[5, -3] = float("-inf")
    angles = torch.randn((9, pairs), generator=rng) * 100
    slots = torch.tensor([3, 17, -1, 0, 8, 20, 31, 5, 40])
    none = torch.zeros((1, 1), dtype=torch.int32)
    tables = GroupTables(none, none, slots, none[0])
    made = []
    for op in (attention_native.qk_norm_rope_store, rope_torch.qk_norm_rope_store):
        kv = poisoned_pages(3, 16, shape, (kv_type, kv_type))
        q = op(qkv, shape, None, None, 1e-6, angles.cos(), angles.sin(), kv, 1, tables)
        made.append([q, *kv.pages()])
    for ours, theirs in zip(*made, strict=True):
        if ours.is_floating_point():  # a NaN may have another payload
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = ours.nan_to_num(0.0), theirs.nan_to_num(0.0)
        assert torch.equal(ours, theirs)


def test_normed_heads_equal_torch() -> None:
    shape = HeadShape(4, 2, 80, 80)
    qkv = torch.randn((5, shape.qkv_width))
    gains = torch.rand(80) + 0.5, torch.rand(80) + 0.5
    angles = torch.randn((5, 40))
    tables = GroupTables(*(torch.zeros((1, 1), dtype=torch.int32),) * 2, torch.arange(5), torch.zeros(1))
    made = []
    for op in (attention_native.qk_norm_rope_store, rope_torch.qk_norm_rope_store):
        kv = poisoned_pages(1, 8, shape, ("f32", "f32"))
        q = op(qkv, shape, *gains, 1e-6, angles.cos(), angles.sin(), kv, 0, tables)
        made.append((q, kv.keys[0, 0, :5], kv.values[0, 0, :5]))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 7, 16, 576, 1001])
@pytest.mark.parametrize("rows", [1, 19])
def test_norms_equal_torch(n: int, rows: int) -> None:
    x, residual = torch.randn((2, rows, n))
    residual *= 1e5  # the stream may pass 65504
    gain, post = torch.rand(n) + 0.5, torch.rand(n) + 0.5
    for arguments in (
        (None, residual, gain, 1e-6),
        (x, residual, gain, 1e-6),
        (x, residual, gain, 1e-6, post),
    ):
        ours, total = norm_native.add_rms_norm(*arguments)
        theirs, expected = norm_torch.add_rms_norm(*arguments)
        torch.testing.assert_close(ours.values, theirs.values, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(total, expected, rtol=1e-7, atol=0.0 if len(arguments) < 5 else 1e-6)
        one = norm_native.add_rms_norm(
            *[a[-1:] if i < 2 and a is not None else a for i, a in enumerate(arguments)]
        )
        assert torch.equal(one[0].values, ours.values[-1:]) and torch.equal(one[1], total[-1:])


def test_angles_equal_torch() -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131071])
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, 64, 2) / 64))
    cos, sin = attention_native.rope_angles(positions, frequencies, 1.5)
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos, (angles.cos() * 1.5).float(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin, (angles.sin() * 1.5).float(), rtol=0, atol=2e-7)
    per_token = attention_native.rope_angles(positions, frequencies.expand(5, 32), 1.5)
    assert torch.equal(per_token[0], cos) and torch.equal(per_token[1], sin)


def test_vector_functions_keep_their_stated_error() -> None:
    """exp, tanh, silu (units of the last place) and gelu_tanh (of 1) against f64, and the edges of exp."""
    library = load_library()
    assert library is not None
    x = torch.cat(
        (torch.linspace(-110, 95, 100001), torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e-30]))
    )

    def apply(which: int) -> torch.Tensor:
        out = torch.empty_like(x)
        library.call("edgellm_apply", which, x.data_ptr(), x.numel(), out.data_ptr())
        return out

    def units(which: int, exact: torch.Tensor, least: float) -> float:
        inside = exact.isfinite() & (exact.abs() < 3e38)
        size = exact.abs().clamp_min(least) * torch.finfo(torch.float32).eps
        return float(((apply(which).double() - exact).abs() / size)[inside].max())

    wide = x.double()
    u = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    assert units(0, wide.exp(), 2**-126) <= 2
    assert units(1, wide.tanh(), 2**-126) <= 3
    assert units(2, wide * torch.sigmoid(wide), 2**-100) <= 4
    assert units(3, wide * torch.sigmoid(u), 1.0) <= 4
    edges = apply(0)[-5:]
    assert edges[:2].tolist() == [math.inf, 0.0] and edges[2].isnan() and edges[3:].tolist() == [1.0, 1.0]


def test_tables_that_point_outside_are_refused() -> None:
    stories = PagedStories([Story(40, 2)], HeadShape(2, 1, 16, 16))
    q, batch, tables = stories.batch()
    bad = tables.block_table.clone()
    bad[0, 0] = 99
    outside = GroupTables(bad, tables.block_positions, tables.slot_mapping, tables.key_lengths)
    with pytest.raises(NativeError, match="bad argument"):
        attention_native.paged_attention(q, stories.kv, 1, outside, batch, 1.0)
    qkv = torch.randn((2, stories.shape.qkv_width))
    with pytest.raises(NativeError, match="bad argument"):
        attention_native.qk_norm_rope_store(
            qkv, stories.shape, None, None, 1e-6, torch.ones((2, 4)), torch.ones((2, 4)), stories.kv, 0,
            with_slots(tables, torch.tensor([0, 10**6])),
        )  # fmt: skip
