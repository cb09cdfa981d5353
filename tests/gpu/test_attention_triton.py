"""Triton paged attention against its torch twin: ragged batches, windows, holes, splits, all pages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edgellm_kernels import attention_torch, attention_triton
from edgellm_kernels.attention_triton import num_splits
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.operands import HeadShape
from tests.support.native_cases import PagedStories, Story

MIXED = [
    Story(300, 1, seed=1),
    Story(1, 1, seed=2),
    Story(37, 20, seed=3),
    Story(70, 3, seed=4),
    Story(160, 7, frozenset({0, 3, 6}), seed=5),
]


def check(stories: PagedStories, device: torch.device, padding: int = 0, **options) -> torch.Tensor:
    q, batch, tables = stories.batch(None, padding)
    scale = 1 / math.sqrt(q.shape[2])
    expected = attention_torch.paged_attention(q, stories.kv, 1, tables, batch, scale, **options).values
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(device)
    parts = (stories.kv.keys, stories.kv.values, stories.kv.key_scales, stories.kv.value_scales)
    kv = KVStorage(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]
    fields = {
        name: getattr(tables, name).to(device)
        for name in ("block_table", "block_positions", "slot_mapping", "key_lengths")
    }
    there = replace(batch, positions=batch.positions.to(device), query_starts=batch.query_starts.to(device))
    got = attention_triton.paged_attention(
        q.to(device), kv, 1, replace(tables, **fields), there, scale, **options
    ).values.cpu()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)
    return got


@pytest.mark.parametrize(
    ("heads", "kv_type", "options"),
    [
        ((6, 2, 64, 64), ("f32", "f32"), {}),
        ((8, 1, 112, 112), ("bf16", "int8"), {"window": 17, "softcap": 5.0}),
        ((4, 4, 80, 96), ("int8", "f16"), {"window": 100}),
        ((4, 2, 64, 80), ("fp8", "fp8"), {}),
        ((8, 1, 112, 112), ("bf16", "fp8"), {"window": 17, "softcap": 5.0}),
        ((4, 2, 128, 128), ("f16", "f16"), {"softcap": 30.0}),
        ((4, 1, 256, 256), ("bf16", "bf16"), {"window": 64}),
    ],
    ids=str,
)
def test_ragged_batches(
    heads: tuple[int, int, int, int],
    kv_type: tuple[str, str],
    options: dict,
    device: torch.device,
) -> None:
    """Decoding rows, drafts and prompts side by side, split over keys; free slots hold NaN."""
    stories = MIXED if heads[2] == 112 else [MIXED[0], MIXED[4]]
    check(PagedStories(stories, HeadShape(*heads), kv_type), device, padding=2, **options)


@pytest.mark.parametrize("heads", [(6, 2, 64, 64), (4, 1, 80, 96)], ids=str)
def test_learned_sinks(heads: tuple[int, int, int, int], device: torch.device) -> None:
    """Split over keys (600 of them), in one split, and in tiles of a prompt; heads without a sink beside."""
    sinks = torch.tensor([-2.0, float("-inf"), 40.0, 0.0, 3.0, 1.0])[: heads[0]]
    shape = HeadShape(*heads)
    for stories in (
        [Story(600, 2, frozenset({3}), seed=1), Story(1, 1, seed=2)],
        [Story(40, 20), Story(9, 1)],
    ):
        paged = PagedStories(stories, shape, ("f16", "int8"))
        with_sinks = check(paged, device, padding=1, window=300, sinks=sinks)
        without = check(paged, device, padding=1, window=300)
        both = (part.view(part.shape[0], heads[0], -1)[:, 1] for part in (with_sinks, without))
        torch.testing.assert_close(*both)
        assert float((with_sinks - without).abs().max()) > 0.1


def test_a_sink_is_a_score_without_a_value(device: torch.device) -> None:
    """By hand: one query, three keys, softmax over four scores of which the last has the value zero."""
    k, v, q = torch.randn(3, 16), torch.randn(3, 16), torch.randn(1, 16)
    sink = torch.tensor([0.7])
    weights = torch.cat((q.double() @ k.double().T / 4, sink.double()[None]), dim=1).softmax(1)[:, :3]
    pages = torch.full((2, 1, 1, 4, 1, 16), float("nan"))
    pages[0, 0, 0, :3, 0], pages[1, 0, 0, :3, 0] = k, v
    one = torch.ones(1, dtype=torch.int32, device=device)
    tables = GroupTables(one[:, None] - 1, one[:, None] - 1, one.long() - 1, 3 * one)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    batch = ForwardBatch(one.long(), 2 * one.long(), starts, one.long() - 1, 1, 3, (tables,))
    kv = KVStorage(pages[0].to(device), pages[1].to(device))
    got = attention_triton.paged_attention(
        q[:, None].to(device), kv, 0, tables, batch, 0.25, sinks=sink.to(device)
    )
    torch.testing.assert_close(got.values.cpu().double(), weights @ v.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    stories = PagedStories([Story(75, 2, frozenset({0}), seed=1), Story(40, 9)], HeadShape(3, 1, 20, 12),
                           ("f16", "int8"), block_size)  # fmt: skip
    for window in (None, 1, 30):
        check(stories, device, window=window)


def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    """Rows behind the last sequence, and rows whose window lies in evicted blocks; also with splits."""
    for length in (64, 600):
        dropped = frozenset(range(-(-length // 16) - 2, -(-length // 16)))
        stories = PagedStories([Story(length, 4, dropped), Story(20, 1)], HeadShape(4, 2, 64, 64))
        got = check(stories, device, padding=3, window=16)
        assert not got[:4].any() and not got[5:].any() and bool((got[4] != 0).any())


@pytest.mark.parametrize("kv", ["f32", "fp8"])
def test_a_long_prompt_runs_in_tiles(kv: str, device: torch.device) -> None:
    check(PagedStories([Story(90, 75), Story(5, 1)], HeadShape(4, 2, 32, 32), (kv, kv)), device, window=40)


def test_huge_scores_stay_finite(device: torch.device) -> None:
    stories = PagedStories([Story(70, 2)], HeadShape(2, 1, 64, 64))
    stories.queries = [q * 1e5 for q in stories.queries]
    got = check(stories, device)
    assert bool(got.isfinite().all())
    check(stories, device, softcap=1.0)


def test_splits_follow_shapes() -> None:
    assert num_splits(8, 100) == 1 and num_splits(8, 4096) == 16 and num_splits(8, 1 << 20) == 32
    assert num_splits(1000, 4096) == 1 and num_splits(1, 1 << 20) == 64
