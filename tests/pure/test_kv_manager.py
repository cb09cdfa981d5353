"""The KV manager: what it reuses, shares, copies, gives back and refuses, case by case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgellm.cache import prefix_index
from edgellm.cache.conversation import ConversationMemory
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.prefix_index import chain_hash
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import BlockCopy, HostCopy
from edgellm_models.errors import EngineError

ROOT = Path(__file__).resolve().parent.parent.parent


def manager(*windows_and_blocks: tuple[int | None, int], block_size: int = 4, **options: object) -> KVManager:
    layouts = [GroupLayout(window, count) for window, count in windows_and_blocks]
    return KVManager(layouts, block_size, **options)  # type: ignore[arg-type]


def run(kv: KVManager, sequence_id: int, tokens: Sequence[int], chunk: int = 512, salt: str = "") -> int:
    """Opens a sequence and commits all its tokens in chunks; how many were reused."""
    reused = kv.open(sequence_id, tokens, salt=salt)
    extend(kv, sequence_id, tokens[reused:], chunk)
    return reused


def extend(kv: KVManager, sequence_id: int, tokens: Sequence[int], chunk: int = 512) -> list[BlockCopy]:
    copies = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        made = kv.grow(sequence_id, kv.committed(sequence_id) + len(part))
        assert made is not None, "blocks are short"
        copies += made
        kv.commit(sequence_id, part)
        kv.check_integrity()
    return copies


# --- prefix reuse ---


@pytest.mark.parametrize(("length", "reusable"), [(1_000, 992), (992, 976), (17, 16), (16, 0), (1, 0)])
def test_whole_blocks_are_reused_and_one_token_must_run(length: int, reusable: int) -> None:
    """Reusable of a cached prompt of 1,000 / 992 tokens with block 16: 992 / 976."""
    kv = manager((None, 200), block_size=16)
    prompt = list(range(length))
    run(kv, 1, prompt)
    assert kv.reusable(prompt) == reusable
    kv.free(1)
    assert kv.reusable(prompt) == reusable
    assert kv.open(2, prompt) == reusable and kv.committed(2) == reusable


def test_a_running_and_an_ended_request_share_alike() -> None:
    kv = manager((None, 10))
    run(kv, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(kv, 2, [1, 2, 3, 4, 5, 6, 7, 8, 7]) == 8
    assert kv.tables(1)[0][:2] == kv.tables(2)[0][:2] and kv.tables(1)[0][2] != kv.tables(2)[0][2]
    assert kv.counts() == {"used": 4, "shared": 2, "cached": 0, "free": 6, "evicted": 0, "host": 0}
    kv.free(1)
    kv.free(2)
    assert kv.counts() == {"used": 0, "shared": 0, "cached": 2, "free": 8, "evicted": 0, "host": 0}
    assert run(kv, 3, [1, 2, 3, 4, 0, 0, 0, 0, 0]) == 4


def test_a_partial_block_is_never_shared() -> None:
    """F09: hashing a block before it is full would give a prompt the cache of another."""
    kv = manager((None, 10))
    run(kv, 1, [1, 2, 3, 4, 5, 6, 7])
    assert kv.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    extend(kv, 1, [8])
    assert kv.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_drafted_tokens_are_not_published_before_they_are_committed() -> None:
    kv = manager((None, 10), lookahead=3)
    run(kv, 1, [1, 2, 3, 4, 5])
    assert kv.grow(1, 9) == []
    assert kv.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    kv.commit(1, [6, 7])
    kv.check_integrity()
    assert kv.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    extend(kv, 1, [0])
    assert kv.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4 and kv.reusable([1, 2, 3, 4, 5, 6, 7, 0, 9]) == 8


@pytest.mark.parametrize("is_patched", [False, True])
def test_equal_last_blocks_behind_other_prefixes_are_not_confused(
    is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: also with a hash of seven values, and with the same text under another salt."""
    if is_patched:

        def small(parent: bytes, token_ids: Sequence[int], epoch: int) -> bytes:
            return bytes([chain_hash(parent, token_ids, epoch)[0] % 7])

        monkeypatch.setattr(prefix_index, "chain_hash", small)
    kv = manager((None, 300), (9, 300))
    prompts = [[a, b, c, d, 9, 9, 9, 9, 0] for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)]
    for number, prompt in enumerate(prompts):
        assert run(kv, number, prompt) == 0, "reused the blocks of another prompt"
    for number, prompt in enumerate(prompts):
        assert run(kv, 100 + number, prompt, salt="x") == 0, "reused across salts"
    for number, prompt in enumerate(prompts):
        assert kv.open(200 + number, prompt) == 8
        assert kv.tables(200 + number) == tuple(table[:2] for table in kv.tables(number))
    kv.check_integrity()


def test_a_hit_is_safe_from_the_allocation_that_follows() -> None:
    """The cached blocks are the only free ones: growing must not give away what was just reused."""
    kv = manager((None, 3))
    run(kv, 1, list(range(12)))
    kv.free(1)
    assert kv.open(2, [0, 1, 2, 3, 4, 5, 6, 7, 0]) == 8
    hit = kv.tables(2)[0]
    assert kv.grow(2, 9) == []
    assert kv.tables(2)[0][:2] == hit and len(set(kv.tables(2)[0])) == 3
    kv.check_integrity()


def test_the_tail_of_a_freed_request_is_given_away_first() -> None:
    kv = manager((None, 6))
    run(kv, 1, list(range(12)))
    run(kv, 2, list(range(100, 112)))
    table = kv.tables(1)[0]
    kv.free(1)
    assert kv.pools[0].cached_blocks() == (table[2], table[1], table[0])
    kv.free(2)
    run(kv, 3, [50, 51, 52, 53])
    assert kv.reusable([*range(12), 0]) == 8, "the last block of the oldest request goes first"
    assert kv.reusable([*range(100, 112), 0]) == 12
    run(kv, 4, [60, 61, 62, 63, 64, 65, 66, 67])
    assert kv.reusable([*range(12), 0]) == 0 and kv.reusable([*range(100, 112), 0]) == 12


def test_a_used_prefix_outlives_one_that_nobody_asked_for() -> None:
    kv = manager((None, 4))
    run(kv, 1, list(range(8)))
    kv.free(1)
    run(kv, 2, list(range(100, 108)))
    kv.free(2)
    kv.open(3, [*range(8), 0])
    kv.free(3)
    run(kv, 4, [50, 51, 52, 53, 54, 55, 56, 57])
    assert kv.reusable([*range(8), 0]) == 8 and kv.reusable([*range(100, 108), 0]) == 0


def test_without_a_prefix_cache_nothing_is_reused_and_all_blocks_come_back_empty() -> None:
    kv = manager((None, 10), enable_prefix_cache=False)
    run(kv, 1, list(range(9)))
    assert run(kv, 2, list(range(9))) == 0
    kv.free(1)
    kv.free(2)
    assert kv.counts()["cached"] == 0 and kv.counts()["free"] == 10


# --- windows ---


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_a_window_group_holds_what_is_seen_and_no_more(window: int, lookahead: int) -> None:
    """At most ceil((window - 1) / block) + 1 blocks while decoding; the lookahead widens the window."""
    kv = manager((None, 40), (window, 40), lookahead=lookahead)
    kv.open(1, [0] * 7)
    for new in [7, *[1] * 60]:
        committed = kv.committed(1)
        assert kv.grow(1, committed + new) == []
        live = {i * 4 + o for i, b in enumerate(kv.tables(1)[1]) if b >= 0 for o in range(4)}
        needed = set(range(max(0, committed - window + 1 - lookahead), committed + new))
        assert needed <= live
        assert min(live) + 4 > min(needed), "a block that nobody can see was kept"
        if committed and lookahead == 0:
            assert len(live) // 4 <= -(-(window - 1) // 4) + 1
        kv.commit(1, [0] * new)
        kv.check_integrity()
    assert all(block >= 0 for block in kv.tables(1)[0])


def test_the_window_moves_at_the_very_token() -> None:
    """F02: window 8, a prefill of 6, then single steps: never one step early or late."""
    kv = manager((8, 20), block_size=1)
    run(kv, 1, [0] * 6)
    for committed in range(6, 30):
        kv.grow(1, committed + 1)
        live = [i for i, block in enumerate(kv.tables(1)[0]) if block >= 0]
        assert live == list(range(max(0, committed - 7), committed + 1)), "the query sees exactly 8 positions"
        kv.commit(1, [0])


def test_a_rejected_draft_does_not_move_the_window() -> None:
    kv = manager((4, 20), block_size=1, lookahead=6)
    run(kv, 1, [0] * 20)
    for _ in range(10):
        committed = kv.committed(1)
        kv.grow(1, committed + 7)
        kv.commit(1, [0])
        assert all(block >= 0 for block in kv.tables(1)[0][committed - 3 - 6 :])
        kv.check_integrity()


def test_a_window_group_needs_only_the_last_positions_for_a_hit() -> None:
    kv = manager((None, 40), (6, 6))
    prompt = list(range(33))
    run(kv, 1, prompt, chunk=4)
    kv.free(1)
    assert kv.open(2, prompt) == 32
    tables = kv.tables(2)
    assert all(block >= 0 for block in tables[0]) and len(tables[0]) == 8
    assert [block >= 0 for block in tables[1]] == [False] * 6 + [True] * 2, (
        "5 positions before 32 lie in two blocks"
    )
    kv.check_integrity()


def test_a_hit_ends_where_every_group_still_has_what_it_needs() -> None:
    """A full group has all of the prefix; the window's blocks go one by one, those of its end tail first."""
    kv = manager((None, 40), (5, 5))
    prompt = [*range(16), 0]
    run(kv, 1, prompt[:16], chunk=4)
    kv.free(1)
    reusable = []
    for sequence_id in range(2, 7):
        reusable.append(kv.reusable(prompt))
        run(kv, sequence_id, [70 + sequence_id] * 4)  # takes one block of the window's pool
    reusable.append(kv.reusable(prompt))
    assert reusable == [16, 16, 16, 16, 12, 0], "an empty block, those of blocks 0, 1, then 3, at last 2"
    kv.free(6)
    assert kv.open(9, prompt) == 0
    kv.check_integrity()


def test_models_with_windows_only_reuse_too() -> None:
    kv = manager((5, 6), (9, 8))
    run(kv, 1, list(range(33)), chunk=4)
    kv.free(1)
    assert kv.open(2, list(range(33))) == 32
    assert [sum(b >= 0 for b in table) for table in kv.tables(2)] == [1, 2]


def test_blocks_behind_the_window_make_room_for_growth() -> None:
    """A pool that just holds the window is enough for any length."""
    kv = manager((4, 2))
    run(kv, 1, [0])
    extend(kv, 1, list(range(100)), chunk=1)
    assert kv.committed(1) == 101


# --- growth ---


def test_growth_that_finds_no_blocks_changes_nothing() -> None:
    kv = manager((None, 3), (4, 8))
    run(kv, 1, list(range(10)))
    before, counts = kv.tables(1), kv.counts()
    assert not kv.can_grow(1, 13) and kv.grow(1, 13) is None
    assert kv.tables(1) == before and kv.counts() == counts
    assert kv.can_grow(1, 12) and kv.grow(1, 12) == []
    kv.check_integrity()


def test_cached_blocks_are_given_away_for_growth() -> None:
    kv = manager((None, 3))
    run(kv, 1, list(range(12)))
    kv.free(1)
    assert run(kv, 2, [90, *range(8)]) == 0
    assert kv.reusable([*range(12), 0]) == 0


def test_slots_beyond_the_need_come_back() -> None:
    kv = manager((None, 8), lookahead=8)
    run(kv, 1, [0] * 4)
    kv.grow(1, 13)
    assert len(kv.tables(1)[0]) == 4
    kv.commit(1, [0])
    kv.grow(1, 6)
    assert len(kv.tables(1)[0]) == 2 and kv.counts()["free"] == 6
    kv.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_unused_slots_are_bounded(lookahead: int) -> None:
    """At most block size - 1 + lookahead per sequence and group, whatever was drafted and accepted."""
    kv = manager((None, 99), (7, 99), lookahead=lookahead)
    kv.open(1, [0])
    for step in range(80):
        committed = kv.committed(1)
        assert kv.grow(1, committed + 1 + lookahead) == []
        kv.commit(1, [0] * (1 + step % (lookahead + 1)))
        for table in kv.tables(1):
            assert len(table) * 4 - kv.committed(1) <= 3 + lookahead
        kv.check_integrity()


def test_tokens_without_slots_cannot_be_committed() -> None:
    kv = manager((None, 8))
    kv.open(1, [1, 2, 3])
    kv.grow(1, 2)
    with pytest.raises(EngineError, match=r"slots for 2 tokens, cannot commit 0 \+ 3"):
        kv.commit(1, [1, 2, 3])


@pytest.mark.parametrize(
    ("length", "block_size", "waste"), [(200, 8_192, 0.9756), (200, 16, 0.0385), (100, 16, 0.1071)]
)
def test_waste_is_the_share_of_slots_without_a_committed_token(
    length: int, block_size: int, waste: float
) -> None:
    kv = manager((None, 20), block_size=block_size)
    assert kv.waste() == 0
    run(kv, 1, [0] * length)
    assert kv.waste() == pytest.approx(waste, abs=5e-5)


@pytest.mark.parametrize(("block_size", "length"), [(16, 354), (32, 738)])
def test_waste_stays_under_four_percent_from_a_certain_length(block_size: int, length: int) -> None:
    def waste(tokens: int) -> float:
        kv = manager((None, 100), block_size=block_size)
        run(kv, 1, [0] * tokens, chunk=10_000)
        return kv.waste()

    assert waste(length - 1) >= 0.04
    assert all(waste(tokens) < 0.04 for tokens in range(length, length + 2 * block_size))


def test_waste_counts_shared_blocks_once() -> None:
    kv = manager((None, 20))
    run(kv, 1, [0] * 6)
    kv.fork(1, 2)
    assert kv.waste() == pytest.approx(2 / 8)
    extend(kv, 2, [1])
    assert kv.waste() == pytest.approx((2 + 1) / 12)


# --- forks ---


def test_a_fork_shares_all_and_the_first_to_write_gets_a_copy() -> None:
    kv = manager((None, 10), (5, 10))
    run(kv, 1, [1, 2, 3, 4, 5, 6])
    kv.fork(1, 2)
    before = kv.tables(1)
    assert kv.tables(2) == before and kv.counts()["shared"] == 4
    assert kv.grow(2, 7) == [BlockCopy(g, before[g][1], kv.tables(2)[g][1]) for g in (0, 1)]
    assert kv.tables(1) == before and all(kv.tables(2)[g][1] != before[g][1] for g in (0, 1))
    assert kv.grow(1, 7) == [], "the last owner writes in place"
    kv.commit(1, [7])
    kv.commit(2, [8])
    kv.check_integrity()


def test_a_fork_at_a_block_border_needs_no_copy() -> None:
    kv = manager((None, 10))
    run(kv, 1, [1, 2, 3, 4])
    kv.fork(1, 2)
    assert extend(kv, 1, [5]) == [] and extend(kv, 2, [6]) == []
    assert kv.tables(1)[0][0] == kv.tables(2)[0][0] and kv.tables(1)[0][1] != kv.tables(2)[0][1]


def test_a_fork_does_not_get_its_parents_draft() -> None:
    kv = manager((None, 10), lookahead=4)
    run(kv, 1, [1, 2, 3, 4, 5])
    kv.grow(1, 10)
    kv.fork(1, 2)
    assert len(kv.tables(1)[0]) == 3 and len(kv.tables(2)[0]) == 2
    kv.check_integrity()


def test_a_block_that_the_parent_filled_after_the_fork_is_not_written_by_the_child() -> None:
    """The step was in flight at the fork: the parent publishes the shared block, then ends."""
    kv = manager((None, 10))
    run(kv, 1, [1, 2, 3])
    kv.grow(1, 4)
    kv.fork(1, 2)
    kv.commit(1, [4])
    kv.free(1)
    kv.check_integrity()
    [copy] = kv.grow(2, 4) or []
    assert copy.source != copy.target == kv.tables(2)[0][0]
    kv.commit(2, [9])
    kv.check_integrity()
    assert kv.reusable([1, 2, 3, 4, 0]) == 4 and kv.reusable([1, 2, 3, 9, 0]) == 4


def test_copies_are_ordered_over_both_kinds() -> None:
    kv = manager((None, 10), host_blocks=[4])
    run(kv, 1, [1, 2])
    kv.fork(1, 2)
    kv.fork(1, 3)
    orders = [copy.order for copy in (kv.grow(1, 3) or [])]
    orders += [copy.order for copy in (kv.offload(2) or [])]
    orders += [copy.order for copy in (kv.restore(2) or [])]
    orders += [copy.order for copy in (kv.grow(2, 3) or [])]
    assert len(orders) == 3 and orders == sorted(set(orders))


# --- eviction ---


def test_blocks_after_an_eviction_are_known_only_under_their_epoch() -> None:
    kv = manager((None, 20))
    run(kv, 1, list(range(10)))
    kv.evict(1, 0, [0])
    assert kv.tables(1)[0][0] == -1 and kv.counts()["evicted"] == 1
    extend(kv, 1, [10, 11, 12, 13, 14, 15])
    assert kv.reusable(list(range(17))) == 8, (
        "blocks that were full before stay shareable, the dropped one too"
    )
    run(kv, 2, list(range(17)))
    assert kv.tables(2)[0][2] != kv.tables(1)[0][2]
    assert kv.reusable(list(range(17))) == 16
    kv.check_integrity()
    kv.free(1)
    kv.free(2)
    assert kv.counts()["evicted"] == 0


def test_two_equal_prompts_with_other_evictions_do_not_share() -> None:
    kv = manager((None, 40), host_blocks=[20])
    for sequence_id, dropped in ((1, 0), (2, 1)):
        run(kv, sequence_id, list(range(9)))
        kv.evict(sequence_id, 0, [dropped])
        extend(kv, sequence_id, [9, 10, 11, 12])
    first, second = kv.sequences[1].chain[2], kv.sequences[2].chain[2]
    assert first.tokens == second.tokens and first.digest != second.digest
    kv.check_integrity()


def test_only_full_committed_blocks_can_be_evicted() -> None:
    kv = manager((None, 20))
    run(kv, 1, list(range(10)))
    for index in (2, 7, -1):
        with pytest.raises(EngineError, match=f"block {index} of sequence 1 is not among its 2"):
            kv.evict(1, 0, [0, index])
    assert kv.counts()["evicted"] == 0
    kv.evict(1, 0, [0])
    epoch = kv.sequences[1].epoch
    kv.evict(1, 0, [0])
    assert kv.sequences[1].epoch == epoch, "nothing was dropped, so nothing depends on it"


# --- host memory ---


def test_an_offloaded_sequence_frees_its_device_blocks_and_comes_back() -> None:
    kv = manager((None, 6), (4, 6), host_blocks=[6, 6])
    run(kv, 1, list(range(14)))
    tables = kv.tables(1)
    out = kv.offload(1)
    assert out is not None and all(copy.to_host for copy in out)
    # The window still sees 3 positions before 14: block 2 on.
    assert [(c.group, c.block) for c in out] == [
        *((0, b) for b in tables[0]),
        *((1, b) for b in tables[1][2:]),
    ]
    assert kv.counts()["used"] == 0 and kv.counts()["host"] == 6 and kv.is_offloaded(1)
    kv.check_integrity()
    run(kv, 2, [50] * 24)  # displaces whatever is still cached
    kv.free(2)
    back = kv.restore(1)
    assert back is not None and not any(copy.to_host for copy in back)
    assert {(c.group, c.host_block) for c in back} == {(c.group, c.host_block) for c in out}
    assert [c.block for c in back if c.group == 0] == list(kv.tables(1)[0])
    assert kv.tables(1)[1][:2] == (-1, -1) and kv.counts()["host"] == 0
    assert kv.committed(1) == 14 and kv.grow(1, 15) == []
    kv.check_integrity()


def test_a_restore_copies_only_what_the_device_no_longer_has() -> None:
    kv = manager((None, 6), host_blocks=[6])
    run(kv, 1, list(range(10)))
    table = kv.tables(1)[0]
    kv.offload(1)
    back = kv.restore(1)
    assert back == [HostCopy(0, kv.tables(1)[0][2], back[0].host_block, False)], "only the partial block"
    assert kv.tables(1)[0][:2] == table[:2]
    kv.check_integrity()


def test_restored_blocks_can_be_reused_again() -> None:
    kv = manager((None, 4), host_blocks=[6])
    run(kv, 1, list(range(9)))
    kv.offload(1)
    run(kv, 2, [50] * 16)
    kv.free(2)
    assert kv.reusable([*range(9), 0]) == 0
    kv.restore(1)
    assert kv.reusable([*range(9), 0]) == 8


def test_too_little_room_on_either_side_changes_nothing() -> None:
    kv = manager((None, 6), host_blocks=[2])
    run(kv, 1, list(range(9)))
    before = kv.tables(1)
    assert kv.offload(1) is None and kv.tables(1) == before and kv.counts()["host"] == 0
    kv = manager((None, 4), host_blocks=[4])
    run(kv, 1, list(range(9)))
    kv.offload(1)
    run(kv, 2, [50] * 8)
    before_counts = kv.counts()
    assert kv.restore(1) is None and kv.counts() == before_counts and kv.is_offloaded(1)
    kv.free(2)
    assert kv.restore(1) is not None
    kv.check_integrity()


def test_without_host_blocks_nothing_is_offloaded() -> None:
    kv = manager((None, 6))
    run(kv, 1, [1, 2, 3])
    assert kv.offload(1) is None and not kv.is_offloaded(1)
    with pytest.raises(EngineError, match="2 host pools for 1 layer groups"):
        manager((None, 6), host_blocks=[1, 2])


def test_an_offloaded_sequence_can_be_ended_and_do_nothing_else() -> None:
    kv = manager((None, 6), host_blocks=[6])
    run(kv, 1, [1, 2, 3])
    kv.offload(1)
    for call in (
        lambda: kv.grow(1, 4),
        lambda: kv.commit(1, [4]),
        lambda: kv.fork(1, 2),
        lambda: kv.tables(1),
    ):
        with pytest.raises(EngineError, match="sequence 1 is offloaded"):
            call()
    kv.free(1)
    assert kv.counts() == {"used": 0, "shared": 0, "cached": 0, "free": 6, "evicted": 0, "host": 0}
    kv.check_integrity()


# --- conversations ---


def talk(kv: KVManager, sequence_id: int, tokens: Sequence[int], **options: str) -> int:
    reused = kv.open(sequence_id, tokens, conversation_id="chat", **options)
    extend(kv, sequence_id, tokens[reused:])
    return reused


def test_a_turn_that_continues_its_conversation_diverges_nowhere() -> None:
    kv = manager((None, 20))
    talk(kv, 1, list(range(10)))
    assert kv.divergence(1) is None
    kv.free(1)
    talk(kv, 2, list(range(14)))
    assert kv.divergence(2) is None
    kv.free(2)


def test_a_changed_token_is_named_with_what_it_costs() -> None:
    kv = manager((None, 20))
    talk(kv, 1, list(range(18)))
    kv.free(1)
    changed = [*range(6), 66, *range(7, 18), 18, 19]
    assert talk(kv, 2, changed) == 4
    found = kv.divergence(2)
    assert found is not None
    assert (found.position, found.previous_token, found.token) == (6, 6, 66)
    assert (found.previous_length, found.reused, found.recomputed, found.evicted) == (18, 4, 14, 0)
    kv.free(2)
    with pytest.raises(EngineError, match="not open"):
        kv.divergence(2)


def test_blocks_that_were_given_away_are_told_from_changed_ones() -> None:
    kv = manager((None, 6))
    talk(kv, 1, list(range(17)))
    kv.free(1)
    run(kv, 2, [50] * 12)
    kv.free(2)
    reused = talk(kv, 3, list(range(20)))
    found = kv.divergence(3)
    assert found is not None and reused < 16
    assert (found.position, found.previous_token, found.token) == (17, None, None)
    assert (found.evicted, found.recomputed) == (16 - reused, 17 - reused)


def test_a_request_that_never_ran_does_not_count_as_its_conversation() -> None:
    kv = manager((None, 20))
    talk(kv, 1, list(range(18)))
    kv.free(1)
    changed = [*range(6), 66, *range(7, 20)]
    kv.open(2, changed, conversation_id="chat")
    kv.free(2)
    talk(kv, 3, changed)
    found = kv.divergence(3)
    assert found is not None and found.previous_length == 18


def test_what_followed_an_eviction_is_not_expected_to_be_reused() -> None:
    kv = manager((None, 20))
    talk(kv, 1, list(range(9)))
    kv.evict(1, 0, [0])
    extend(kv, 1, list(range(9, 16)))
    kv.free(1)
    assert talk(kv, 2, list(range(17))) == 8 and kv.divergence(2) is None


def test_conversations_of_other_salts_are_not_compared() -> None:
    kv = manager((None, 20))
    talk(kv, 1, list(range(18)), salt="a")
    kv.free(1)
    talk(kv, 2, [9] * 18, salt="b")
    assert kv.divergence(2) is None


def test_only_so_many_conversations_are_remembered() -> None:
    memory = ConversationMemory(max_conversations=2)
    for name in ("a", "b", "a", "c"):
        memory.remember(("", name), [1, 2, 3, 4])
    assert [memory.compare(("", n), [9, 9, 9, 9, 9], 0, 2) is not None for n in "abc"] == [True, False, True]


# --- misuse ---


def test_ids_are_checked() -> None:
    kv = manager((None, 6))
    run(kv, 1, [1, 2, 3])
    with pytest.raises(EngineError, match="1 is open already"):
        kv.open(1, [1])
    with pytest.raises(EngineError, match="1 is open already"):
        kv.fork(1, 1)
    with pytest.raises(EngineError, match="1 is not offloaded"):
        kv.restore(1)
    kv.free(1)
    for call in (lambda: kv.free(1), lambda: kv.grow(1, 1), lambda: kv.offload(1), lambda: kv.restore(1)):
        with pytest.raises(EngineError, match="1 is not open"):
            call()


def test_lost_and_doubly_owned_blocks_are_noticed() -> None:
    kv = manager((None, 6))
    run(kv, 1, list(range(6)))
    kv.sequences[1].tables[0].append(kv.sequences[1].tables[0][1])
    with pytest.raises(AssertionError, match="I2"):
        kv.check_integrity()
    kv.sequences[1].tables[0].pop()
    kv.check_integrity()
    del kv.sequences[1]
    with pytest.raises(AssertionError, match="I2"):
        kv.check_integrity()


def test_the_integer_half_of_the_cache_needs_no_torch() -> None:
    code = "import sys, edgellm.cache.kv_manager; print('torch' in sys.modules)"
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "models")]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "False"
