"""Which cached blocks hold a text, to be saved, and blocks for one that was saved earlier. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgellm.cache.prefix_index import PrefixNode
from edgellm.cache.prefix_match import longest_hit, window_blocks
from edgellm_models.errors import ResourceError

if TYPE_CHECKING:
    from edgellm.cache.kv_manager import KVManager

WriteBlocks = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], None]
"""Fills blocks: per group their places among the saved ones, and their ids."""


def first_saved(manager: KVManager, num_blocks: int) -> tuple[int, ...]:
    """Per group, the first of ``num_blocks`` blocks that a sequence needs to go on behind them."""
    return tuple(
        num_blocks - window_blocks(layout, num_blocks, manager.block_size) for layout in manager.groups
    )


def find(manager: KVManager, token_ids: Sequence[int], salt: str) -> tuple[int, list[list[int]]]:
    """How many leading tokens are in the cache, in whole blocks, and per group the blocks that a sequence
    which goes on behind them needs. Nobody holds them: they must be read before anything else happens."""
    limit = len(token_ids) // manager.block_size
    chain = longest_hit(manager.index, manager.groups, manager.index.root(salt), token_ids, limit)
    first = first_saved(manager, len(chain))
    blocks = [[manager.pick(node, group) for node in chain[first[group] :]] for group in range(len(first))]
    return len(chain) * manager.block_size, blocks


def adopt(manager: KVManager, token_ids: Sequence[int], salt: str, write: WriteBlocks) -> None:
    """Makes the KV of whole blocks of tokens known as cached blocks; what is cached already is kept.

    ``write`` fills those that are missing, before anybody can see them; what it raises leaves nothing behind.
    ResourceError, and nothing changed, when too few blocks are free.
    """
    size, nodes = manager.block_size, _nodes(manager, token_ids, salt)
    first = first_saved(manager, len(nodes))
    held: list[list[int]] = []
    missing: list[list[int]] = []
    try:
        for group, pool in enumerate(manager.pools):
            places = range(first[group], len(nodes))
            missing.append([i for i in places if not manager.index.blocks(nodes[i], group)])
            present = [manager.pick(nodes[i], group) for i in places if i not in set(missing[-1])]
            for block in present:  # before any allocation, which could give them away
                pool.share(block)
            held.append(present)
        for group, pool in enumerate(manager.pools):
            if len(missing[group]) > pool.num_free:
                raise ResourceError(
                    f"the saved KV of {len(nodes) * size} tokens needs {len(missing[group])} free blocks and "
                    f"{pool.num_free} are free; a larger --ctx makes room, or wait until other requests end"
                )
        new = [pool.allocate(len(missing[group])) for group, pool in enumerate(manager.pools)]
        for blocks, own in zip(held, new, strict=True):
            blocks.extend(own)
        write([[i - first[g] for i in places] for g, places in enumerate(missing)], new)
        for group, pool in enumerate(manager.pools):
            for i, block in zip(missing[group], new[group], strict=True):
                nodes[i] = manager.index.publish(nodes[i], group, block)
                pool.mark_hashed(block)
    finally:
        for pool, blocks in zip(manager.pools, held, strict=False):
            pool.free(reversed(blocks))


def _nodes(manager: KVManager, token_ids: Sequence[int], salt: str) -> list[PrefixNode]:
    size, node, nodes = manager.block_size, manager.index.root(salt), []
    for start in range(0, len(token_ids), size):
        node = manager.index.extend(node, tuple(token_ids[start : start + size]))
        nodes.append(node)
    return nodes
