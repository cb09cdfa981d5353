"""The plans of a lone answer, found at a glance, are the plans that the whole scheduler comes to."""

from __future__ import annotations

import random

import pytest

import edgellm.scheduler.scheduler as scheduler_module
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout, SequenceBlocks
from edgellm.contracts import GenerationRequest, SamplingParams, StepPlan
from edgellm.engine.engine import Engine
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_engine import ByteTokenizer
from tests.support.fake_runner import PagedFakeRunner
from tests.support.schedule import Clock, Schedule, Setup

SETUPS = (
    Setup(),
    Setup(num_blocks=12, windows=(None, 6), host_blocks=12),
    Setup(num_blocks=9, lookahead=2, accept=1),
    Setup(depth=1),
    Setup(rope_switch_length=20),
    Setup(prefix_cache=False, block_size=3),
)


def played(setup: Setup, seed: int) -> tuple[list[StepPlan], dict[int, list[int]], list[tuple[int, str]]]:
    """All plans, answers and notices of a seeded mix of requests that are often alone."""
    draws = random.Random(seed)
    schedule = Schedule(setup)
    for _ in range(60):
        if draws.random() < 0.12:
            prompt = [draws.choice((1, 2)) for _ in range(draws.randrange(1, 14))]
            drafts = draws.choice((0, setup.lookahead))
            logprobs = draws.choice((None, None, 1))
            # What is told is random here, and what is told of a draft is not the schedule's business.
            schedule.add(prompt, draws.randrange(1, 16), draft_limit=drafts, prompt_logprobs=logprobs)
        if draws.random() < 0.03 and schedule.sequences:
            schedule.scheduler.cancel(draws.choice(list(schedule.sequences)))
        schedule.clock.now += 0.5
        schedule.step()
    schedule.run()
    return schedule.plans, schedule.answers, [(i, notice.kind) for i, notice in schedule.notices]


@pytest.mark.parametrize("setup", SETUPS, ids=range(len(SETUPS)))
def test_the_plans_are_those_of_the_whole_scheduler(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    whole = scheduler_module.lone_decode
    for seed in range(4):
        monkeypatch.setattr(scheduler_module, "lone_decode", lambda roster: None)
        expected = played(setup, seed)

        def counted(roster):  # type: ignore[no-untyped-def]
            found = whole(roster)
            seen.append(found is not None)
            return found

        monkeypatch.setattr(scheduler_module, "lone_decode", counted)
        assert played(setup, seed) == expected
    if setup.depth == 0 and setup.rope_switch_length is None:
        assert sum(seen) > 20, "the short way was hardly taken"


def test_growing_within_a_block_changes_what_growing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, windows, drafts and full blocks: with and without the look that spares the work."""

    def states(seed: int) -> list[object]:
        draws = random.Random(seed)
        kv = KVManager([GroupLayout(None, 40), GroupLayout(5, 40)], 3, lookahead=2)
        found: list[object] = []
        lengths = {0: 0}
        kv.open(0, [1, 2, 3, 4])
        for turn in range(1, 60):
            sequence_id = draws.choice(list(lengths))
            length = lengths[sequence_id]
            grown = kv.grow(sequence_id, length + draws.choice((0, 1, 1, 1, 2, 3)))
            found.append((grown, kv.tables(sequence_id), kv.counts()))
            count = min(draws.choice((0, 1, 1)), kv.sequences[sequence_id].grown - length)
            kv.commit(sequence_id, [draws.choice((5, 6))] * count)
            lengths[sequence_id] = length + count
            if draws.random() < 0.1 and len(lengths) < 4 and lengths[sequence_id]:
                kv.fork(sequence_id, turn)
                lengths[turn] = lengths[sequence_id]
            kv.check_integrity()
        return found

    quick: list[bool] = []
    look = KVManager._has_slots

    def counted(self: KVManager, sequence: SequenceBlocks, length: int) -> bool:
        quick.append(look(self, sequence, length))
        return quick[-1]

    for seed in range(20):
        monkeypatch.setattr(KVManager, "_has_slots", lambda self, sequence, length: False)
        expected = states(seed)
        monkeypatch.setattr(KVManager, "_has_slots", counted)
        assert states(seed) == expected
    assert 100 < sum(quick) < len(quick) - 100


def test_stats_are_renewed_when_somebody_comes_or_goes_and_else_by_their_age() -> None:
    clock = Clock()
    engine = Engine(
        PagedFakeRunner(4),
        ByteTokenizer(),
        KVManager([GroupLayout(None, 64)], 4),
        context_length=100,
        vocab_size=258,
        make_decoder=lambda request: StreamDecoder(ByteTokenizer()),
        stats_interval_s=0.05,
        clock=clock,
    )
    engine.submit(GenerationRequest("a", (1, 2, 3), SamplingParams(max_new_tokens=40)))
    times = []
    while engine.has_work():
        clock.now += 0.02
        engine.step()
        times.append(round(engine.stats.time - 100, 2))
    assert times[:7] == [0.02, 0.02, 0.02, 0.08, 0.08, 0.08, 0.14]
    assert engine.stats.running == 0 and engine.stats.time == clock.now
    assert engine.stats.kv_blocks["used"] == 0
