"""The fifteen invariants of the paged cache, asserted over a KV manager's whole state. Integers only.

I1   used, cached and empty partition each pool; the counters agree. The null block is no block of a pool.
I2   a block's reference count is the number of table entries that name it; 0 exactly when it is free.
I3   the null block is never freed, written or hashed.
I4   a hash leads to blocks whose tokens and parents are those of the key; a free block may keep its hash.
I5   a block loses its hash before it is given away; a hit leaves the free list before anything is allocated.
I6   only full, committed blocks are hashed.
I7   only blocks with one reference and no hash are written.
I8   a table ends with the last slot that was asked for; in front of the window it is null.
I9   every committed position that can be seen has a block; every named block is in use.
I10  a window gives back only what lies before committed - window + 1 - lookahead.
I11  blocks that filled after an eviction have its epoch in their key, those before have none.
I12  without open sequences every block is free; a double free raises.
I13  a sequence is on the device or on the host, and each of its host blocks has one owner.
I14  cached blocks are given away in the order of their release, a sequence's last block first.
I15  what decides the content of KV is in every key: cache key and block size in each prefix's root.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.sequence_blocks import NULL_BLOCK, SequenceBlocks

if TYPE_CHECKING:
    from edgellm.cache.kv_manager import KVManager


def check(manager: KVManager) -> None:
    """AssertionError names the invariant that does not hold."""
    for pool in (*manager.pools, *manager.host_pools):
        pool.check_integrity()  # I1, I5, I14 and the pool's share of I2 and I4
    manager.index.check_integrity()  # I4, I6
    _check_references(manager)
    _check_hashes(manager)
    for sequence in manager.sequences.values():
        _check_place(manager, sequence)
        _check_chain(manager, sequence)
        for group in range(len(manager.groups)):
            _check_table(manager, sequence, group)


def _check_references(manager: KVManager) -> None:
    for group, pool in enumerate(manager.pools):
        _check_counts(pool, [sequence.tables[group] for sequence in manager.sequences.values()])
    for group, pool in enumerate(manager.host_pools):
        hosts = [s.host[group] for s in manager.sequences.values() if s.host is not None]
        _check_counts(pool, hosts)
        assert pool.num_shared == 0, "I13: a host block has two owners"
    if not manager.sequences:
        assert all(p.num_used == 0 for p in (*manager.pools, *manager.host_pools)), "I12: a block is lost"


def _check_counts(pool: BlockPool, tables: list[list[int]]) -> None:
    entries = Counter(block for table in tables for block in table)
    del entries[NULL_BLOCK]
    assert all(0 <= block < pool.num_blocks for block in entries), "I3: a table names no block of the pool"
    for block in range(pool.num_blocks):
        assert pool.ref_count(block) == entries[block], (
            f"I2: block {block}: {pool.ref_count(block)} references"
        )


def _check_hashes(manager: KVManager) -> None:
    index, sound = manager.index, set()
    hashed = 0
    for group, block, node in index.held():
        hashed += 1
        assert block != NULL_BLOCK, "I3: the null block is hashed"
        assert manager.pools[group].is_hashed(block), "I5: the index names a block that was given away"
        current = node
        while current.parent is not None and id(current) not in sound:
            sound.add(id(current))
            current = current.parent
        if current.parent is None:
            scope = current.scope
            assert scope is not None and scope[:2] == (index.cache_key, manager.block_size), (
                "I15: a wrong root"
            )
    marked = sum(pool.is_hashed(b) for pool in manager.pools for b in range(pool.num_blocks))
    assert marked == hashed, "I4: a block is marked as hashed, but the index does not know it"


def _check_place(manager: KVManager, sequence: SequenceBlocks) -> None:
    shown = sequence.shown
    assert shown is None or shown == tuple(map(tuple, sequence.tables)), "I9: plans name other blocks"
    if sequence.host is None:
        return
    assert not any(sequence.tables), "I13: an offloaded sequence has device blocks"
    kept = -(-sequence.committed // manager.block_size)
    for group, table in enumerate(sequence.host):
        assert len(table) == kept, "I13: an offloaded table has another length"
        for i, block in enumerate(table):
            gone = i < sequence.first_live[group] or i in sequence.evicted[group]
            assert (block == NULL_BLOCK) == gone, "I13: an offloaded sequence lacks a block"


def _check_chain(manager: KVManager, sequence: SequenceBlocks) -> None:
    size = manager.block_size
    cached = manager.enable_prefix_cache and sequence.publishes
    full = sequence.committed // size if cached else 0
    assert len(sequence.chain) == full, "I6: not one node per full, committed block"
    parent = sequence.root
    for i, node in enumerate(sequence.chain):
        assert node.parent is not None, "I4: a root stands for a block"
        assert node.parent.digest == parent.digest, "I4: a broken chain"
        assert list(node.tokens) == sequence.tokens[i * size : (i + 1) * size], (
            "I4: other tokens than its own"
        )
        exact = sequence.exact_blocks is None or i < sequence.exact_blocks
        assert (node.epoch == 0) == exact, "I11: the key does not tell what the block depends on"
        parent = node


def _check_table(manager: KVManager, sequence: SequenceBlocks, group: int) -> None:
    size, committed = manager.block_size, sequence.committed
    first_live = sequence.first_live[group]
    dead = max(sequence.skipped[group], manager.dead_blocks(group, committed))
    assert first_live <= dead, "I10: a block was given back too early"
    seen = manager.groups[group].first_seen(committed)
    assert first_live * size <= seen, "I9: a position that can be seen has no block"
    assert sequence.grown >= committed, "I9: committed tokens without slots"
    if sequence.host is not None:
        return
    table, pool = sequence.tables[group], manager.pools[group]
    assert len(table) == -(-sequence.grown // size), "I8: a table of another length than was asked for"
    assert all(i >= first_live and i < committed // size for i in sequence.evicted[group]), "I9: stray holes"
    for i, block in enumerate(table):
        gone = i < first_live or i in sequence.evicted[group]
        assert (block == NULL_BLOCK) == gone, "I8, I9: a hole where KV is needed, or none where it should be"
        if block == NULL_BLOCK or i < committed // size:
            continue
        filled = committed - i * size  # 1 or more: the partial block; else it is one for coming tokens
        if filled <= 0:
            assert pool.ref_count(block) == 1, "I7: a block for coming tokens is shared"
            assert not pool.is_hashed(block), "I6: a block without committed tokens is hashed"
        elif pool.is_hashed(block):
            # A relative by fork has filled and published it; this sequence copies it before it writes.
            node = manager.index.node_of(group, block)
            assert node is not None and list(node.tokens[:filled]) == sequence.tokens[i * size :], (
                "I6: a partial block is hashed as something else"
            )
