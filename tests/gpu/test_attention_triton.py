"""Triton paged attention against its torch twin: ragged batches, windows, holes, splits, all pages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edgellm_kernels import attention_torch, attention_triton
from edgellm_kernels.attention_triton import num_splits
from edgellm_kernels.batch import KVStorage
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


def test_a_long_prompt_runs_in_tiles(device: torch.device) -> None:
    check(PagedStories([Story(90, 75), Story(5, 1)], HeadShape(4, 2, 32, 32)), device, window=40)


def test_huge_scores_stay_finite(device: torch.device) -> None:
    stories = PagedStories([Story(70, 2)], HeadShape(2, 1, 64, 64))
    stories.queries = [q * 1e5 for q in stories.queries]
    got = check(stories, device)
    assert bool(got.isfinite().all())
    check(stories, device, softcap=1.0)


def test_splits_follow_shapes() -> None:
    assert num_splits(8, 100) == 1 and num_splits(8, 4096) == 16 and num_splits(8, 1 << 20) == 32
    assert num_splits(1000, 4096) == 1 and num_splits(1, 1 << 20) == 64
