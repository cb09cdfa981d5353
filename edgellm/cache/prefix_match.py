"""The longest cached prefix that every layer group can continue from. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.prefix_index import PrefixIndex, PrefixNode
from edgellm.cache.sequence_blocks import GroupLayout


def window_blocks(layout: GroupLayout, num_blocks: int, block_size: int) -> int:
    """How many of ``num_blocks`` leading blocks a sequence that goes on behind them needs: the last ones."""
    return num_blocks - layout.first_seen(num_blocks * block_size) // block_size


def longest_hit(
    index: PrefixIndex, layouts: Sequence[GroupLayout], root: PrefixNode, token_ids: Sequence[int], limit: int
) -> list[PrefixNode]:
    """The nodes of the longest usable prefix, of at most ``limit`` blocks.

    Full groups need every block of it; a window group needs those of the last window - 1 positions, wherever
    in the prefix the others have gone.
    """
    size = index.block_size
    full = [group for group, layout in enumerate(layouts) if layout.window is None]
    windowed = [group for group, layout in enumerate(layouts) if layout.window is not None]
    chain: list[PrefixNode] = []
    run = dict.fromkeys(windowed, 0)  # cached blocks without a gap, up to here
    best = 0
    node = root
    for i in range(limit):
        node = index.extend(node, tuple(token_ids[i * size : (i + 1) * size]))
        if not all(index.blocks(node, group) for group in full):
            break
        chain.append(node)
        for group in windowed:
            run[group] = run[group] + 1 if index.blocks(node, group) else 0
        if all(run[group] >= window_blocks(layouts[group], i + 1, size) for group in windowed):
            best = i + 1
    return chain[:best]
