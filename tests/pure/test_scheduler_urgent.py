"""One that waits with a better priority: it gets a place or blocks from the last that runs, and says so."""

from __future__ import annotations

import pytest

from tests.support.fake_runner import answer_alone
from tests.support.schedule import Schedule, Setup


def prompt(length: int, start: int = 0) -> list[int]:
    return [1000 * start + i for i in range(length)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 64])
def test_a_chat_takes_the_place_of_the_newest_batch_work(depth: int, host_blocks: int) -> None:
    schedule = Schedule(Setup(max_running=2, depth=depth, host_blocks=host_blocks))
    batch = []
    for i in range(2):
        batch.append(schedule.add(prompt(8, i), 30, priority=10))
        schedule.clock.now += 1
    for _ in range(4):
        schedule.step()
    chat, began = schedule.add(prompt(6, 5), 4), len(schedule.plans)
    schedule.run()
    assert schedule.finished_at[chat] - began <= 4 + 2 * depth, "the chat waited for a place"
    [(victim, detail)] = schedule.notices_of("preempted")
    assert victim == batch[1] and "better priority" in detail
    assert ("host memory" in detail) == (host_blocks > 0)
    assert [s for s, _ in schedule.notices_of("resumed")] == [victim]
    assert schedule.finished_at[batch[0]] < schedule.finished_at[victim]
    for i, sequence_id in enumerate(batch):
        assert schedule.answers[sequence_id] == answer_alone(prompt(8, i), 30)
    assert schedule.answers[chat] == answer_alone(prompt(6, 5), 4)


@pytest.mark.parametrize("depth", [0, 1])
def test_several_chats_take_several_places_and_no_more(depth: int) -> None:
    schedule = Schedule(Setup(max_running=3, depth=depth))
    batch = [schedule.add(prompt(8, i), 30, priority=10) for i in range(3)]
    for _ in range(4):
        schedule.step()
    chats, began = [schedule.add(prompt(6, 5 + i), 6) for i in range(2)], len(schedule.plans)
    schedule.run()
    assert all(schedule.finished_at[chat] - began <= 8 + 2 * depth for chat in chats)
    assert [s for s, _ in schedule.notices_of("preempted")] == [batch[2], batch[1]]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chat_takes_the_blocks_of_batch_work_while_it_waits(depth: int) -> None:
    """There is a place, but no block."""
    schedule = Schedule(Setup(num_blocks=12, depth=depth))
    batch = schedule.add(prompt(8, 1), 36, priority=10)
    while len(schedule.answers[batch]) < 20:
        schedule.step()
    chat, began = schedule.add(prompt(32, 2), 3), len(schedule.plans)
    schedule.run()
    assert schedule.finished_at[chat] - began <= 5 + 2 * depth
    assert {s for s, _ in schedule.notices_of("preempted")} == {batch}
    assert schedule.answers[batch] == answer_alone(prompt(8, 1), 36)


def test_among_equals_nobody_loses_a_place() -> None:
    schedule = Schedule(Setup(max_running=1))
    first = schedule.add(prompt(20, 1), 30, priority=3)
    for _ in range(4):
        schedule.step()
    later = [schedule.add(prompt(2, 2), 1, priority=3), schedule.add(prompt(2, 3), 1, priority=4)]
    schedule.run()
    assert not schedule.notices_of("preempted")
    assert all(schedule.finished_at[first] < schedule.finished_at[s] for s in later)
