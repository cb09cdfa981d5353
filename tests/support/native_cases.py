"""Ragged batches over scattered, poisoned KV pages of every form, for tests of the native kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from edgellm_kernels import native_threads
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.kv_store_torch import store_kv
from edgellm_kernels.native_library import load_library, why_missing
from edgellm_kernels.operands import HeadShape

# In CI nothing is skipped for want of a compiler: the tests run and fail.
needs_native = pytest.mark.skipif(
    load_library() is None and "CI" not in os.environ, reason=f"no native library: {why_missing()}"
)

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8,
          "fp8": torch.float8_e4m3fn}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tests that import it: one thread, unless they say otherwise. On a busy machine two wait for each
    other.
    """
    with threads(1):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """The native pool with so many threads, and as before afterwards."""
    before = native_threads.num_threads()
    native_threads.set_threads(count)
    try:
        yield
    finally:
        native_threads.set_threads(before)


def poisoned_pages(
    blocks: int, block_size: int, shape: HeadShape, kv_type: tuple[str, str], layers: int = 2
) -> KVStorage:
    """Pages in which every byte is 255: NaN in the floating types and in the scales."""
    parts = []
    for name, dim in zip(kv_type, (shape.k_dim, shape.v_dim), strict=True):
        size = (layers, blocks, block_size, shape.num_kv_heads)
        data = torch.empty((*size, dim), dtype=DTYPES[name])
        scales = torch.empty((*size, 1), dtype=torch.float16) if name in ("int8", "fp8") else None
        for part in (data, scales):
            if part is not None:
                part.view(torch.uint8).fill_(0xFF)
        parts.append((data, scales))
    (keys, key_scales), (values, value_scales) = parts
    return KVStorage(keys, values, key_scales, value_scales)


@dataclass
class Story:
    """One sequence: how long it is, its K and V by position, and which blocks were evicted."""

    length: int
    queries: int
    """The last positions of the sequence."""
    dropped: frozenset[int] = frozenset()
    seed: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedStories:
    """Sequences stored in pages of one layer; batches of any of their rows."""

    def __init__(
        self,
        stories: Sequence[Story],
        shape: HeadShape,
        kv_type: tuple[str, str] = ("f32", "f32"),
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.stories, self.shape, self.block_size = stories, shape, block_size
        counts = [-(-story.length // block_size) for story in stories]
        ids = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        self.kv = poisoned_pages(len(ids), block_size, shape, kv_type)
        self.queries = []
        for story, count in zip(stories, counts, strict=True):
            story.blocks = [ids.pop() for _ in range(count)]
            rng = torch.Generator().manual_seed(story.seed)
            rows = torch.randn((story.length, shape.qkv_width), generator=rng)
            q, k, v = torch.split(rows, [shape.q_width, shape.k_width, shape.v_width], dim=1)
            self.queries.append(q.view(-1, shape.num_heads, shape.k_dim))
            slots = [
                -1 if p // block_size in story.dropped else self.slot(story, p) for p in range(story.length)
            ]
            store_kv(
                k.reshape(-1, shape.num_kv_heads, shape.k_dim),
                v.reshape(-1, shape.num_kv_heads, shape.v_dim),
                self.kv,
                1,
                GroupTables(*(torch.empty(0),) * 2, torch.tensor(slots), torch.empty(0)),  # type: ignore[arg-type]
            )

    def slot(self, story: Story, position: int) -> int:
        return story.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def batch(
        self, rows: Sequence[tuple[int, range]] | None = None, padding: int = 0
    ) -> tuple[torch.Tensor, ForwardBatch, GroupTables]:
        """q, batch and tables of rows (story, positions), by default each story's last ones, and of
        ``padding`` rows behind the last sequence.
        """
        if rows is None:
            rows = [(i, range(s.length - s.queries, s.length)) for i, s in enumerate(self.stories)]
        tables, starts, lengths, positions, counts = [], [], [], [], [0]
        for index, wanted in rows:
            story = self.stories[index]
            # Blocks behind the newest query are there already, as they are where drafts were rejected.
            live = [i for i in range(len(story.blocks)) if i not in story.dropped]
            tables.append([story.blocks[i] for i in live])
            starts.append([i * self.block_size for i in live])
            lengths.append(wanted.stop)
            positions += wanted
            counts.append(len(positions))
        width = max((len(row) for row in tables), default=0) + 1
        group = GroupTables(
            torch.tensor([row + [-1] * (width - len(row)) for row in tables], dtype=torch.int32),
            torch.tensor([row + [0] * (width - len(row)) for row in starts], dtype=torch.int32),
            torch.full((len(positions) + padding,), -1, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int32),
        )
        empty = torch.zeros(len(positions) + padding, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=empty,
            positions=torch.tensor(positions + [0] * padding),
            query_starts=torch.tensor(counts, dtype=torch.int32),
            logit_rows=empty[:0],
            max_query=max((len(wanted) for _, wanted in rows), default=0),
            max_key=max(lengths, default=0),
            groups=(group,),
        )
        q = torch.cat([self.queries[index][wanted.start : wanted.stop] for index, wanted in rows])
        q = torch.cat((q, torch.ones((padding, *q.shape[1:]))))
        return q.contiguous(), batch, group


def with_slots(tables: GroupTables, slots: torch.Tensor) -> GroupTables:
    return replace(tables, slot_mapping=slots)
