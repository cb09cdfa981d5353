"""The scheduler's plans over the real KV manager: batching, chunks, order, drafts, forks, rope restarts."""

from __future__ import annotations

import itertools

import pytest

from edgellm.contracts import PENDING, SequenceResult, StepPlan, StepResult
from edgellm.scheduler.policy import kv_salt, prefill_order, rank, shared_salt
from edgellm.scheduler.sequence import Sequence
from edgellm_models.errors import BadInputError, EngineError
from tests.support.fake_runner import answer_alone
from tests.support.schedule import Schedule, Setup


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other start shares."""
    return [1000 * start + i for i in range(length)]


def parts(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """Sequence id -> (first position, tokens)."""
    return {s.sequence_id: (s.start_position, len(s.token_ids)) for s in plan.sequences}


# --- continuous batching -----------------------------------------------------------------------------------


def test_free_slots_are_filled_at_once() -> None:
    """Eight answers in four slots: 110 steps, mean end 38.75; whole batches at a time would take 200."""
    schedule = Schedule(Setup(max_running=4, num_blocks=256))
    lengths = [100, 10, 10, 10, 100, 10, 10, 10]
    for i, length in enumerate(lengths):
        schedule.add(prompt(3, i), length)
    schedule.run()
    assert len(schedule.plans) == 110
    assert sum(schedule.finished_at.values()) / 8 == 38.75
    static = sum(max(lengths[i : i + 4]) for i in (0, 4))
    assert static == 200


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_embedded_texts_run_beside_answers_draw_nothing_and_reuse_nothing(
    depth: int, num_blocks: int
) -> None:
    """Every row of theirs runs, the second time too; where blocks are short they wait or begin again."""
    schedule = Schedule(Setup(num_blocks=num_blocks, depth=depth, prefill_chunk=8, token_budget=16))
    texts = [prompt(33), prompt(33), prompt(1, 1), prompt(8, 2)]
    answers = [schedule.add(prompt(9, 3 + i), 12) for i in range(2)]
    embedded = [schedule.add(ids, 1, pooling="mean", priority=1) for ids in texts]
    schedule.run()
    for sequence_id, ids in zip(embedded, texts, strict=True):
        assert schedule.answers[sequence_id] == [] and sequence_id in schedule.finished_at
        rows = {
            s.start_position + i
            for plan in schedule.plans
            for s in plan.sequences
            if s.sequence_id == sequence_id
            for i in range(len(s.token_ids))
        }
        assert rows == set(range(len(ids)))
        assert schedule.sequences[sequence_id].cached_tokens == 0
    for i, sequence_id in enumerate(answers):
        assert schedule.answers[sequence_id] == answer_alone(prompt(9, 3 + i), 12)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_embedded_texts_displace_nothing_that_is_cached(host_blocks: int) -> None:
    """Nobody could reuse their blocks, so they are the first to be given away again."""
    setup = Setup(num_blocks=24, prefill_chunk=8, max_running=2, windows=(None, 6), host_blocks=host_blocks)
    schedule, salt = Schedule(setup), shared_salt("", is_short=True)
    schedule.add(prompt(32), 1)
    schedule.run()
    cached = schedule.kv.counts()["cached"]
    assert cached and schedule.kv.reusable([*prompt(32), 1], salt=salt) == 32
    for i in range(1, 7):
        schedule.add(prompt(30, i), 1, pooling="last" if i % 2 else "mean", priority=1)
    schedule.run()
    assert schedule.kv.counts()["cached"] == cached
    assert schedule.kv.reusable([*prompt(32), 1], salt=salt) == 32


def test_the_shortest_prefill_goes_first_in_one_slot() -> None:
    """Requests of 100, 10 and 10 steps end after 50 on average; in order of arrival it would be 110."""
    schedule = Schedule(Setup(max_running=1, token_budget=4, prefill_chunk=4, num_blocks=256))
    for i, steps in enumerate((100, 10, 10)):
        schedule.add(prompt(4 * steps, i), 1)
    schedule.run()
    assert sorted(schedule.finished_at.values()) == [10, 20, 120]
    assert schedule.finished_at[0] == 120


@pytest.mark.parametrize("depth", [0, 1])
def test_an_answer_of_500_tokens_is_a_prefill_and_499_decodes(depth: int) -> None:
    schedule = Schedule(Setup(num_blocks=200, depth=depth, check_reads=False, check_every_step=False))
    sequence_id = schedule.add(prompt(7), 500)
    schedule.run()
    assert len(schedule.plans) == 500
    kinds = [plan.sequences[0].is_prefill for plan in schedule.plans]
    assert kinds == [True] + [False] * 499
    assert schedule.answers[sequence_id] == answer_alone(prompt(7), 500)


def test_a_prompt_of_two_chunks_runs_beside_two_streams() -> None:
    """[A1, B, C], [A2, B, C], [A, B, C]."""
    schedule = Schedule(Setup(prefill_chunk=16, token_budget=18))
    b, c = schedule.add(prompt(3, 1), 50), schedule.add(prompt(3, 2), 50)
    schedule.step()
    a = schedule.add(prompt(30, 3), 5)
    for _ in range(3):
        schedule.step()
    first, second, third = (parts(plan) for plan in schedule.plans[1:])
    assert first == {a: (0, 16), b: (3, 1), c: (3, 1)}
    assert second == {a: (16, 14), b: (4, 1), c: (4, 1)}
    assert third == {a: (30, 1), b: (5, 1), c: (5, 1)}
    assert [plan.sequences[-1].needs_logits for plan in schedule.plans[1:3]] == [False, True]


def test_a_prompt_of_two_chunks_starts_together_with_two_short_ones() -> None:
    schedule = Schedule(Setup(prefill_chunk=16, token_budget=32))
    a, b, c = (schedule.add(prompt(n, i), 5) for i, n in enumerate((30, 4, 5)))
    for _ in range(3):
        schedule.step()
    assert parts(schedule.plans[0]) == {a: (0, 16), b: (0, 4), c: (0, 5)}
    assert parts(schedule.plans[1]) == {a: (16, 14), b: (4, 1), c: (5, 1)}
    assert parts(schedule.plans[2]) == {a: (30, 1), b: (5, 1), c: (6, 1)}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_stalls_no_stream_and_is_hardly_delayed(depth: int) -> None:
    setup = Setup(
        num_blocks=400,
        block_size=16,
        max_running=8,
        token_budget=512 + 8,
        prefill_chunk=512,
        depth=depth,
        check_reads=False,
        check_every_step=False,
    )
    schedule = Schedule(setup)
    streams = [schedule.add(prompt(5, i), 60) for i in range(4)]
    for _ in range(5):
        schedule.step()
    long = schedule.add(prompt(4000, 9), 3)
    before = len(schedule.outcomes)
    while not schedule.answers[long]:
        schedule.step()
    during = schedule.outcomes[before:]
    for outcomes in during:
        brought = {o.sequence_id for o in outcomes if o.result.token_ids}
        assert brought >= set(streams), "a running stream got no token"
    alone = -(-4000 // 512)
    assert len(during) <= alone + depth, "the streams' tokens delay the prompt by more than their own rows"


def test_a_prompt_beside_streams_is_cut_finer_than_alone() -> None:
    """A stream's gap is that of ``mixed_chunk`` rows."""
    schedule = Schedule(Setup(token_budget=64, prefill_chunk=32, mixed_chunk=5, num_blocks=256))
    stream = schedule.add(prompt(2), 12)
    schedule.step()
    long = schedule.add(prompt(60, 1), 3)
    schedule.run()
    mixed = [parts(plan) for plan in schedule.plans if stream in parts(plan)][1:]
    assert len(mixed) == 11 and all(parts_[stream][1] == 1 for parts_ in mixed)
    assert all(sum(n for s, (_, n) in parts_.items() if s != stream) == 5 for parts_ in mixed)
    after = [parts(plan)[long][1] for plan in schedule.plans[12:] if long in parts(plan)]
    assert after[0] == 5


def test_many_prompts_beside_one_stream_get_more_rows_up_to_a_bound() -> None:
    """Each further prompt that waits counts as a stream; a thousand of them as four."""
    for waiting, rows in ((2, 10), (3, 15), (4, 20), (9, 20), (40, 20)):
        setup = Setup(max_running=50, token_budget=128, prefill_chunk=32, mixed_chunk=5, num_blocks=512)
        schedule = Schedule(setup)
        stream = schedule.add(prompt(2), 12)
        schedule.step()
        for number in range(waiting):
            schedule.add(prompt(60, 1 + number), 1)
        schedule.step()
        planned = parts(schedule.plans[-1])
        assert planned[stream][1] == 1
        assert sum(n for s, (_, n) in planned.items() if s != stream) == rows, waiting


def test_short_prompts_share_a_step_and_pass_a_long_one() -> None:
    schedule = Schedule(Setup(prefill_chunk=16, token_budget=20, max_running=6, num_blocks=256))
    long = schedule.add(prompt(160, 1), 2)
    schedule.step()
    shorts = [schedule.add(prompt(5, 2 + i), 1) for i in range(3)]
    schedule.step()
    plan = parts(schedule.plans[1])
    assert set(plan) == {long, *shorts} and plan[long] == (16, 5)
    schedule.run()
    assert all(schedule.finished_at[s] < schedule.finished_at[long] for s in shorts)


# --- order -------------------------------------------------------------------------------------------------


def test_priority_comes_before_length() -> None:
    schedule = Schedule(Setup(max_running=1))
    batch = schedule.add(prompt(2, 1), 1, priority=10)
    chat = schedule.add(prompt(30, 2), 1, priority=0)
    assert schedule.scheduler.waiting_ids() == (chat, batch)
    schedule.run()
    assert schedule.finished_at[chat] < schedule.finished_at[batch]


def served_under_load(bound: float, priority: int, seconds: int) -> float | None:
    """When the victim starts while a newer, shorter or more urgent prompt comes every second."""
    schedule = Schedule(Setup(max_running=1, age_bound_s=bound, check_every_step=False))
    victim = schedule.add(prompt(8, 1), 1, priority=priority)
    started = schedule.clock.now
    for i in range(seconds):
        schedule.add(prompt(4, 2 + i), 1)
        schedule.step()
        if victim in schedule.finished_at:
            return schedule.clock.now - started
        schedule.clock.now += 1.0
    return None


@pytest.mark.parametrize("priority", [0, 5])
def test_nothing_starves_beyond_the_age_bound(priority: int) -> None:
    """A longer prompt, of the same or a lower priority, waits for the bound and then runs."""
    assert served_under_load(1e9, priority, 60) is None, "the load does not starve anybody: no test"
    waited = served_under_load(20.0, priority, 60)
    assert waited is not None and waited <= 21.0


def test_a_backlog_that_has_grown_old_delays_a_chat_by_one() -> None:
    schedule = Schedule(Setup(max_running=1, age_bound_s=20.0))
    for i in range(10):
        schedule.add(prompt(4, i), 1, priority=10)
    schedule.clock.now += 100.0
    chats = [schedule.add(prompt(4, 20 + i), 1) for i in range(2)]
    schedule.run()
    order = sorted(schedule.finished_at, key=lambda i: schedule.finished_at[i])
    assert order[0] not in chats and order[1:3] == chats


def test_victims_are_the_last_by_priority_then_age() -> None:
    schedule = Schedule(Setup())
    old_batch = schedule.make([1], 1, priority=10, arrival=1.0)
    new_batch = schedule.make([1], 1, priority=10, arrival=2.0)
    new_chat = schedule.make([1], 1, arrival=3.0)
    assert max((old_batch, new_batch, new_chat), key=rank) is new_batch
    assert max((old_batch, new_chat), key=rank) is old_batch


def test_one_that_was_preempted_resumes_before_new_ones_start() -> None:
    schedule = Schedule(Setup())
    short, resumed = schedule.make([1, 2], 1), schedule.make(prompt(9), 1)
    resumed.preempted_at = 5.0
    assert prefill_order([short, resumed], 100.0, 1e9, {}) == [resumed, short]


# --- depth 1 -----------------------------------------------------------------------------------------------


def test_one_step_ahead_runs_pending_ids() -> None:
    schedule = Schedule(Setup(depth=1))
    schedule.add(prompt(20), 4)
    schedule.run()
    ids = [plan.sequences[0].token_ids for plan in schedule.plans]
    assert ids[0] == tuple(prompt(16)) and ids[1] == tuple(prompt(20)[16:])
    assert ids[2:] == [(PENDING,)] * 3
    assert len(schedule.plans) == 5, "no step was planned beyond the limit of the answer"


def test_what_needs_the_host_is_not_planned_ahead_of_its_ids() -> None:
    schedule = Schedule(Setup(depth=1))
    free, bound = schedule.add(prompt(20), 6), schedule.add(prompt(20, 1), 6, needs_host=True)
    schedule.run()
    ids = [s.token_ids for plan in schedule.plans for s in plan.sequences if s.sequence_id == bound]
    assert ids[0] == tuple(prompt(20, 1)[:16]) and not any(PENDING in tokens for tokens in ids)
    assert any(PENDING in s.token_ids for plan in schedule.plans for s in plan.sequences)
    assert schedule.answers[free] == answer_alone(prompt(20), 6)
    assert schedule.answers[bound] == answer_alone(prompt(20, 1), 6)


def test_the_extra_slot_of_a_finished_sequence_is_discarded() -> None:
    """Ended by its third token while the fourth is in flight: that one is neither told nor published."""
    schedule = Schedule(Setup(depth=1, block_size=2))
    first = schedule.add([1, 2], 10)
    while len(schedule.answers[first]) < 3:
        schedule.step()
    assert schedule.unrun[0].sequences[0].sequence_id == first
    schedule.scheduler.finish(first)
    schedule.run()
    assert schedule.answers[first] == answer_alone([1, 2], 3)
    whole = [1, 2, *answer_alone([1, 2], 10)]
    # Committed were the prompt and two answer tokens: two blocks, not the third that was in flight.
    assert schedule.kv.reusable(whole, salt="short:") == 4


def test_results_must_come_in_the_order_of_the_plans() -> None:
    schedule = Schedule(Setup(depth=1))
    schedule.add(prompt(4), 4)
    first, second = schedule.scheduler.next_step(), schedule.scheduler.next_step()
    assert first is not None and second is not None and schedule.scheduler.next_step() is None
    with pytest.raises(EngineError, match="step 0"):
        schedule.scheduler.commit(StepResult(second.step, (SequenceResult(0, (1,)),)))


# --- drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "accept"), [(0, 0), (0, 2), (0, 3), (1, 0), (1, 2)])
def test_drafts_change_the_number_of_steps_only(depth: int, accept: int) -> None:
    setup = Setup(depth=depth, lookahead=3, accept=accept, windows=(None, 6))
    schedule = Schedule(setup)
    ids = [schedule.add(prompt(5 + i, i), 24, draft_limit=3) for i in range(3)]
    schedule.run()
    for i, sequence_id in enumerate(ids):
        assert schedule.answers[sequence_id] == answer_alone(prompt(5 + i, i), 24)
    decodes = sum(1 for plan in schedule.plans for s in plan.sequences if s.sequence_id == ids[0]) - 1
    if depth == 0:
        assert decodes == -(-23 // (accept + 1))
    drafted = [s.draft_limit for plan in schedule.plans for s in plan.sequences]
    assert max(drafted) == 3


@pytest.mark.parametrize("wanted", [(6, 6), (0, 6), (6, 0)])
def test_drafts_give_way_before_anybody_is_preempted(wanted: tuple[int, int]) -> None:
    """The demand fits without drafts and not with them: nobody is preempted, and drafts shrink."""
    tight = Setup(num_blocks=12, block_size=2, max_running=2, lookahead=6, accept=0)
    schedule = Schedule(tight)
    # The first has 12 tokens with KV at the end: six blocks, and the other as many by then.
    answers = (11, 21)
    ids = [schedule.add(prompt(2, i), answers[i], draft_limit=wanted[i]) for i in range(2)]
    schedule.run()
    assert not schedule.notices_of("preempted")
    limits = [s.draft_limit for plan in schedule.plans for s in plan.sequences if not s.is_prefill]
    assert 0 in limits and max(limits) > 1
    assert all(schedule.answers[s] == answer_alone(prompt(2, i), answers[i]) for i, s in enumerate(ids))


def test_drafts_get_what_prefills_leave_of_the_budget() -> None:
    schedule = Schedule(Setup(token_budget=20, prefill_chunk=16, lookahead=4, accept=0))
    stream = schedule.add(prompt(3), 40, draft_limit=4)
    schedule.step()
    schedule.add(prompt(40, 1), 1)
    for _ in range(4):
        schedule.step()
    mixed = [next(s for s in plan.sequences if s.sequence_id == stream) for plan in schedule.plans[1:]]
    assert [s.draft_limit for s in mixed] == [3, 3, 4, 4]  # 20 - 1 - 16; the third chunk has 8 tokens


def test_a_draft_stays_inside_the_answers_limit() -> None:
    schedule = Schedule(Setup(lookahead=8, accept=8))
    sequence_id = schedule.add(prompt(3), 5, draft_limit=8)
    schedule.run()
    assert schedule.plans[1].sequences[0].draft_limit == 3
    assert schedule.answers[sequence_id] == answer_alone(prompt(3), 5)


# --- forks -------------------------------------------------------------------------------------------------


def add_samples(schedule: Schedule, tokens: list[int], count: int, limit: int) -> list[int]:
    parent = schedule.add(tokens, limit)
    return [parent] + [schedule.add(tokens, limit, sample=i, fork_parent=parent) for i in range(1, count)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 2, 17, 20])
def test_samples_share_the_prompt(depth: int, prefix_cache: bool, length: int) -> None:
    schedule = Schedule(Setup(depth=depth, prefix_cache=prefix_cache, windows=(None, 6)))
    ids = add_samples(schedule, prompt(length), 3, 9)
    schedule.run()
    for sample, sequence_id in enumerate(ids):
        assert schedule.answers[sequence_id] == answer_alone(prompt(length), 9, sample)
    # The prompt runs once but for its last token, which each sample runs for its own row of logits.
    assert schedule.runner.rows == (length - 1) + 3 + 3 * 8


def test_samples_beyond_the_places_wait_and_reuse_whole_blocks() -> None:
    schedule = Schedule(Setup(max_running=2, block_size=4))
    ids = add_samples(schedule, prompt(14), 4, 6)
    schedule.run()
    for sample, sequence_id in enumerate(ids):
        assert schedule.answers[sequence_id] == answer_alone(prompt(14), 6, sample)
    assert [schedule.sequences[i].cached_tokens for i in ids] == [0, 13, 12, 12]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_samples_outlive_their_parent(steps: int) -> None:
    schedule = Schedule(Setup(prefill_chunk=6, depth=1))
    ids = add_samples(schedule, prompt(14), 3, 6)
    for _ in range(steps):
        schedule.step()
    schedule.scheduler.cancel(ids[0])
    schedule.run()
    for sample in (1, 2):
        assert schedule.answers[ids[sample]] == answer_alone(prompt(14), 6, sample)


def test_a_running_sequence_can_be_forked_where_it_is() -> None:
    """As beam search does: the child has the parent's tokens and another last one."""
    schedule = Schedule(Setup())
    parent = schedule.add(prompt(6), 12)
    for _ in range(5):
        schedule.step()
    forked = [*prompt(6), *schedule.answers[parent][:-1], 49]
    child = schedule.make(forked, 12, sample=1)
    schedule.enter(child)
    assert schedule.scheduler.fork(parent, child)
    gone = schedule.make(forked, 12, sample=2)
    assert schedule.scheduler.fork(parent, gone)
    schedule.scheduler.cancel(gone.sequence_id)
    schedule.run()
    assert [pair for plan in schedule.plans for pair in plan.forked] == [(parent, child.sequence_id)]
    assert schedule.answers[parent] == answer_alone(prompt(6), 12)
    assert schedule.answers[child.sequence_id] == answer_alone(forked, 12, 1)


def test_a_fork_shares_no_kv_of_the_ropes_other_scaling() -> None:
    schedule = Schedule(Setup(rope_switch_length=8))
    parent = schedule.add(prompt(6), 12)
    schedule.step()
    tokens = [*prompt(6), 1, 2, 3]
    assert not schedule.scheduler.fork(parent, schedule.make(tokens, 4))
    assert schedule.scheduler.fork(parent, schedule.make(tokens[:7], 4))


# --- rope restart, scored prompts, errors ------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_sequence_that_outgrows_the_short_rope_is_computed_again(depth: int, lookahead: int) -> None:
    """The runner finds a K of the other scaling, one that the prefix cache keeps included."""
    schedule = Schedule(Setup(depth=depth, rope_switch_length=24, lookahead=lookahead, accept=lookahead))
    crossing = schedule.add(prompt(19), 20, draft_limit=lookahead)
    schedule.run()
    details = [detail for _, detail in schedule.notices_of("rope_scaling_switched")]
    assert len(details) == 1 and "24 tokens" in details[0]
    again = schedule.add(prompt(19) + schedule.answers[crossing][:10], 5)  # long from its first chunk on
    short = schedule.add(prompt(19), 4)
    schedule.run()
    assert schedule.answers[crossing] == answer_alone(prompt(19), 20)
    assert schedule.answers[again] == answer_alone(prompt(19) + schedule.answers[crossing][:10], 5)
    assert schedule.answers[short] == answer_alone(prompt(19), 4)
    assert schedule.sequences[short].cached_tokens and schedule.sequences[again].cached_tokens
    assert len(schedule.notices_of("rope_scaling_switched")) == 1


def test_every_token_of_a_scored_prompt_runs_and_is_scored_once() -> None:
    schedule = Schedule(Setup(num_blocks=14, max_running=2, prefill_chunk=6, token_budget=16))
    schedule.add(prompt(20), 2)
    schedule.run()
    schedule.add(prompt(8, 1), 40)
    scored = schedule.add(prompt(20), 30, prompt_logprobs=0)
    schedule.run()
    assert any(sequence_id == scored for sequence_id, _ in schedule.notices_of("preempted"))
    brought = [o for outcomes in schedule.outcomes for o in outcomes if o.sequence_id == scored]
    ids = list(itertools.chain(*([p.token_id for p in o.result.prompt_logprobs] for o in brought)))
    assert ids == prompt(20)[1:]


def test_salts_of_different_kinds_never_meet() -> None:
    schedule = Schedule(Setup())

    def salt(text: str, *, short: bool, scored: bool) -> str:
        sequence: Sequence = schedule.make([1], 1, salt=text, prompt_logprobs=0 if scored else None)
        sequence.rope_is_short = short
        return kv_salt(sequence)

    texts = ["", "a", "long:a", "short:", "own-3-short:a"]
    plain = [salt(t, short=short, scored=False) for t in texts for short in (True, False)]
    scored = [salt(t, short=True, scored=True) for t in texts for _ in range(2)]
    assert len(set(plain + scored)) == len(plain + scored)


def test_an_error_ends_its_own_sequence_only() -> None:
    schedule = Schedule(Setup(depth=1, error_at={0: 9}))
    bad, good = schedule.add(prompt(6), 12), schedule.add(prompt(7, 1), 12)
    schedule.run()
    assert schedule.errors == {bad: "NaN in the logits"}
    assert schedule.answers[bad] == answer_alone(prompt(6), 3)
    assert schedule.answers[good] == answer_alone(prompt(7, 1), 12)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(BadInputError, match="5 running requests"):
        Schedule(Setup(max_running=5, token_budget=4))
    with pytest.raises(BadInputError, match="depth 2"):
        Schedule(Setup(depth=2))
    schedule = Schedule(Setup())
    with pytest.raises(EngineError, match="room for 0 answer tokens"):
        schedule.add([1], 0)
    sequence = schedule.make([1], 1)
    schedule.scheduler.add(sequence)
    with pytest.raises(EngineError, match="scheduled already"):
        schedule.scheduler.add(sequence)


def test_the_progress_of_a_prompt_is_told() -> None:
    schedule = Schedule(Setup(prefill_chunk=6))
    schedule.add(prompt(14), 2)
    schedule.run()
    told = [(o.is_prompt, o.computed) for outcomes in schedule.outcomes for o in outcomes]
    assert told == [(True, 6), (True, 12), (True, 14), (False, 15)]
