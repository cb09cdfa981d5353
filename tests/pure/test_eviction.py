"""Lossy eviction: what a plan drops and when, and that the schedule around it changes nothing of that."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edgellm.cache.eviction import BUDGET, POLICIES, RANDOM, WINDOW, Dropped, EvictionPlan, make_plan
from edgellm_models.errors import BadInputError
from tests.support.schedule import Schedule, Setup


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


def walk(plan: EvictionPlan, length: int, scores: Sequence[float] = ()) -> dict[int, list[int]]:
    """By border, the blocks that go, of a sequence that grows to ``length``."""
    live: list[int] = []
    gone: dict[int, list[int]] = {}
    for position in range(length):
        if plan.is_border(position):
            lost = plan.victims(position, live, scores)
            assert plan.victims(position, [i for i in live if i not in lost], scores) == [], "not once only"
            gone[position] = lost
            live = [i for i in live if i not in lost]
        if position % plan.block_size == 0:
            live.append(position // plan.block_size)
        assert len(live) <= plan.max_blocks
        assert set(range(min(plan.protected, len(live)))) <= set(live), "sinks or system prompt went"
    return gone


# --- which blocks ---


@pytest.mark.parametrize("keep", [4, 5, 8, 11, 64, 200, 333])
@pytest.mark.parametrize("protected_tokens", [0, 4, 5, 30])
def test_a_window_shows_at_least_the_last_tokens_and_never_more_than_a_stride_and_a_block_beyond(
    keep: int, protected_tokens: int
) -> None:
    """F02, F04: the last tokens are counted exactly at the edge, the beginning stays."""
    plan = make_plan(WINDOW, keep, 4, protected_tokens)
    gone: set[int] = set()
    borders = walk(plan, 900)
    for position in range(900):
        gone |= set(borders.get(position, []))
        seen = [p for p in range(position + 1) if p // 4 not in gone]
        head = range(min(plan.protected * 4, position + 1))
        tail = range(max(0, position + 1 - keep), position + 1)
        assert {*head, *tail} <= set(seen)
        if position >= plan.first_border:
            assert len(set(seen) - set(head)) <= keep + 4 * plan.stride + 3
    assert gone and all(lost for lost in borders.values())


@pytest.mark.parametrize("policy", [BUDGET, RANDOM])
@pytest.mark.parametrize("keep", [16, 40, 100, 256])
def test_a_budget_is_filled_and_never_passed(policy: str, keep: int) -> None:
    plan = make_plan(policy, keep, 4, 3)
    rng = random.Random(keep)
    scores = [rng.random() for _ in range(300)]
    gone = walk(plan, 1200, scores)
    live = 1200 // 4 - sum(map(len, gone.values()))
    assert plan.max_blocks == keep // 4 and live > plan.max_blocks - plan.stride
    for border, lost in gone.items():
        assert lost and max(lost) < border // 4 - plan.recent, "a recent block went"


def test_a_budget_drops_the_lowest_scores_and_of_equal_ones_the_oldest() -> None:
    plan = make_plan(BUDGET, 48, 4, 0)
    assert (plan.protected, plan.recent, plan.stride, plan.first_border) == (1, 3, 1, 48)
    scores = [0.0, 5.0, 2.0, 7.0, 2.0, 1.0, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0]
    assert plan.victims(48, range(12), scores) == [5]
    scores[5] = 2.0
    assert plan.victims(48, range(12), scores) == [2]
    assert plan.victims(48, range(11), scores) == []


def test_lots_are_drawn_alike_each_time() -> None:
    plan = make_plan(RANDOM, 256, 4, 0)
    assert walk(plan, 1000) == walk(plan, 1000)
    assert walk(plan, 1000) != walk(make_plan(WINDOW, 200, 4, 0), 1000)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_never_crosses_a_border(policy: str) -> None:
    plan = make_plan(policy, 128, 4, 9)
    for start in range(600):
        end = plan.step_end(start)
        assert end > start and not any(plan.is_border(p) for p in range(start + 1, end))
        assert plan.is_border(end)
    assert not plan.is_border(plan.first_border - 1) and plan.is_border(plan.first_border)
    assert plan.reuse_limit < plan.first_border


@pytest.mark.parametrize(
    ("policy", "keep", "protected", "words"),
    [
        (WINDOW, 15, 0, ["--kv-window 15", "16 or more"]),
        (BUDGET, 16, 0, ["--kv-budget 16", "16 tokens", "64 or more"]),
        (BUDGET, 512, 500, ["--kv-budget 512", "512 tokens", "or more", "system prompt"]),
        ("h2o", 512, 0, ["'h2o'", "stop", "window", "budget"]),
    ],
)
def test_what_leaves_nothing_to_drop_is_refused_with_a_way_out(
    policy: str, keep: int, protected: int, words: list[str]
) -> None:
    with pytest.raises(BadInputError) as caught:
        make_plan(policy, keep, 16, protected)
    assert all(word in str(caught.value) for word in words)
    if policy == BUDGET:
        way_out = int(str(caught.value).split("use ")[1].split()[0])
        make_plan(policy, way_out, 16, protected)
        with pytest.raises(BadInputError):
            make_plan(policy, way_out - 1, 16, protected)


def test_losses_are_told_at_first_and_when_they_are_four_times_as_many() -> None:
    dropped, told = Dropped(), []
    for index in range(64):
        dropped.add([index + 1], 4)
        if dropped.is_news:
            dropped.told = dropped.tokens
            told.append(dropped.tokens)
    assert told == [4, 16, 64, 256] and (dropped.first, dropped.end) == (4, 260)


# --- in a schedule ---


def answers(setup: Setup, requests: Sequence[tuple[list[int], int]], policy: str, keep: int) -> Schedule:
    schedule = Schedule(setup)
    for ids, count in requests:
        plan = make_plan(policy, keep, setup.block_size, 0)
        schedule.add(ids, count, eviction=plan, draft_limit=setup.lookahead)
    schedule.run()
    assert not schedule.errors
    return schedule


def positions_seen(schedule: Schedule) -> list[dict[int, tuple[int, ...]]]:
    return [schedule.runner.history[i] for i in range(len(schedule.sequences))]


@pytest.mark.parametrize("policy", POLICIES)
def test_neither_batch_nor_chunks_nor_preemption_change_what_a_query_sees(policy: str) -> None:
    """F10. The fake KV of a position depends on what was evicted before: reads assert it block by block."""
    requests = [(prompt(70, 0), 30), (prompt(9, 1), 60), (prompt(41, 2), 12)]
    alone = []
    for request in requests:
        schedule = answers(Setup(prefix_cache=False, max_running=1), [request], policy, 40)
        alone += positions_seen(schedule)
    assert all(seen[max(seen)] for seen in alone), "nothing was evicted"
    for setup in (
        Setup(num_blocks=200),
        Setup(num_blocks=200, prefill_chunk=3, token_budget=7, depth=1),
        Setup(num_blocks=200, lookahead=3, accept=2, depth=1, windows=(None, 6)),
        Setup(num_blocks=14, prefill_chunk=9, windows=(None,)),
        Setup(num_blocks=14, depth=1, host_blocks=30),
        Setup(num_blocks=15, lookahead=2, accept=1, depth=1),
    ):
        schedule = answers(setup, requests, policy, 40)
        assert positions_seen(schedule) == alone
        if setup.num_blocks < 20:
            assert schedule.notices_of("preempted")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_what_fits_by_its_budget_alone_runs_in_a_pool_of_that_size(policy: str, depth: int) -> None:
    """A request of fifty blocks in a pool of eleven: without eviction it fails."""
    plan = make_plan(policy, 40, 4, 0)
    setup = Setup(num_blocks=plan.max_blocks, depth=depth, prefill_chunk=100, token_budget=200)
    schedule = answers(setup, [(prompt(150, 1), 50)], policy, 40)
    assert [len(answer) for answer in schedule.answers.values()] == [50]
    most = max(sum(b >= 0 for b in s.block_tables[0]) for p in schedule.plans for s in p.sequences)
    assert most == plan.max_blocks
    without = Schedule(Setup(num_blocks=plan.max_blocks, depth=depth))
    without.add(prompt(150, 1), 50)
    without.run()
    assert len(without.errors) == 1


def test_every_eviction_is_told_with_its_range() -> None:
    schedule = answers(Setup(num_blocks=200), [(prompt(100, 1), 60)], WINDOW, 24)
    told = schedule.notices_of("kv_evicted")
    assert len(told) == 3, told
    assert "4 of 32 tokens, between positions 4 and 7" in told[0][1] and "--kv-window 24" in told[0][1]
    assert not any("experimental" in detail for _, detail in told)
    scored = answers(Setup(num_blocks=200), [(prompt(100, 1), 60)], BUDGET, 40).notices_of("kv_evicted")
    assert scored and all("lowest scores, which is experimental" in detail for _, detail in scored)


def test_blocks_behind_the_first_border_are_nobody_elses() -> None:
    """I11: what an evicting request computes behind its first loss is never reused, by itself neither; what
    comes before is, by requests with and without a policy."""
    schedule = Schedule(Setup(num_blocks=200))
    ids, plan = prompt(120, 1), make_plan(BUDGET, 40, 4, 0)
    first = schedule.add(ids, 20, eviction=plan)
    schedule.run()
    again = schedule.add(ids, 20, eviction=plan)
    exact = schedule.add(ids, 20)
    schedule.run()
    cached = {i: schedule.sequences[i].cached_tokens for i in (first, again, exact)}
    assert cached == {first: 0, again: plan.reuse_limit, exact: plan.first_border}
    # Exact KV behind the border is there by now, but it is not what this request would compute.
    late = schedule.add(ids, 20, eviction=plan)
    schedule.run()
    assert schedule.sequences[late].cached_tokens == plan.reuse_limit
    assert schedule.answers[first] == schedule.answers[again] == schedule.answers[late]


def test_samples_share_an_evicted_prompt() -> None:
    schedule = Schedule(Setup(num_blocks=200, max_running=4))
    ids, plan = prompt(90, 3), make_plan(BUDGET, 40, 4, 0)
    parent = schedule.add(ids, 30, eviction=plan)
    for sample in (1, 2):
        schedule.add(ids, 30, eviction=plan, sample=sample, fork_parent=parent)
    schedule.run()
    shared = sum(len(plan_.forked) for plan_ in schedule.plans)
    assert shared == 2 and not schedule.errors
    seen = positions_seen(schedule)
    assert all(one[p] == seen[0][p] for one in seen for p in range(89))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_aborts_with_evictions_leave_the_pool_full(policy: str) -> None:
    """F18: wherever the abort finds them, blocks come back, those that went before too, and none twice."""
    rng = random.Random(11)
    setup = Setup(
        num_blocks=26,
        max_running=5,
        depth=1,
        host_blocks=20,
        lookahead=2,
        accept=1,
        windows=(None, 6),
        check_every_step=False,
        check_reads=False,
    )
    schedule = Schedule(setup)
    alive: list[int] = []
    aborted = 0
    while aborted < 1000 // len(POLICIES) + 1:
        if len(alive) < 9:
            tokens = prompt(rng.randint(1, 80), rng.randint(0, 3))
            parent = rng.choice(alive) if alive and rng.random() < 0.2 else None
            if parent is not None:
                tokens = list(schedule.sequences[parent].start.prompt_token_ids)
            plan = make_plan(policy, rng.choice((16, 24, 40)), 4, rng.randint(0, 8) * (policy == WINDOW))
            if parent is not None:
                plan = schedule.sequences[parent].eviction
            fields = {"eviction": plan, "fork_parent": parent, "draft_limit": rng.randint(0, 2)}
            alive.append(schedule.add(tokens, rng.randint(1, 60), **fields))
        schedule.step()
        if rng.random() < 0.05:
            schedule.kv.check_integrity()
        alive = [s for s in alive if s not in schedule.finished_at and s not in schedule.errors]
        if alive and rng.random() < 0.35:
            schedule.scheduler.cancel(alive.pop(rng.randrange(len(alive))))
            aborted += 1
    schedule.run()
    assert not schedule.errors
    assert {n.kind for _, n in schedule.notices} >= {"preempted", "resumed", "kv_evicted"}


def test_a_prompt_runs_in_steps_up_to_the_first_border() -> None:
    """What a small window leaves at once is no reason to compute more rows at once than that."""
    from edgellm.cache.eviction import longest_step

    assert longest_step("window", 256, 16, 512) == make_plan("window", 256, 16, 0).first_border == 288
    assert longest_step("window", 512, 16, 512) == 512
    assert longest_step("budget", 256, 16, 512) == make_plan("budget", 256, 16, 0).first_border < 512
    assert longest_step("stop", 256, 16, 512) == 512
