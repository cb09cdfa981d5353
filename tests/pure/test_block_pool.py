"""The block pool: counts, order of giving away, and faults that must be noticed."""

from __future__ import annotations

import random

import pytest

from edgellm.cache.block_pool import BlockPool
from edgellm_models.errors import EngineError


def hashed_pool(num_blocks: int, evicted: list[int] | None = None) -> BlockPool:
    """A pool whose blocks are all in use and hashed."""
    pool = BlockPool(num_blocks, 4, on_evict=None if evicted is None else evicted.append)
    for block in pool.allocate(num_blocks):
        pool.mark_hashed(block)
    return pool


def test_empty_blocks_go_first_then_the_cached_one_that_was_freed_longest_ago() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, 4, on_evict=evicted.append)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.mark_hashed(block)
    pool.free([blocks[2], blocks[0], blocks[3], blocks[1]])
    assert pool.cached_blocks() == (blocks[2], blocks[0], blocks[1])
    assert pool.num_free == 5 and pool.num_cached == 3 and pool.num_used == 0
    assert set(pool.allocate(2)) == {blocks[3], 4} and evicted == []
    assert pool.allocate(2) == [blocks[2], blocks[0]] and evicted == [blocks[2], blocks[0]]
    assert not pool.is_hashed(blocks[2]) and pool.is_hashed(blocks[1])
    pool.check_integrity()


def test_an_evicted_block_is_reported_before_it_has_an_owner() -> None:
    seen: list[tuple[int, bool]] = []
    pool = BlockPool(1, 4, on_evict=lambda block: seen.append((pool.ref_count(block), pool.is_hashed(block))))
    pool.mark_hashed(pool.allocate(1)[0])
    pool.free([0])
    pool.allocate(1)
    assert seen == [(0, False)]


def test_a_hit_takes_a_block_out_of_the_middle_and_its_release_puts_it_last() -> None:
    pool = hashed_pool(4)
    pool.free([3, 1, 0, 2])
    pool.share(1)
    assert pool.cached_blocks() == (3, 0, 2) and pool.ref_count(1) == 1
    pool.free([1])
    assert pool.cached_blocks() == (3, 0, 2, 1)
    pool.check_integrity()


def test_taking_a_block_out_of_the_middle_does_not_search_for_it() -> None:
    """Twenty thousand hits in a pool of as many cached blocks: a search would compare 10^8 times."""
    count = 20_000
    pool = hashed_pool(count)
    pool.free(range(count))
    order = list(range(count))
    random.Random(0).shuffle(order)
    comparisons = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return int(self) == other

        def __hash__(self) -> int:
            return hash(int(self))

    for block in order:
        pool.share(Counted(block))
    assert pool.num_cached == 0 and comparisons < 4 * count


def test_references_are_counted_and_only_the_last_one_frees() -> None:
    pool = BlockPool(3, 4)
    [block] = pool.allocate(1)
    pool.share(block)
    pool.share(block)
    assert (pool.ref_count(block), pool.num_shared, pool.num_used) == (3, 1, 1)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_shared, pool.num_free) == (2, 1, 2)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_shared, pool.num_free) == (1, 0, 2)
    pool.free([block])
    assert pool.num_free == 3


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_double_free_raises(is_hashed: bool) -> None:
    pool = BlockPool(2, 4)
    [block] = pool.allocate(1)
    if is_hashed:
        pool.mark_hashed(block)
    pool.free([block])
    with pytest.raises(AssertionError, match=f"block {block} was freed twice"):
        pool.free([block])
    pool.check_integrity()


def test_a_block_named_twice_in_one_call_is_a_double_free() -> None:
    pool = BlockPool(2, 4)
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError, match="twice"):
        pool.free([block, block])


def test_the_null_block_is_never_freed() -> None:
    """-1 would name the last block of a Python list."""
    pool = BlockPool(2, 4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="block -1"):
        pool.free([-1])


def test_an_empty_block_can_be_neither_shared_nor_hashed() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="empty"):
        pool.share(0)
    with pytest.raises(AssertionError, match="free"):
        pool.mark_hashed(0)


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    pool = hashed_pool(3)
    pool.free([0, 1])
    with pytest.raises(EngineError, match=r"2 free blocks, 3 are needed"):
        pool.allocate(3)
    assert pool.cached_blocks() == (0, 1)


def test_integrity_notices_a_block_in_two_places_and_a_lost_one() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(1)
    pool._empty.append(0)
    with pytest.raises(AssertionError, match="I1"):
        pool.check_integrity()
    pool._empty = [2]
    with pytest.raises(AssertionError, match="I1"):
        pool.check_integrity()
