"""Quantized KV: what is stored, its bounds and sizes, and attention over it against a dense f64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edgellm.cache.kv_copies import allocate_host_storage, apply_copies
from edgellm.cache.kv_sizes import pool_blocks, pool_bytes
from edgellm.cache.kv_storage import (
    KVType,
    allocate_storage,
    choose_kv_type,
    group_layouts,
    kv_bytes,
    kv_bytes_per_position,
    kv_type,
    tail_bytes,
)
from edgellm.cache.tail_rings import TailRings
from edgellm.contracts import BlockCopy, HostCopy
from edgellm.runner.kv_state import build_tail_tables
from edgellm_kernels.batch import TAIL_POSITIONS, ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.kv_store_torch import (
    dequantize,
    hadamard,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    store_kv,
)
from edgellm_kernels.ops import load_kernels, native_serves
from edgellm_models.errors import BadInputError
from tests.support.engines import spec_of
from tests.support.paged import poisoned_storage

KERNELS = load_kernels("cpu", preferred="torch")
BLOCK = 16


# --- the forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_hadamard_rotation_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    h = hadamard(torch.eye(dim))
    torch.testing.assert_close(h @ h.t(), torch.eye(dim), rtol=0, atol=1e-6)
    torch.testing.assert_close(h, h.t(), rtol=0, atol=0)
    torch.testing.assert_close(h.abs(), torch.full((dim, dim), dim**-0.5))
    x = torch.randn((5, 3, dim))
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_int8_is_off_by_at_most_half_a_step(size: float) -> None:
    x = torch.randn((40, 3, 64)) * size
    x[0] = 0
    q, scales = quantize_int8(x)
    assert q.dtype == torch.int8 and scales.dtype == torch.float16 and scales.shape == (40, 3, 1)
    error = (dequantize(q, scales) - x).abs()
    # The scale is rounded to f16, which moves the largest elements by up to 2^-11 of themselves.
    assert bool((error <= 0.5 * scales.float() + x.abs() * 2**-11).all())
    assert bool((error[0] == 0).all())
    assert bool((q.abs().amax(-1)[1:] >= 126).all()), "the range is used"


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_int4_is_off_by_at_most_a_step_and_half_within_the_range(size: float) -> None:
    x = torch.randn((40, 3, 128)) * size
    x[0] = 0
    q, scales = quantize_int4(x)
    assert q.dtype == torch.uint8 and q.shape == (40, 3, 64) and scales.shape == (40, 3, 4)
    groups = x.view(40, 3, 4, 32)
    error = (dequantize(q, scales) - x).abs().view(40, 3, 4, 32)
    step = scales.float().abs()[..., None]
    assert bool((error <= step * 1.01).all()) and bool((error[0] == 0).all())
    inside = groups / torch.where(scales == 0, 1, scales).float()[..., None] <= 7
    assert bool((error <= 0.5 * step + groups.abs() * 2**-10)[inside].all())


def test_int4_packs_the_halves_of_a_head_into_nibbles() -> None:
    """The layout that batch.py states: byte i holds element i low and element i + dim / 2 high."""
    x = (
        torch.arange(64, dtype=torch.float32).remainder(16).sub(8)
    )  # every group spans -8 .. 7: the scale is 1
    q, scales = quantize_int4(x)
    assert scales.tolist() == [1.0, 1.0]
    for i in range(32):
        assert int(q[i]) & 15 == int(x[i]) + 8 and int(q[i]) >> 4 == int(x[i + 32]) + 8


def test_outliers_of_keys_are_spread_before_they_set_the_steps() -> None:
    """Real keys have a few large elements, whose scale is too coarse for the others: rotated, the same bytes
    hold the row five times as exactly. Heads of other sizes than 2^n keep plain rows."""
    rng = torch.Generator().manual_seed(5)
    k = torch.randn((200, 1, 256), generator=rng)
    k[..., 7] += 30.0
    plain = (dequantize(*quantize_int8(k)) - k).norm()
    rotated = (hadamard(dequantize(*quantize_int8(hadamard(k)))) - k).norm()
    assert 5 * rotated < plain
    for dim, is_rotated in ((64, True), (256, True), (80, False), (96, False)):
        [pages] = allocate_storage(spec_of([None], 1, dim, 64), [1], kv_type("int8"))
        assert (pages.rotates_keys, pages.rotates_values) == (is_rotated, False)
        [pages] = allocate_storage(spec_of([None], 1, dim, 64), [1], kv_type("fp8"))
        assert not pages.rotates_keys and not pages.rotates_values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quantize", [quantize_int8, quantize_fp8, quantize_int4])
def test_an_unusable_row_stays_unusable_and_alone(quantize: object, bad: float) -> None:
    """A NaN must reach the logits of its sequence, where it is reported, and no other row."""
    x = torch.randn((3, 1, 64))
    x[1, 0, 5] = bad
    back = dequantize(*quantize(x))  # type: ignore[operator]
    assert not torch.isfinite(back[1]).all()
    assert torch.isfinite(back[[0, 2]]).all()


def test_saturation_is_finite() -> None:
    for quantize in (quantize_int8, quantize_fp8, quantize_int4):
        assert torch.isfinite(dequantize(*quantize(torch.full((1, 64), 1e30)))).all()


# --- sizes -----------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_worked_numbers() -> None:
    llama = spec_of([None] * 32, 8, 128, 8192)
    assert kv_bytes_per_position(llama, 32, kv_type("int8")) == 66_560
    assert kv_bytes_per_position(llama, 32, kv_type("fp8")) == 66_560
    for dim, gain in ((64, 1.939), (128, 1.969), (256, 1.984)):
        spec = spec_of([None], 1, dim, 8192)
        f16 = kv_bytes_per_position(spec, 1, kv_type("f16"))
        assert round(f16 / kv_bytes_per_position(spec, 1, kv_type("int8")), 3) == gain
        assert round(f16 / kv_bytes_per_position(spec, 1, kv_type("int4")), 3) == 3.556


def test_planned_bytes_are_those_that_are_allocated() -> None:
    """Windows and global layers, every type: what `plan` counts and what the cache allocates, tails included,
    for one sequence and for several contexts at once."""
    spec = spec_of([40, 40, None], 2, 64, 1024)
    for name in ("f32", "bf16", "fp8", "int8", "int4"):
        for contexts, at_once, kept in ((1, 1, None), (3, 3, None), (1, 4, 128)):
            layouts = group_layouts(spec, 512, 64, 16, kept, at_once, 8, contexts)
            counts = [layout.num_blocks for layout in layouts]
            made = allocate_storage(spec, counts, kv_type(name), num_rings=at_once)
            layers = [layer.window for layer in spec.layers]
            planned = pool_bytes(
                layers, 2, 64, 512, name, 64, 16,
                kept=kept, num_sequences=at_once, lookahead=8, num_contexts=contexts,
            )  # fmt: skip
            assert planned == sum(pages.nbytes for pages in made)
    # Windows: 39 positions before a chunk of 64, and 8 drafts on both sides of either.
    assert pool_blocks([None, 40], 512, 64, 16, num_sequences=3, lookahead=8, num_contexts=3) == (
        96,
        9 + 2 * 5,
    )


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8", "int8", "int4"])
def test_storage_takes_the_bytes_that_were_planned(name: str) -> None:
    spec = spec_of([32, None, 32], 2, 64, 1024)
    storages = allocate_storage(spec, [7, 13], kv_type(name))
    assert sum(s.nbytes for s in storages) == kv_bytes(spec, 200, kv_type(name), 64)
    assert (tail_bytes(spec, kv_type(name)) > 0) == (name == "int4")


@pytest.mark.parametrize("dim", [32, 80, 96, 512])
def test_int4_refuses_other_heads_by_name(dim: int) -> None:
    spec = spec_of([None], 2, dim, 1024)
    for refuse in (
        lambda: allocate_storage(spec, [4], kv_type("int4")),
        lambda: choose_kv_type("int4", spec, 100, 64, 10**9, "cpu"),
    ):
        with pytest.raises(BadInputError, match=f"int4.*64, 128, 256.*{dim}.*int8"):
            refuse()
    allocate_storage(spec, [4], kv_type("int8"))


def test_keys_never_have_fewer_bits_than_values() -> None:
    with pytest.raises(BadInputError, match="keys of type int4 beside values of type int8"):
        KVType("int4", "int8")
    assert KVType("int8", "int4").has_tail


def test_auto_takes_what_fits_and_says_when_it_steps_down() -> None:
    spec = spec_of([None] * 4, 2, 64, 4096)
    f32, bf16 = (kv_bytes(spec, 4096, kv_type(name), 512) for name in ("f32", "bf16"))

    def choose(free: int | None, asked: int | None = 4096, device: str = "cpu") -> tuple[str, str]:
        chosen, notice = choose_kv_type("auto", spec, asked, 512, free, device)
        return chosen.name, "" if notice is None else notice.detail

    assert choose(2 * f32) == ("f32", "")
    name, detail = choose(2 * f32 - 1)
    assert name == "bf16" and f"4096 tokens f32 {f32 / 1e6:.0f} MB" in detail and "--kv-dtype f32" in detail
    name, detail = choose(2 * bf16 - 1)
    assert name == "int8" and "f32" in detail and "bf16" in detail
    assert choose(1)[0] == "int8"
    assert choose(1, asked=None) == ("f32", "") and choose(None) == ("f32", "")
    assert choose(10**12, device="cuda") == ("bf16", "")
    assert choose_kv_type("f16", spec, 4096, 512, 1, "cpu") == (kv_type("f16"), None)
    rounded = [choose_kv_type("auto", spec, 4096, 512, free, "cpu", exact=False) for free in (None, 1)]
    assert [chosen.name for chosen, _ in rounded] == ["f16", "int8"]


# --- store and attend ------------------------------------------------------------------------------------


class World:
    """Sequences with scattered blocks in one layer, written and read in any cut; NaN bytes elsewhere."""

    def __init__(self, kv: str | tuple[str, str], dim: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.storage: KVStorage = poisoned_storage(spec_of([None], kv_heads, dim, 4096), 100, kv, BLOCK)[0]
        self.rings = None
        if self.storage.tail is not None:
            self.rings = TailRings(20, self.storage.tail.recent)
        self.free = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.dropped: dict[int, set[int]] = {}

    def step(
        self,
        rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        window: int | None = None,
        softcap: float | None = None,
    ) -> dict[int, torch.Tensor]:
        """Store q, k, v rows of some sequences behind what they have; what their queries see."""
        positions, starts, slots, tables = [], [0], [], []
        for s, (q, _, _) in rows.items():
            first, count = self.lengths.get(s, 0), len(q)
            blocks = self.blocks.setdefault(s, [])
            while len(blocks) * BLOCK < first + count:
                blocks.append(self.free.pop())
            own = range(first, first + count)
            positions += own
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in own]
            starts.append(len(positions))
            gone = self.dropped.get(s, set())
            tables.append([(b, i * BLOCK) for i, b in enumerate(blocks) if i not in gone])
        width = max(len(t) for t in tables)
        lengths = [self.lengths.get(s, 0) for s in rows]
        counts = [len(q) for q, _, _ in rows.values()]
        tail = None
        if self.rings is not None and self.storage.tail is not None:
            spans = [self.rings.step(*x) for x in zip(rows, lengths, counts, strict=True)]
            tail = build_tail_tables(spans, lengths, counts, self.storage.tail)
        group = GroupTables(
            torch.tensor([[b for b, _ in t] + [-1] * (width - len(t)) for t in tables], dtype=torch.int32),
            torch.tensor([[p for _, p in t] + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            torch.tensor(slots),
            torch.tensor([n + c for n, c in zip(lengths, counts, strict=True)], dtype=torch.int32),
            tail,
        )
        q, k, v = (torch.cat(parts) for parts in zip(*rows.values(), strict=True))
        batch = ForwardBatch(
            torch.zeros(len(q), dtype=torch.int64),
            torch.tensor(positions),
            torch.tensor(starts, dtype=torch.int32),
            torch.arange(len(q)),
            max(counts),
            max(lengths) + max(counts),
            (group,),
        )
        store_kv(k, v, self.storage, 0, group)
        out = KERNELS.paged_attention(q, self.storage, 0, group, batch, self.dim**-0.5, window, softcap)
        for s, count in zip(rows, counts, strict=True):
            self.lengths[s] = self.lengths.get(s, 0) + count
        return dict(zip(rows, out.values.split(counts), strict=True))

    def stored(self, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded K and V of a sequence [length, kv_heads, dim], rotated back."""
        found = []
        for pages, scales, rotated in (
            (self.storage.keys, self.storage.key_scales, self.storage.rotates_keys),
            (self.storage.values, self.storage.value_scales, self.storage.rotates_values),
        ):
            ids = self.blocks[s]
            rows = dequantize(pages[0, ids], None if scales is None else scales[0, ids])
            rows = rows.flatten(0, 1)[: self.lengths[s]]
            found.append(hadamard(rows) if rotated else rows)
        return found[0], found[1]

    def bytes(self, s: int) -> list[list[int]]:
        """The stored bytes of a sequence, position by position."""
        parts = []
        for part in self.storage.pages():
            rows = part[0, self.blocks[s]].flatten(0, 1)[: self.lengths[s]].contiguous()
            parts.append(rows.view(torch.uint8).flatten(1))
        return torch.cat(parts, dim=1).tolist()  # type: ignore[no-any-return]

    def random(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(seed)
        q = torch.randn((count, self.heads, self.dim), generator=rng)
        k, v = (torch.randn((count, self.kv_heads, self.dim), generator=rng) for _ in range(2))
        k[..., 3] *= 20  # an outlier channel, as real keys have
        return q, k, v


def dense(
    world: World,
    s: int,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first: int,
    window: int | None = None,
    softcap: float | None = None,
    began: int = 0,
) -> torch.Tensor:
    """The definition in f64 over the decoded values, query by query, for queries from position ``first`` on.

    Unquantized (bf16 of the rotated row) are, from ``began`` on, the first block and what lies less than 128
    positions back.
    """
    q, k, v = rows
    read_k, read_v = (x.double() for x in world.stored(s))
    exact = []
    for x, rotated in ((k, world.storage.rotates_keys), (v, world.storage.rotates_values)):
        kept = hadamard(hadamard(x).bfloat16().float()) if rotated else x.bfloat16().float()
        exact.append(kept.double())
    group = world.heads // world.kv_heads
    out = []
    for p in range(first, len(q)):
        seen = torch.arange(0 if window is None else max(0, p - window + 1), p + 1)
        gone = world.dropped.get(s, set())
        seen = seen[[int(i) // BLOCK not in gone for i in seen]]
        tail = torch.zeros(len(seen), dtype=torch.bool)
        if world.rings is not None:
            tail = ((seen < BLOCK) | (seen > p - TAIL_POSITIONS)) & (seen >= began)
        pk = torch.where(tail[:, None, None], exact[0][seen], read_k[seen]).repeat_interleave(group, 1)
        pv = torch.where(tail[:, None, None], exact[1][seen], read_v[seen]).repeat_interleave(group, 1)
        scores = torch.einsum("hd,phd->hp", q[p].double(), pk) * world.dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.einsum("hp,phd->hd", scores.softmax(-1), pv).flatten())
    return torch.stack(out).float()


FORMS = ["f32", "bf16", "fp8", "int8", "int4", ("int8", "int4")]


@pytest.mark.parametrize("kv", FORMS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0), (300, 5.0)])
def test_attention_equals_the_dense_reference_over_the_stored_values(
    kv: str | tuple[str, str], window: int | None, softcap: float | None
) -> None:
    """Prefill in one chunk, then single rows and rows of a verification, several sequences at once."""
    world = World(kv)
    rows = {s: world.random(length, s) for s, length in ((0, 337), (1, 20), (2, 211), (3, 160))}
    got: dict[int, list[torch.Tensor]] = {s: [] for s in rows}
    for last in (330, 331, 332, 335, 337):
        chunk = {}
        for s, (q, k, v) in rows.items():
            have, upto = world.lengths.get(s, 0), min(len(q) - 337 + last, len(q))
            if upto > have:
                chunk[s] = (q[have:upto], k[have:upto], v[have:upto])
        for s, out in world.step(chunk, window, softcap).items():
            got[s].append(out)
    for s, own in rows.items():
        expected = dense(world, s, own, 0, window, softcap)
        torch.testing.assert_close(torch.cat(got[s]), expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_head_sizes_and_groups(dim: int, heads: tuple[int, int]) -> None:
    for kv in ("fp8", "int8", "int4"):
        world = World(kv, dim, *heads)
        rows = world.random(300, 5)
        world.step({0: tuple(x[:290] for x in rows)})  # type: ignore[dict-item]
        got = [world.step({0: tuple(x[i : i + 2] for x in rows)})[0] for i in range(290, 300, 2)]  # type: ignore[dict-item]
        torch.testing.assert_close(torch.cat(got), dense(world, 0, rows, 290), rtol=1e-3, atol=2e-4)


CUTS = {
    "one row at a time": [1] * 300,
    "k + 1 rows": [3, 5] * 38,
    "chunks": [100, 17, 150, 33],
    "longer than the ring": [290, 10],
}


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4", ("int8", "int4")])
def test_the_cut_into_steps_changes_no_stored_byte_and_no_result(kv: str | tuple[str, str]) -> None:
    """Numerics: a row's bytes are the same alone, with k drafted rows and in a chunk; so is what it reads."""
    results, stored = {}, {}
    for name, cut in CUTS.items():
        world = World(kv)
        rows = world.random(300, 9)
        out, start = [], 0
        for size in cut:
            part = tuple(x[start : start + size] for x in rows)
            if len(part[0]):
                out.append(world.step({0: part})[0])  # type: ignore[dict-item]
            start += size
        results[name], stored[name] = torch.cat(out), world.bytes(0)
    first = next(iter(CUTS))
    for name in CUTS:
        assert stored[name] == stored[first], name
        torch.testing.assert_close(results[name], results[first], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
def test_rejected_drafts_leave_no_trace(kv: str) -> None:
    """Drafted rows are stored, rejected and overwritten; what follows equals a run that never drafted."""
    plain, drafting = World(kv), World(kv)
    rows = plain.random(400, 2)
    junk = plain.random(400, 3)
    expected, got = [], []
    for world in (plain, drafting):
        world.step({0: tuple(x[:250] for x in rows)})  # type: ignore[dict-item]
    for i in range(250, 400, 3):
        part = tuple(x[i : i + 3] for x in rows)
        expected.append(plain.step({0: part})[0])  # type: ignore[dict-item]
        drafted = tuple(torch.cat((x, y[:5])) for x, y in zip(part, junk, strict=True))
        got.append(drafting.step({0: drafted})[0][: len(part[0])])  # type: ignore[dict-item]
        drafting.lengths[0] = i + len(part[0])
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert plain.bytes(0) == drafting.bytes(0)


def test_a_reused_prefix_is_read_quantized_whoever_wrote_it() -> None:
    """int4: a sequence has no unquantized rows of positions it did not compute, its first block included."""
    world = World("int4")
    rows = world.random(220, 4)
    world.step({0: tuple(x[:192] for x in rows)})  # type: ignore[dict-item]
    world.blocks[1], world.lengths[1] = list(world.blocks[0]), 192
    got = [world.step({1: tuple(x[i : i + 7] for x in rows)})[1] for i in range(192, 220, 7)]  # type: ignore[dict-item]
    torch.testing.assert_close(torch.cat(got), dense(world, 1, rows, 192, began=192), rtol=1e-3, atol=2e-4)


def test_an_evicted_block_takes_its_unquantized_rows_along() -> None:
    world = World("int4")
    rows = world.random(300, 6)
    world.step({0: tuple(x[:296] for x in rows), 1: world.random(150, 1)})  # type: ignore[dict-item]
    world.dropped[0] = {0, 3, 15, 16}
    got = world.step({0: tuple(x[296:] for x in rows), 1: world.random(4, 2)})[0]  # type: ignore[dict-item]
    torch.testing.assert_close(got, dense(world, 0, rows, 296), rtol=1e-3, atol=2e-4)


def test_without_tail_tables_everything_is_read_from_the_pages() -> None:
    world = World("int4")
    world.rings = None
    rows = world.random(200, 6)
    got = world.step({0: rows})[0]
    torch.testing.assert_close(got, dense(world, 0, rows, 0), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_rows_without_a_slot_are_written_nowhere(kv: str) -> None:
    storage = poisoned_storage(spec_of([None], 1, 64, 64), 2, kv, 4)[0]
    tables = GroupTables(
        *(torch.zeros(1, 1, dtype=torch.int32),) * 2, torch.tensor([5, -1]), torch.tensor([2])
    )
    store_kv(torch.ones(2, 1, 64), torch.ones(2, 1, 64), storage, 0, tables)
    written = (storage.keys[0].view(torch.uint8) != 0xFF).flatten(0, 1).any(-1).flatten()
    assert written.nonzero().flatten().tolist() == [5]


def test_many_sequences_equal_each_alone() -> None:
    """Joined into padded batches or computed one by one: the same up to f32 noise, for 1 and for 4 rows."""
    for kv in ("f32", "fp8", "int8", "int4"):
        for count in (1, 4):
            together, apart = World(kv), World(kv)
            lengths = {s: 20 + 13 * s for s in range(8)} | {8: 5, 9: 5}
            rows = {s: together.random(n + count, s) for s, n in lengths.items()}
            for world in (together, apart):
                for s, n in lengths.items():
                    world.step({s: tuple(x[:n] for x in rows[s])})  # type: ignore[dict-item]
            last = {s: tuple(x[n:] for x in rows[s]) for s, n in lengths.items()}
            got = together.step(last)  # type: ignore[arg-type]
            for s, own in last.items():
                torch.testing.assert_close(got[s], apart.step({s: own})[s], rtol=1e-4, atol=1e-5)  # type: ignore[dict-item]


# --- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8", "int8", "int4"])
def test_copies_are_bit_exact_in_every_form(kv: str) -> None:
    spec = spec_of([None, 32], 2, 64, 1024)
    storages = poisoned_storage(spec, 8, kv, 4)
    for storage in storages:
        for part in storage.pages():
            part.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(part.shape[1]))
    before = [[part.clone().view(torch.uint8) for part in s.pages()] for s in storages]
    host = allocate_host_storage(storages, [5, 6])
    assert [part.device.type for s in host for part in s.pages()] == ["cpu"] * sum(len(b) for b in before)
    apply_copies(
        storages,
        host,
        [BlockCopy(0, 1, 2, order=0), BlockCopy(0, 2, 3, order=1), BlockCopy(1, 5, 6, order=4)],
        # Block 1 goes to the host and comes back elsewhere, after something else was written over it.
        [
            HostCopy(0, 1, 4, True, order=2),
            HostCopy(0, 7, 4, False, order=6),
            HostCopy(0, 7, 0, True, order=3),
        ],
    )
    for (first, second), pages in zip(
        zip(before[0], before[1], strict=True),
        zip(storages[0].pages(), storages[1].pages(), strict=True),
        strict=True,
    ):
        zero, one = (p.view(torch.uint8) for p in pages)
        for target, source in ((1, 1), (2, 1), (3, 1), (7, 1), (0, 0), (4, 4), (5, 5), (6, 6)):
            assert torch.equal(zero[:, target], first[:, source]), (target, source)
        for target, source in ((6, 5), (5, 5), (0, 0), (7, 7)):
            assert torch.equal(one[:, target], second[:, source])


def test_copies_happen_in_their_order() -> None:
    """A swap through a third block, and an offload of what the copy before it wrote."""
    storage = allocate_storage(spec_of([None], 1, 64, 64), [3], kv_type("int8"))
    for block in range(3):
        storage[0].keys[:, block] = block
    host = allocate_host_storage(storage, [1])
    swap = [BlockCopy(0, 0, 2, order=0), BlockCopy(0, 1, 0, order=1), BlockCopy(0, 2, 1, order=3)]
    apply_copies(storage, host, swap, [HostCopy(0, 0, 0, True, order=2)])
    assert storage[0].keys[0, :, 0, 0, 0].tolist() == [1, 0, 0]
    assert int(host[0].keys[0, 0, 0, 0, 0]) == 1


def test_math_of_the_gain_is_that_of_the_bits() -> None:
    assert math.isclose(16 / 4.5, 3.5556, abs_tol=1e-3)
    assert replace(kv_type("int8"), values="int4").name == "int8/int4"


def test_planned_sizes_are_those_of_the_pages() -> None:
    """What is said before loading and what is allocated come from one table of sizes."""
    from edgellm.cache import kv_sizes
    from edgellm_kernels import batch

    assert kv_sizes.INT4_GROUP == batch.INT4_GROUP
    for name in kv_sizes.KV_BITS:
        [pages] = allocate_storage(spec_of([None], 1, 64, 64), [1], kv_type(name))
        assert native_serves(pages) == (name not in kv_sizes.KV_ON_TORCH)
