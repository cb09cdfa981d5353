"""Moves the KV of an idle or preempted sequence between device blocks and host blocks. Integers only.

A block or host block may be given away as soon as its copy has been ordered: copies are done in the order in
which they were returned, before the step that comes after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.sequence_blocks import NULL_BLOCK, SequenceBlocks
from edgellm.contracts import HostCopy

if TYPE_CHECKING:
    from edgellm.cache.kv_manager import KVManager


def offload(manager: KVManager, sequence: SequenceBlocks) -> list[HostCopy] | None:
    """Orders copies of all blocks that the sequence still needs, and frees its device blocks.

    Shared blocks are copied too: nobody knows whether the others keep them.
    """
    kept = -(-sequence.committed // manager.block_size)
    wanted: list[list[int]] = []  # per group, the block indices that move
    for group, table in enumerate(sequence.tables):
        dead = manager.dead_blocks(group, sequence.committed)
        wanted.append([i for i in range(min(dead, kept), kept) if table[i] != NULL_BLOCK])
    pools = manager.host_pools
    if any(len(indices) > pool.num_free for indices, pool in zip(wanted, pools, strict=True)):
        return None
    copies, host = [], []
    for group, indices in enumerate(wanted):
        table, host_table = sequence.tables[group], [NULL_BLOCK] * kept
        for i, host_block in zip(indices, pools[group].allocate(len(indices)), strict=True):
            host_table[i] = host_block
            copies.append(HostCopy(group, table[i], host_block, True, manager.next_copy()))
        host.append(host_table)
        manager.pools[group].free(block for block in reversed(table) if block != NULL_BLOCK)
        sequence.tables[group] = []
        dead = max(sequence.first_live[group], min(manager.dead_blocks(group, sequence.committed), kept))
        sequence.evicted[group].difference_update(range(dead))
        sequence.first_live[group] = dead
    sequence.host, sequence.shown = host, None
    sequence.grown = sequence.committed
    return copies


def restore(manager: KVManager, sequence: SequenceBlocks) -> list[HostCopy] | None:
    """Shares what is still cached on the device and orders copies of the rest."""
    assert sequence.host is not None
    hits: list[dict[int, int]] = []  # per group, block index -> device block that still holds it
    for group, (pool, host_table) in enumerate(zip(manager.pools, sequence.host, strict=True)):
        found = {}
        for i, node in enumerate(sequence.chain):
            if host_table[i] != NULL_BLOCK and manager.index.blocks(node, group):
                found[i] = manager.pick(node, group)
        missing = sum(block != NULL_BLOCK for block in host_table) - len(found)
        revived = sum(pool.ref_count(block) == 0 for block in found.values())
        if missing > pool.num_free - revived:
            return None
        hits.append(found)
    copies = []
    for group, (pool, host_table) in enumerate(zip(manager.pools, sequence.host, strict=True)):
        for block in hits[group].values():  # before any allocation, which could give them away
            pool.share(block)
        table = []
        for i, host_block in enumerate(host_table):
            if host_block == NULL_BLOCK:
                table.append(NULL_BLOCK)
            elif i in hits[group]:
                table.append(hits[group][i])
            else:
                [block] = pool.allocate(1)
                copies.append(HostCopy(group, block, host_block, False, manager.next_copy()))
                table.append(block)
        sequence.tables[group] = table
    sequence.shown = None
    free_host(manager, sequence)
    for i in range(len(sequence.chain)):
        manager.publish(sequence, i)
    return copies


def free_host(manager: KVManager, sequence: SequenceBlocks) -> None:
    """Gives the host blocks of an offloaded sequence back."""
    assert sequence.host is not None
    for pool, host_table in zip(manager.host_pools, sequence.host, strict=True):
        pool.free(block for block in host_table if block != NULL_BLOCK)
    sequence.host = None
