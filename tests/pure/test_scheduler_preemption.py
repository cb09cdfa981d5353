"""Blocks that are short: who gives way and how, what is said, aborts, and random schedules against alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.cache.block_pool import blocks_for
from tests.support.fake_runner import answer_alone
from tests.support.schedule import Schedule, Setup


def prompt(length: int, start: int = 0) -> list[int]:
    return [1000 * start + i for i in range(length)]


CROWD = [(6 + 3 * (i % 4), 24 + i % 3) for i in range(12)]
"""(prompt length, answer length) of twelve requests."""
DEMAND = sum(blocks_for(length + answer, 4) for length, answer in CROWD)


def crowd(setup: Setup, draft_limit: int = 0) -> tuple[Schedule, list[int]]:
    """The twelve requests at once; every other one drafts."""
    schedule = Schedule(setup)
    ids = [
        schedule.add(prompt(length, i), answer, draft_limit=draft_limit * (i % 2))
        for i, (length, answer) in enumerate(CROWD)
    ]
    return schedule, ids


def assert_as_alone(schedule: Schedule, ids: list[int]) -> None:
    assert not schedule.errors
    for i, (length, answer) in enumerate(CROWD):
        assert schedule.answers[ids[i]] == answer_alone(prompt(length, i), answer), f"sequence {ids[i]}"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 8, 400])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_tenth_of_the_demand_finishes_everything_with_the_same_tokens(
    depth: int, host_blocks: int, windows: tuple[int | None, ...], prefix_cache: bool
) -> None:
    setup = Setup(
        num_blocks=-(-DEMAND // 10),
        windows=windows,
        depth=depth,
        host_blocks=host_blocks,
        max_running=12,
        lookahead=2,
        accept=1,
        prefix_cache=prefix_cache,
    )
    schedule, ids = crowd(setup, draft_limit=2)
    schedule.run()
    assert_as_alone(schedule, ids)
    if None in windows:
        assert schedule.notices_of("preempted")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 400])
def test_samples_of_a_prompt_survive_preemption(depth: int, host_blocks: int) -> None:
    """Parents and children, forked or not, give way and come back with their own tokens."""
    forks = 0
    for num_blocks in range(12, 26, 4):
        setup = Setup(
            num_blocks=num_blocks, max_running=6, depth=depth, host_blocks=host_blocks, prefill_chunk=5
        )
        schedule = Schedule(setup)
        expected: dict[int, list[int]] = {}
        for family in range(3):
            tokens = prompt(14, family)
            parent = schedule.add(tokens, 20, priority=family % 2)
            expected[parent] = answer_alone(tokens, 20)
            for sample in (1, 2):
                child = schedule.add(tokens, 20, sample=sample, fork_parent=parent)
                expected[child] = answer_alone(tokens, 20, sample)
        schedule.run()
        assert schedule.answers == expected
        assert schedule.notices_of("preempted")
        forks += sum(len(plan.forked) for plan in schedule.plans)
    assert forks > 5


def test_offload_comes_before_recompute_and_costs_no_tokens() -> None:
    rows = {}
    for host_blocks in (0, 400):
        schedule, ids = crowd(Setup(num_blocks=20, host_blocks=host_blocks, max_running=12))
        schedule.run()
        assert_as_alone(schedule, ids)
        rows[host_blocks] = schedule.runner.rows
        details = [detail for _, detail in schedule.notices_of("preempted")]
        assert details
        assert all(("host memory" in d) == (host_blocks > 0) for d in details)
        assert all(("computed again" in d) == (host_blocks == 0) for d in details)
    needed = sum(length + answer - 1 for length, answer in CROWD)
    assert rows[400] == needed < rows[0]


def test_what_cannot_come_back_from_the_host_fails_and_holds_nothing() -> None:
    """Somebody outside of the scheduler has taken the blocks meanwhile."""
    schedule = Schedule(Setup(num_blocks=12, block_size=4, host_blocks=12))
    first, second = schedule.add(prompt(8, 1), 30), schedule.add(prompt(9, 2), 30)
    while not schedule.notices_of("preempted"):
        schedule.step()
    assert schedule.sequences[second].on_host
    schedule.scheduler.cancel(first)
    schedule.kv.open(99, prompt(40, 9))
    assert schedule.kv.grow(99, 40) == []
    while schedule.step():
        pass
    assert set(schedule.errors) == {second} and not schedule.scheduler.has_work()
    schedule.kv.free(99)
    schedule.assert_all_free()


def test_who_resumes_has_room_to_stay() -> None:
    """Without a margin the same crowd preempts 243 times and runs 3.5 times the rows that it needs."""
    setup = Setup(num_blocks=-(-DEMAND // 10), max_running=12, prefix_cache=False)
    schedule, ids = crowd(setup)
    schedule.run()
    assert_as_alone(schedule, ids)
    assert len(schedule.notices_of("preempted")) < 30
    assert schedule.runner.rows < 2 * sum(length + answer - 1 for length, answer in CROWD)


def test_nothing_is_sampled_twice() -> None:
    """Each answer token is drawn in exactly one step, however often its sequence was preempted."""
    schedule, ids = crowd(Setup(num_blocks=20, max_running=12))
    schedule.run()
    draws = [s.sequence_id for plan in schedule.plans for s in plan.sequences if s.needs_logits]
    for i, sequence_id in enumerate(ids):
        assert draws.count(sequence_id) == CROWD[i][1]
    assert len(schedule.notices_of("preempted")) > 3


def test_the_last_by_priority_gives_way_and_says_so() -> None:
    schedule = Schedule(Setup(num_blocks=12, block_size=4))
    batch = schedule.add(prompt(8, 1), 24, priority=10)
    schedule.clock.now += 1
    chat = schedule.add(prompt(8, 2), 24)
    schedule.run()
    assert {s for s, _ in schedule.notices_of("preempted")} == {batch}
    [(_, detail)] = schedule.notices_of("preempted")
    [(_, resumed)] = schedule.notices_of("resumed")
    assert "of its " in detail and "computed again" in resumed
    assert schedule.finished_at[chat] == 24
    assert schedule.answers[batch] == answer_alone(prompt(8, 1), 24)


def test_the_newest_gives_way_among_equals_and_a_stream_never_pauses_for_it() -> None:
    schedule = Schedule(Setup(num_blocks=12, block_size=4))
    old = schedule.add(prompt(8, 1), 24)
    schedule.clock.now += 1
    new = schedule.add(prompt(4, 2), 24)  # goes first by length, is the victim by age
    schedule.run()
    assert {s for s, _ in schedule.notices_of("preempted")} == {new}
    assert schedule.finished_at[old] == 24


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefill_takes_the_blocks_of_a_decode_that_ranks_below(depth: int) -> None:
    """The decode has its token first in every step, yet it is the one to give way."""
    schedule = Schedule(Setup(num_blocks=8, block_size=16, prefill_chunk=32, depth=depth))
    batch = schedule.add(prompt(16, 1), 100, priority=10)
    while len(schedule.answers[batch]) < 34:  # it needs no further block for 14 steps
        schedule.step()
    chat = schedule.add(prompt(96, 2), 2)
    added = len(schedule.plans)
    schedule.run()
    assert {s for s, _ in schedule.notices_of("preempted")} == {batch}
    assert schedule.finished_at[chat] - added <= 3 + 1 + 2 * (1 + depth)
    assert schedule.answers[batch] == answer_alone(prompt(16, 1), 100)


@pytest.mark.parametrize("depth", [0, 1])
def test_waiting_for_blocks_is_said_once(depth: int) -> None:
    schedule = Schedule(Setup(num_blocks=10, depth=depth))
    schedule.add(prompt(16, 1), 20)
    schedule.step()
    waiting = schedule.add(prompt(12, 2), 2)
    schedule.run()
    told = schedule.notices_of("queued_for_blocks")
    assert [s for s, _ in told] == [waiting] or told == []
    schedule = Schedule(Setup(num_blocks=6, depth=depth))
    schedule.add(prompt(16, 1), 6)
    schedule.step()
    waiting = schedule.add(prompt(12, 2), 2)
    schedule.run()
    [(sequence_id, detail)] = schedule.notices_of("queued_for_blocks")
    assert sequence_id == waiting and "12 tokens" in detail
    assert not schedule.notices_of("preempted")


def test_a_blocked_prompt_is_not_passed_by_those_behind_it() -> None:
    """Small ones that kept taking the blocks would keep it waiting for ever."""
    schedule = Schedule(Setup(num_blocks=8, max_running=8, age_bound_s=5.0))
    schedule.add(prompt(16, 1), 12)
    schedule.step()
    big = schedule.add(prompt(30, 2), 2)
    schedule.clock.now += 10
    small = [schedule.add(prompt(4, 3 + i), 2) for i in range(5)]
    schedule.run()
    assert schedule.notices_of("queued_for_blocks")[0][0] == big
    started = [start.sequence_id for plan in schedule.plans for start in plan.started]
    assert started[1] == big and set(started[2:]) == set(small)


@pytest.mark.parametrize("lookahead", [4, 8])
def test_a_prompt_is_admitted_with_room_for_a_draft(lookahead: int) -> None:
    """Eight blocks, three in use, four for the prompt: a draft of 4 tokens still fits, one of 8 does not."""
    schedule = Schedule(Setup(num_blocks=8, block_size=4, lookahead=lookahead))
    schedule.add(prompt(8, 1), 4)
    schedule.step()
    waiting = schedule.add(prompt(16, 2), 2)
    schedule.step()
    assert [s for s, _ in schedule.notices_of("queued_for_blocks")] == ([waiting] if lookahead == 8 else [])
    schedule.run()


def test_drafts_take_no_block_while_somebody_waits_for_blocks() -> None:
    schedule = Schedule(Setup(num_blocks=8, block_size=4, lookahead=6, accept=0))
    stream = schedule.add(prompt(8, 1), 20, draft_limit=6)
    schedule.step()
    waiting = schedule.add(prompt(20, 2), 2)
    schedule.step()
    drafted = 0
    while waiting not in {s.sequence_id for s in schedule.plans[-1].sequences}:
        for s in schedule.plans[-1].sequences:
            end = s.start_position + 1
            assert s.sequence_id == stream and -(-(end + s.draft_limit) // 4) == -(-end // 4)
            drafted += s.draft_limit
        schedule.step()
    assert drafted, "what the last block holds costs nobody anything"
    schedule.run()


def test_a_look_at_the_cache_while_waiting_is_no_turn_of_the_conversation() -> None:
    """A turn that waits until its conversation's blocks are given away still says how much it lost."""
    schedule = Schedule(Setup(num_blocks=12, block_size=4))
    first = schedule.add(prompt(16, 1), 5, conversation_id="talk")
    schedule.run()
    schedule.add(prompt(4, 2), 40)
    for _ in range(20):
        schedule.step()
    turn = prompt(16, 1) + schedule.answers[first] + prompt(8, 3)
    second = schedule.add(turn, 2, conversation_id="talk")
    while not schedule.sequences[second].has_kv:
        assert schedule.step()
    assert schedule.notices_of("queued_for_blocks")
    assert schedule.sequences[second].cached_tokens < 20
    divergence = schedule.kv.divergence(second)
    assert divergence is not None and divergence.previous_length == 20
    schedule.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_what_can_never_fit_fails_alone(depth: int, at: str) -> None:
    schedule = Schedule(Setup(num_blocks=8, depth=depth, host_blocks=8))
    hopeless = schedule.add(prompt(40, 1) if at == "prompt" else prompt(20, 1), 30)
    fine = [schedule.add(prompt(5, 2 + i), 8) for i in range(3)]
    schedule.run()
    assert set(schedule.errors) == {hopeless}
    assert "KV cache is too small" in schedule.errors[hopeless]
    for i, sequence_id in enumerate(fine):
        assert schedule.answers[sequence_id] == answer_alone(prompt(5, 2 + i), 8)


def test_a_thousand_aborts_leave_the_pool_full() -> None:
    """F18: blocks of aborted requests come back, wherever the abort finds them."""
    rng = random.Random(7)
    setup = Setup(
        num_blocks=20,
        max_running=6,
        depth=1,
        host_blocks=20,
        lookahead=2,
        accept=1,
        windows=(None, 6),
        check_every_step=False,
        check_reads=False,
    )
    schedule = Schedule(setup)
    aborted: list[int] = []
    alive: list[int] = []
    while len(aborted) < 1000:
        if len(alive) < 12:
            tokens = prompt(rng.randint(1, 30), rng.randint(0, 3))
            parent = rng.choice(alive) if alive and rng.random() < 0.2 else None
            if parent is not None:
                tokens = list(schedule.sequences[parent].start.prompt_token_ids)
            alive.append(
                schedule.add(tokens, rng.randint(1, 40), fork_parent=parent, draft_limit=rng.randint(0, 2))
            )
        schedule.step()
        alive = [s for s in alive if s not in schedule.finished_at and s not in schedule.errors]
        if alive and rng.random() < 0.4:
            victim = alive.pop(rng.randrange(len(alive)))
            schedule.scheduler.cancel(victim)
            aborted.append(victim)
            schedule.scheduler.cancel(victim)  # twice is no fault
    schedule.run()
    assert not schedule.errors
    assert {n.kind for _, n in schedule.notices} >= {"preempted", "resumed", "queued_for_blocks"}
    plan = schedule.plans[-1]
    assert len(schedule.runner.states) <= len(plan.sequences) + 1, "the runner keeps state of the dead"
    counts = schedule.kv.counts()
    assert counts["free"] + counts["cached"] == 2 * 20


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, bool, int, int | None, int, int | None]:
    """Prompt family, prompt length, answer length, needs_host, draft limit, priority, step of arrival, and
    after how many steps it is cancelled."""
    return (
        draw(st.integers(0, 2)),
        draw(st.integers(1, 24)),
        draw(st.integers(1, 20)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 0, 5])),
        draw(st.integers(0, 8)),
        draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(requests(), min_size=1, max_size=7),
    st.sampled_from([0, 1]),
    st.integers(12, 40),
    st.sampled_from([0, 6, 60]),
    st.sampled_from([(None,), (None, 6), (5,)]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([None, None, 20]),
    st.booleans(),
)
def test_random_schedules_bring_what_each_brings_alone(
    asked: list[tuple[int, int, int, bool, int, int, int, int | None]],
    depth: int,
    num_blocks: int,
    host_blocks: int,
    windows: tuple[int | None, ...],
    max_running: int,
    chunk: int,
    prefix_cache: bool,
    accept: int,
    rope_switch_length: int | None,
    samples: bool,
) -> None:
    setup = Setup(
        num_blocks=num_blocks,
        block_size=4,
        windows=windows,
        max_running=max_running,
        token_budget=max_running + chunk,
        prefill_chunk=chunk,
        depth=depth,
        lookahead=3,
        accept=accept,
        host_blocks=host_blocks,
        prefix_cache=prefix_cache,
        rope_switch_length=rope_switch_length,
        age_bound_s=3.0,
    )
    schedule = Schedule(setup)
    ids: dict[int, int] = {}
    for step in range(40):
        for i, (family, length, answer, host, drafts, priority, arrival, _) in enumerate(asked):
            if arrival == step:
                parent = None
                if samples and i and asked[i - 1][0] == family and i - 1 in ids:
                    parent = ids[i - 1]
                    length = schedule.sequences[parent].prompt_length
                ids[i] = schedule.add(
                    prompt(length, family),
                    answer,
                    sample=i,
                    needs_host=host,
                    draft_limit=drafts,
                    priority=priority,
                    fork_parent=parent,
                )
        for i, request in enumerate(asked):
            if request[-1] is not None and request[-1] + request[-2] == step and i in ids:
                schedule.scheduler.cancel(ids[i])
        schedule.step()
        schedule.clock.now += 1
    schedule.run()
    assert not schedule.errors, "48 tokens fit into every one of these pools"
    for i, sequence_id in ids.items():
        sequence = schedule.sequences[sequence_id]
        tokens = sequence.start.prompt_token_ids
        expected = answer_alone(tokens, sequence.max_new_tokens, i)
        cancelled = asked[i][-1] is not None
        got = schedule.answers[sequence_id]
        assert got == (expected[: len(got)] if cancelled else expected)
