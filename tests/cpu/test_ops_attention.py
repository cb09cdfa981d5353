"""Paged attention against a dense softmax in f64: ragged batches, windows, holes, caps, empty rows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from edgellm_kernels import attention_plan_torch, attention_torch
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.ops import load_kernels, native_missing

KERNELS = load_kernels("cpu", preferred="torch")


@dataclass
class Sequence:
    """Keys and values by position, and the queries of this pass."""

    length: int
    queries: int
    """The last positions of the sequence."""
    dropped: set[int] = field(default_factory=set)
    """Block indexes that were evicted."""


def make_batch(
    sequences: list[Sequence],
    *,
    block_size: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    order: str = "scattered",
    lookahead: int = 0,
    seed: int = 0,
) -> tuple[ForwardBatch, KVStorage, list[torch.Tensor], list[torch.Tensor]]:
    """Pages of random K and V (NaN in every slot that holds none), and what lies at each position."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-s.length // block_size) + lookahead for s in sequences]
    num_blocks = sum(counts) + 3
    ids = (
        torch.randperm(num_blocks, generator=rng).tolist()
        if order == "scattered"
        else list(range(num_blocks))
    )
    keys = torch.full((2, num_blocks, block_size, kv_heads, k_dim), float("nan"), dtype=dtype)
    values = torch.full((2, num_blocks, block_size, kv_heads, v_dim), float("nan"), dtype=dtype)
    all_keys, all_values, rows, positions, starts = [], [], [], [], [0]
    for sequence, count in zip(sequences, counts, strict=True):
        k = torch.randn((sequence.length, kv_heads, k_dim), generator=rng).to(dtype)
        v = torch.randn((sequence.length, kv_heads, v_dim), generator=rng).to(dtype)
        blocks = [ids.pop(0) for _ in range(count)]
        row = []
        for index, block in enumerate(blocks):
            if index in sequence.dropped:
                continue
            row.append((block, index * block_size))
            part = k[index * block_size : (index + 1) * block_size]
            keys[1, block, : len(part)] = part
            values[1, block, : len(part)] = v[index * block_size : (index + 1) * block_size]
        rows.append(row)
        all_keys.append(k)
        all_values.append(v)
        positions += range(sequence.length - sequence.queries, sequence.length)
        starts.append(len(positions))
    width = max((len(row) for row in rows), default=0)
    table = [[block for block, _ in row] + [-1] * (width - len(row)) for row in rows]
    block_positions = [[start for _, start in row] + [0] * (width - len(row)) for row in rows]
    tables = GroupTables(
        block_table=torch.tensor(table, dtype=torch.int32).view(len(rows), width),
        block_positions=torch.tensor(block_positions, dtype=torch.int32).view(len(rows), width),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        key_lengths=torch.tensor([s.length for s in sequences], dtype=torch.int32),
    )
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        logit_rows=torch.arange(len(positions)),
        max_query=max((s.queries for s in sequences), default=0),
        max_key=max((s.length for s in sequences), default=0),
        groups=(tables,),
    )
    return batch, KVStorage(keys, values), all_keys, all_values


def dense(
    q: torch.Tensor,
    sequences: list[Sequence],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 4,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, query by query in f64. A sink is one more score, whose weight goes nowhere."""
    out, row = [], 0
    for sequence, k, v in zip(sequences, keys, values, strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))  # [length, heads, dim]
        for position in range(sequence.length - sequence.queries, sequence.length):
            seen = [
                p
                for p in range(0 if window is None else max(0, position - window + 1), position + 1)
                if p // block_size not in sequence.dropped
            ]
            scores = torch.einsum("hd,phd->hp", q[row].double(), k[seen]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(seen)]
            out.append(torch.einsum("hp,phd->hd", weights, v[seen]).flatten())
            row += 1
    return torch.stack(out).float()


def attend(
    batch: ForwardBatch,
    kv: KVStorage,
    q: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    scale = q.shape[2] ** -0.5
    return KERNELS.paged_attention(q, kv, 1, batch.groups[0], batch, scale, window, softcap).values


RAGGED = [Sequence(11, 3), Sequence(1, 1), Sequence(40, 40), Sequence(17, 1), Sequence(3, 0), Sequence(9, 9)]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 1000])
@pytest.mark.parametrize("order", ["scattered", "consecutive"])
def test_ragged_batches(heads: tuple[int, int], window: int | None, order: str) -> None:
    """F02, F15: lengths 1 and 40 with small windows in one batch; MHA, GQA and MQA; both block orders."""
    num_heads, kv_heads = heads
    batch, kv, keys, values = make_batch(RAGGED, kv_heads=kv_heads, order=order)
    q = torch.randn((len(batch.positions), num_heads, 16))
    expected = dense(q, RAGGED, keys, values, 0.25, window)
    torch.testing.assert_close(attend(batch, kv, q, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preferred", ["torch", "native"])
@pytest.mark.parametrize("window", [None, 5])
def test_learned_sinks_join_the_softmax(preferred: str, window: int | None) -> None:
    """A logit per head: small, usual, far above all scores, or none; also where no key is seen."""
    if preferred == "native" and native_missing():
        pytest.skip(native_missing())
    sequences = [Sequence(30, 2, dropped={1, 2}), Sequence(13, 13), Sequence(9, 1), Sequence(7, 1)]
    sinks = torch.tensor([-3.0, 0.5, 90.0, float("-inf")])
    batch, kv, keys, values = make_batch(sequences)
    q = torch.randn((len(batch.positions) + 1, 4, 16))
    attend_here = load_kernels("cpu", preferred=preferred).paged_attention
    for softcap in (None, 2.0):
        got = attend_here(q, kv, 1, batch.groups[0], batch, 0.25, window, softcap, sinks=sinks).values
        expected = dense(q[:-1], sequences, keys, values, 0.25, window, softcap, sinks=sinks)
        torch.testing.assert_close(got[:-1], expected, rtol=1e-4, atol=1e-5)
        assert not got[-1].any() and float(got[:, 32:48].abs().max()) < 1e-20
    gone = [Sequence(12, 4, dropped={0, 1, 2})]
    batch, kv, _, _ = make_batch(gone)
    nothing = attend_here(q[:4], kv, 1, batch.groups[0], batch, 0.25, sinks=sinks).values
    assert not nothing.any()


@pytest.mark.parametrize("dims", [(16, 8), (8, 24)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_value_width_and_block_size(dims: tuple[int, int], block_size: int) -> None:
    """k_dim and v_dim differ; blocks of any size, and blocks that wait for drafted tokens, change nothing."""
    k_dim, v_dim = dims
    batch, kv, keys, values = make_batch(RAGGED, k_dim=k_dim, v_dim=v_dim, block_size=block_size, lookahead=2)
    q = torch.randn((len(batch.positions), 4, k_dim))
    expected = dense(q, RAGGED, keys, values, k_dim**-0.5)
    torch.testing.assert_close(attend(batch, kv, q), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pages_are_computed_with_in_f32(dtype: torch.dtype) -> None:
    batch, kv, keys, values = make_batch(RAGGED, dtype=dtype)
    q = torch.randn((len(batch.positions), 4, 16))
    torch.testing.assert_close(
        attend(batch, kv, q), dense(q, RAGGED, keys, values, 0.25), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 9])
def test_holes_in_the_table(window: int | None) -> None:
    """Evicted blocks are not read and nothing else moves: positions stay absolute."""
    sequences = [Sequence(30, 2, dropped={1, 2, 4}), Sequence(25, 25, dropped={0}), Sequence(13, 1)]
    sequences[1].queries = 20  # its first queries would see nothing
    batch, kv, keys, values = make_batch(sequences)
    q = torch.randn((len(batch.positions), 4, 16))
    expected = dense(q, sequences, keys, values, 0.25, window)
    torch.testing.assert_close(attend(batch, kv, q, window), expected, rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing_are_zero() -> None:
    """F15: a query whose keys are all evicted, a sequence without rows, padding rows: zeros, never NaN."""
    sequences = [Sequence(12, 12, dropped={0, 1}), Sequence(5, 0), Sequence(6, 6)]
    batch, kv, keys, values = make_batch(sequences)
    q = torch.randn((len(batch.positions) + 2, 4, 16))  # two rows behind the last sequence
    out = attend(batch, kv, q)
    assert torch.isfinite(out).all()
    assert (out[:8] == 0).all() and (out[-2:] == 0).all() and (out[8:-2] != 0).any(dim=1).all()
    whole = dense(q[12:18], [Sequence(6, 6)], keys[2:], values[2:], 0.25)
    torch.testing.assert_close(out[12:18], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_softcap_with_huge_scores(window: int | None, size: float) -> None:
    """D12: caps apply before the mask and the softmax; scores of a million stay finite."""
    batch, kv, keys, values = make_batch(RAGGED)
    q = torch.randn((len(batch.positions), 4, 16)) * size
    expected = dense(q, RAGGED, keys, values, 0.25, window, 50.0)
    out = attend(batch, kv, q, window, 50.0)
    assert torch.isfinite(out).all()
    # Near a cap's knee f32 loses 50 * 2^-24 of the score.
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def test_a_sequence_does_not_feel_the_others() -> None:
    """F10: the same rows alone, first and last in a batch."""
    alone, kv, keys, values = make_batch([RAGGED[2]], seed=3)
    q = torch.randn((40, 4, 16))
    expected = attend(alone, kv, q)
    for position in (0, 2):
        others = [Sequence(50, 7), Sequence(2, 2)]
        others.insert(position, RAGGED[2])
        batch, pages, _, _ = make_batch(others, seed=4)
        table, starts = batch.groups[0].block_table[position], batch.groups[0].block_positions[position]
        for block, start in zip(table.tolist(), starts.tolist(), strict=True):
            if block >= 0:
                part = slice(start, start + 4)
                pages.keys[1, block, : len(keys[0][part])] = keys[0][part]
                pages.values[1, block, : len(keys[0][part])] = values[0][part]
        first = int(batch.query_starts[position])
        rows = torch.randn((len(batch.positions), 4, 16))
        rows[first : first + 40] = q
        out = attend(batch, pages, rows)[first : first + 40]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_many_tiles_equal_one(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Tiles over queries and keys, whole and cut: the same result."""
    sequences = [Sequence(700, 700, dropped={20, 21, 90}), Sequence(900, 3)]
    batch, kv, _, _ = make_batch(sequences)
    q = torch.randn((len(batch.positions), 4, 16))
    whole = attend(batch, kv, q, window)
    monkeypatch.setattr(attention_torch, "_SCORE_ELEMENTS", 1 << 13)
    monkeypatch.setattr(attention_torch, "_GATHER_ELEMENTS", 1 << 10)
    torch.testing.assert_close(attend(batch, kv, q, window), whole, rtol=1e-5, atol=1e-6)


PREFILL = """
import sys
import torch
from edgellm.bench.peak_memory import peak_bytes  # getrusage's peak begins with that of whoever forked
from edgellm_kernels.batch import KVStorage
from edgellm_kernels.kv_store_torch import quantize_int8
from edgellm_kernels.ops import load_kernels
from tests.cpu.test_ops_attention import Sequence, make_batch

tokens = int(sys.argv[1])
batch, kv, _, _ = make_batch([Sequence(tokens, tokens)], kv_heads=3, k_dim=64, v_dim=64, block_size=16)
if sys.argv[2] == "int8":
    keys, key_scales = quantize_int8(kv.keys.nan_to_num_())
    kv = KVStorage(keys, keys.clone(), key_scales, key_scales.clone())
q = torch.randn((tokens, 9, 64))
kernels = load_kernels("cpu", preferred="torch")
torch.bmm(torch.randn(2, 300, 300), torch.randn(2, 300, 300))  # the libraries' own buffers
before, _ = peak_bytes(False)
kernels.paged_attention(q, kv, 1, batch.groups[0], batch, 0.125)
print((peak_bytes(False)[0] - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_scratch_memory_of_a_long_prefill_is_linear() -> None:
    """8,192 queries by 8,192 keys by 9 heads would be 2.4 GB of scores; tiles need a few dozen MB. Quantized
    pages are decoded tile by tile, so they need no more.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    # Freed tensors go back at once: what malloc's heap keeps of them differs from run to run.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {}
    for tokens, kv_type in ((8192, "f32"), (4096, "f32"), (4096, "int8")):
        command = [sys.executable, "-c", PREFILL, str(tokens), kv_type]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks[tokens, kv_type] = int(result.stdout)
    inputs = 2 * 8192 * 9 * 64 * 4 / 1024  # the scaled queries and the result
    assert peaks[8192, "f32"] - inputs < 64 * 1024, peaks
    assert peaks[8192, "f32"] <= 2.2 * peaks[4096, "f32"], peaks
    assert peaks[4096, "int8"] - inputs / 2 < 64 * 1024, peaks


def test_decoding_rows_of_many_sequences_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows of sequences of like lengths make one padded batch; one of another size stays apart."""
    lengths = [60 + 3 * i for i in range(16)] + [900]
    batch, kv, keys, values = make_batch([Sequence(n, 1) for n in lengths])
    plan = KERNELS.plan_attention(batch, batch.groups[0], 4)
    joined, alone = plan.split(None, 32)
    assert [group.sequences for group in joined] == [16] and [s.key_length for s in alone] == [900]
    q = torch.randn((17, 4, 16))
    expected = dense(q, [Sequence(n, 1) for n in lengths], keys, values, 0.25)
    torch.testing.assert_close(attend(batch, kv, q), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(attention_plan_torch, "MAX_BATCH_ELEMENTS", 4 * 105 * 32)
    joined, alone = KERNELS.plan_attention(batch, batch.groups[0], 4).split(None, 32)
    assert len(joined) > 2 and max(group.sequences for group in joined) < 8
    torch.testing.assert_close(attend(batch, kv, q), expected, rtol=1e-4, atol=1e-5)


def test_cost_follows_the_live_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of a window layer reads the blocks of its window, not those of the whole sequence."""
    read: list[int] = []
    original = attention_torch._read

    def counting(
        pages: torch.Tensor, scales: torch.Tensor | None, sequence: object, first: int, last: int
    ) -> torch.Tensor:
        read.append(last - first)
        return original(pages, scales, sequence, first, last)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_torch, "_read", counting)
    batch, kv, _, _ = make_batch([Sequence(4000, 1)])
    attend(batch, kv, torch.randn((1, 4, 16)), window=32)
    assert sum(read) == 2 * math.ceil(32 / 4)
    read.clear()
    evicted = [Sequence(4000, 1, dropped=set(range(1, 990)))]
    batch, kv, _, _ = make_batch(evicted)
    attend(batch, kv, torch.randn((1, 4, 16)))
    assert sum(read) == 2 * 11


def test_consecutive_blocks_are_not_copied() -> None:
    batch, kv, _, _ = make_batch([Sequence(64, 1)], order="consecutive")
    plan = KERNELS.plan_attention(batch, batch.groups[0], 4)
    view = attention_torch._read(kv.keys[1], None, plan.sequences[0], 0, 16)
    assert view.untyped_storage().data_ptr() == kv.keys.untyped_storage().data_ptr()
    batch, kv, _, _ = make_batch([Sequence(64, 1)])
    plan = KERNELS.plan_attention(batch, batch.groups[0], 4)
    copy = attention_torch._read(kv.keys[1], None, plan.sequences[0], 0, 16)
    assert copy.untyped_storage().data_ptr() != kv.keys.untyped_storage().data_ptr()


def test_a_window_of_eight_slides_by_one_each_step() -> None:
    """F02: window 8, six tokens of prefill, five single steps: exactly the last eight positions count."""
    for length in range(6, 12):
        batch, kv, keys, values = make_batch([Sequence(length, 1 if length > 6 else 6)], seed=length)
        q = torch.randn((len(batch.positions), 4, 16))
        kept = range(max(0, length - 8), length)
        values_of_kept = values[0][list(kept)]
        keys_of_kept = keys[0][list(kept)]
        out = attend(batch, kv, q, window=8)[-1]
        expected = dense(q[-1:], [Sequence(len(kept), 1)], [keys_of_kept], [values_of_kept], 0.25)[0]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
