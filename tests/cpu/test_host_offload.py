"""KV of paused requests in host memory: it comes back bit for bit, at any point, in every form of pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from edgellm.cache.kv_storage import allocate_storage, group_layouts, kv_bytes, kv_type, most_sequences
from edgellm.cli.kv_room import host_blocks_for, sequences_at_once
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams, StepPlan, TokenEvent
from edgellm_models.errors import ConfigError
from tests.support.engines import LoadedEngine, load_engine, spec_of
from tests.support.tiny_models import make_tiny

PROMPT = tuple(range(40, 61))
URGENT = tuple(range(90, 119))
NUM_BLOCKS = 12


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("m") / request.param, quantizable=True)


def load(folder: Path, kv: str, host_blocks: int) -> LoadedEngine:
    groups = 2 if "gemma" in folder.name else 1
    return load_engine(
        folder,
        context=48,
        chunk=8,
        block_size=4,
        kv=kv,
        num_blocks=[NUM_BLOCKS] * groups,
        max_running=1,
        prefix_cache=False,
        host_blocks=host_blocks,
    )


def asked(name: str, ids: tuple[int, ...], count: int, priority: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerationRequest(name, ids, sampling, logprobs=3, priority=priority)


def stored(loaded: LoadedEngine, length: int) -> dict[tuple[int, int, int], torch.Tensor]:
    """What the pages of the only sequence hold below a position, by group, part and position."""
    [sequence_id] = loaded.engine._kv.sequences
    found = {}
    storages = loaded.engine._runner._kv.storages  # type: ignore[attr-defined]
    tables = loaded.engine._kv.tables(sequence_id)
    for group, (storage, table) in enumerate(zip(storages, tables, strict=True)):
        for position in range(length):
            block = table[position // 4]
            if block >= 0:  # not behind the window
                for part, pages in enumerate(storage.pages()):
                    found[group, part, position] = pages[:, block, position % 4].clone()
    return found


def run(folder: Path, kv: str, pause_after: int, *, urgent: bool) -> tuple[list[TokenEvent], LoadedEngine]:
    """One answer, alone in every step; after some steps an urgent request takes all blocks for a while, or
    only what lies outside of the pages is dropped."""
    loaded = load(folder, kv, 40 if urgent else 0)
    engine = loaded.engine
    engine.submit(asked("own", PROMPT, 12, priority=5))
    events = [event for _ in range(pause_after) for event in engine.step()]
    [sequence_id] = engine._kv.sequences
    committed = engine._kv.committed(sequence_id)
    before = stored(loaded, committed)
    if urgent:
        engine.submit(asked("urgent", URGENT, 8, priority=0))
        while not any(e.notice and e.notice.kind == "resumed" for e in events):
            events += engine.step()
            engine.check_integrity()
        assert engine.stats.kv_blocks["host"] == 0
        after = stored(loaded, committed)
        assert len(after) > len(before) // 2, "the window has hardly moved meanwhile"
        assert all(torch.equal(before[place], found) for place, found in after.items())
    else:
        engine._runner.execute(StepPlan(0, (), preempted=(sequence_id,)))
    while engine.has_work():
        events += engine.step()
    return [e for e in events if e.request_id == "own"], loaded


@pytest.mark.parametrize("kv", ["f32", "fp8", "int8", "int4"])
def test_a_round_trip_changes_no_bit_of_pages_and_logits(folder: Path, kv: str) -> None:
    """The urgent request overwrites the device blocks. int4: what was read unquantized is read from the pages
    afterwards, which is said, and which the run beside it does without moving anything."""
    for pause_after in (1, 3, 4, 12):
        moved, loaded = run(folder, kv, pause_after, urgent=True)
        stayed, _ = run(folder, kv, pause_after, urgent=False)
        notices = [e.notice.detail for e in moved if e.notice]
        assert len(notices) == 2 and "moved to host memory" in notices[0]
        assert "0 are computed again" in notices[1] or pause_after < 3
        assert ("unquantized" in notices[1]) == (kv == "int4")
        assert not [e for e in stayed if e.notice]
        assert [e.logprobs for e in moved if e.token_ids] == [e.logprobs for e in stayed if e.token_ids]
        assert len([e for e in moved if e.token_ids]) == 12
        assert loaded.engine.stats.kv_blocks["used"] == 0


def test_cancels_wherever_they_meet_a_paused_request_leave_nothing_behind(folder: Path) -> None:
    """F18: waiting, running, on the host, just restored."""
    rng = random.Random(3)
    loaded = load(folder, "f32", 16)
    engine = loaded.engine
    kinds: set[str] = set()
    open_ids: set[str] = set()
    for step in range(120):
        if len(open_ids) < 5:
            ids = tuple(rng.randrange(3, 200) for _ in range(rng.randint(1, 24)))
            engine.submit(asked(str(step), ids, rng.randint(1, 12), priority=rng.choice((0, 5, 9))))
            open_ids.add(str(step))
        if rng.random() < 0.25:
            engine.cancel(rng.choice(sorted(open_ids)))
        for event in engine.step():
            assert event.error is None
            if event.notice:
                kinds.add(event.notice.detail.rpartition(" ")[2] + event.notice.kind)
            if event.finish_reason:
                open_ids.discard(event.request_id)
        engine.check_integrity()
    for name in open_ids:
        engine.cancel(name)
    while engine.has_work():
        engine.step()
    engine.check_integrity()
    counts = engine._kv.counts()
    assert counts["used"] == counts["host"] == 0
    assert {"memorypreempted", "againresumed"} <= kinds


# --- how large everything is ---


def test_host_memory_is_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of([None, 64], 2, 64, 1000)
    storage = allocate_storage(spec, [40, 20], kv_type("int8"))
    block = [sum(part[:, 0].nbytes for part in group.pages()) for group in storage]
    monkeypatch.delenv("EDGELLM_KV_HOST", raising=False)
    assert host_blocks_for(storage, "cpu") == (0, 0)
    assert host_blocks_for(storage, "cuda") == (40, 20)
    monkeypatch.setenv("EDGELLM_KV_HOST", "1.5")
    found = host_blocks_for(storage, "cpu")
    total = sum(count * size for count, size in zip(found, block, strict=True))
    assert 1.5e6 - sum(block) < total <= 1.5e6 and found[0] == 2 * found[1]
    for bad in ("lots", "-1", "nan"):
        monkeypatch.setenv("EDGELLM_KV_HOST", bad)
        with pytest.raises(ConfigError, match="EDGELLM_KV_HOST"):
            host_blocks_for(storage, "cpu")


def test_windows_and_tails_have_room_for_those_that_run_at_once() -> None:
    """Gemma 3's shape in small: 5 of 6 layers see 64 positions. The sizes are those that are announced."""
    spec = spec_of([64] * 5 + [None], 1, 64, 4096)
    [full, window] = sorted(group_layouts(spec, 4096, 128, 16, num_sequences=6), key=lambda g: g.window or 0)
    assert (full.num_blocks, window.num_blocks) == (256, 13 + 5 * 5)
    assert [g.num_blocks for g in group_layouts(spec, 100, 128, 16, num_sequences=16)] == [7, 7]
    for name in ("f32", "int4"):
        kv = kv_type(name)
        layouts = group_layouts(spec, 4096, 128, 16, num_sequences=6)
        storage = allocate_storage(spec, [g.num_blocks for g in layouts], kv, num_rings=6)
        assert sum(s.nbytes for s in storage) == kv_bytes(spec, 4096, kv, 128, num_sequences=6)
    one = kv_bytes(spec, 4096, kv, 128)
    assert most_sequences(spec, 4096, kv, 128, one, 16) == 1
    four = kv_bytes(spec, 4096, kv, 128, num_sequences=4)
    assert most_sequences(spec, 4096, kv, 128, four, 16) == 4
    assert sequences_at_once(spec, 4096, kv, 128, 2 * four) == 4


@pytest.mark.parametrize("kv", ["f32", "int4"])
def test_many_requests_fit_beside_each_other_in_a_model_with_windows(
    tmp_path: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sequence's window the second one waited for the first. And the environment's host memory is
    really there."""
    monkeypatch.setenv("EDGELLM_KV_HOST", "2")
    folder = make_tiny("gemma3", tmp_path / "m", quantizable=True, sliding_window=64)
    runtime = load_runtime(EngineConfig(kv_dtype=kv, ctx=1024).resolve(environ={}), folder, "m")
    [context] = [n.detail for n in runtime.notices if n.kind == "context"]
    assert "16 requests at once" in context
    engine = runtime.core
    for i in range(8):
        engine.submit(asked(str(i), tuple(range(3 + i, 93 + i)), 4, priority=0))
    events: list[TokenEvent] = []
    while engine.has_work():
        events += engine.step()
    assert not [e.notice for e in events if e.notice]
    assert max(e.queue_position or 0 for e in events) == 0 or engine.stats.waiting == 0
    assert all(pool.num_blocks for pool in engine._kv.host_pools)
    runtime.close()
