"""A minimal paged cache for tests of the decoder: scattered block ids, dead window blocks taken away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from edgellm.cache.kv_storage import KVType, allocate_storage
from edgellm.cache.tail_rings import TailRings
from edgellm.runner.kv_state import build_tail_tables
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.spec import ModelSpec


def poisoned_storage(
    spec: ModelSpec, num_blocks: int, kv_type: str | tuple[str, str], block_size: int, num_rings: int = 20
) -> list[KVStorage]:
    """Pages of a type (or one of keys and one of values) that hold NaN bytes: reading what was never stored
    shows.
    """
    names = (kv_type, kv_type) if isinstance(kv_type, str) else kv_type
    made = [
        allocate_storage(
            spec,
            [num_blocks] * len(spec.kv_groups),
            KVType(name, name),
            block_size=block_size,
            num_rings=num_rings,
        )
        for name in names
    ]
    storages = []
    for keys, values in zip(*made, strict=True):
        tail = keys.tail or values.tail
        storage = KVStorage(keys.keys, values.values, keys.key_scales, values.value_scales, tail)
        for part in (*storage.pages(), *(() if tail is None else (tail.keys, tail.values))):
            part.view(torch.uint8).fill_(0xFF)
        storages.append(storage)
    return storages


class PagedRun:
    """Runs sequences through a decoder in any cut; returns the logits of every token."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        kv_type: str | tuple[str, str] = "f32",
        tails: bool = True,
        scattered: bool = True,
        free_dead: bool = True,
        seed: int = 0,
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.block_size = block_size
        self.free_dead = free_dead
        self.windows = [group.window for group in spec.kv_groups]
        self.free: list[list[int]] = []
        self.storages = poisoned_storage(spec, num_blocks, kv_type, block_size)
        tail = self.storages[0].tail if tails else None
        self.rings = None if tail is None else TailRings(tail.keys.shape[1], tail.recent)
        for _ in spec.kv_groups:
            ids = list(range(num_blocks))
            if scattered:
                random.Random(seed).shuffle(ids)
            else:
                ids.reverse()
            self.free.append(ids)
        self.lengths: dict[str, int] = {}
        self.tables: dict[str, list[dict[int, int]]] = {}
        """Per sequence and group: block index -> block id."""

    def step(
        self,
        chunks: Sequence[tuple[str, Sequence[int]]],
        *,
        rope_lengths: Sequence[int] | None = None,
        last: int | None = None,
    ) -> list[torch.Tensor]:
        """Append tokens to named sequences, all in one batch; logits [tokens, vocab] of each chunk.

        ``last`` asks only for the logits of so many last tokens of each chunk.
        """
        for name, _ in chunks:
            self.lengths.setdefault(name, 0)
            self.tables.setdefault(name, [{} for _ in self.windows])
        positions: list[int] = []
        starts = [0]
        for name, ids in chunks:
            positions += range(self.lengths[name], self.lengths[name] + len(ids))
            starts.append(len(positions))
        wanted = [len(ids) if last is None else min(last, len(ids)) for _, ids in chunks]
        tail = None
        if self.rings is not None and self.storages[0].tail is not None:
            lengths = [self.lengths[name] for name, _ in chunks]
            counts = [len(ids) for _, ids in chunks]
            spans = [
                self.rings.step(list(self.lengths).index(name), self.lengths[name], len(ids))
                for name, ids in chunks
            ]
            tail = build_tail_tables(spans, lengths, counts, self.storages[0].tail)
        groups = tuple(replace(self._group(g, chunks), tail=tail) for g in range(len(self.windows)))
        batch = ForwardBatch(
            token_ids=torch.tensor([token for _, ids in chunks for token in ids], dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            logit_rows=torch.cat(
                [torch.arange(end - n, end) for end, n in zip(starts[1:], wanted, strict=True)]
            ),
            max_query=max(len(ids) for _, ids in chunks),
            max_key=max(self.lengths[name] + len(ids) for name, ids in chunks),
            groups=groups,
            rope_lengths=None if rope_lengths is None else torch.tensor(rope_lengths),
        )
        logits = self.decoder.forward(batch, self.storages)
        for name, ids in chunks:
            self.lengths[name] += len(ids)
        return list(logits.split(wanted))

    def _group(self, group: int, chunks: Sequence[tuple[str, Sequence[int]]]) -> GroupTables:
        window, size = self.windows[group], self.block_size
        rows, slots, lengths = [], [], []
        for name, ids in chunks:
            table, start = self.tables[name][group], self.lengths[name]
            if window is not None and self.free_dead:
                for index in [i for i in table if (i + 1) * size <= start - window + 1]:
                    self.free[group].append(table.pop(index))
            for position in range(start, start + len(ids)):
                index = position // size
                if index not in table:
                    table[index] = self.free[group].pop()
                slots.append(table[index] * size + position % size)
            rows.append(sorted(table.items()))
            lengths.append(start + len(ids))
        width = max(len(row) for row in rows)
        ids_table = [[block for _, block in row] + [-1] * (width - len(row)) for row in rows]
        starts_table = [[index * size for index, _ in row] + [0] * (width - len(row)) for row in rows]
        return GroupTables(
            block_table=torch.tensor(ids_table, dtype=torch.int32).view(len(rows), width),
            block_positions=torch.tensor(starts_table, dtype=torch.int32).view(len(rows), width),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            key_lengths=torch.tensor(lengths, dtype=torch.int32),
        )


def run_whole(decoder: Decoder, ids: Sequence[int], **options: int | bool) -> torch.Tensor:
    """Logits of one prompt in one pass."""
    return PagedRun(decoder, **options).step([("a", ids)])[0]  # type: ignore[arg-type]


def run_chunked(decoder: Decoder, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The same, cut into chunks of these sizes in turn."""
    run, out, start, turn = PagedRun(decoder), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        part = ids[start : start + size]
        out += run.step([("a", part)], rope_lengths=[len(ids)])
        start, turn = start + size, turn + 1
    return torch.cat(out)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference as a share of the largest logit."""
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    return float((ours - reference).abs().max() / reference.abs().max())
