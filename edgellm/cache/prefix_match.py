"""The longest cached prefix that every layer group can continue from. Integers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.cache.prefix_index import PrefixIndex, PrefixNode
from edgellm.cache.sequence_blocks import GroupLayout


def window_blocks(layout: GroupLayout, num_blocks: int, block_size: int) -> int:
    """How many of ``num_blocks`` leading blocks a sequence that goes on behind them needs: the last ones."""
    return num_blocks - layout.first_seen(num_blocks * block_size) // block_size


def longest_hit(
    index: PrefixIndex,
    layouts: Sequence[GroupLayout],
    root: PrefixNode,
    token_ids: Sequence[int],
    limit: int,
    hashed: list[PrefixNode] | None = None,
) -> list[PrefixNode]:
    """The nodes of the longest usable prefix, of at most ``limit`` blocks.

    Full groups need every block of it; a window group needs those of the last window - 1 positions, wherever
    in the prefix the others have gone. ``hashed`` are nodes of the same tokens from an earlier search, which
    need no hashing again; those of this search are put there.
    """
    hashed = [] if hashed is None else hashed
    size = index.block_size
    full = [group for group, layout in enumerate(layouts) if layout.window is None]
    windowed = [group for group, layout in enumerate(layouts) if layout.window is not None]
    chain: list[PrefixNode] = []
    run = dict.fromkeys(windowed, 0)  # cached blocks without a gap, up to here
    best = 0
    node = root
    for i in range(limit):
        if i < len(hashed):
            node = hashed[i] = index.renew(hashed[i], node)
        else:
            node = index.extend(node, tuple(token_ids[i * size : (i + 1) * size]))
            hashed.append(node)
        if not all(index.blocks(node, group) for group in full):
            break
        chain.append(node)
        for group in windowed:
            run[group] = run[group] + 1 if index.blocks(node, group) else 0
        if all(run[group] >= window_blocks(layouts[group], i + 1, size) for group in windowed):
            best = i + 1
    return chain[:best]


MAX_REMEMBERED = 64
"""Prompts whose hashes are kept while they wait."""


@dataclass
class _Search:
    root: PrefixNode
    length: int
    limit: int
    hashed: list[PrefixNode] = field(default_factory=list)
    found: list[PrefixNode] = field(default_factory=list)
    version: int = -1
    """The index's when ``found`` was right."""


class PromptSearches:
    """What was found for sequences that wait: one that finds no blocks asks again in every step.

    A prompt of 32,000 tokens costs tens of milliseconds to hash, and nothing while the index does not change.
    """

    def __init__(self, index: PrefixIndex, layouts: Sequence[GroupLayout]) -> None:
        self._index = index
        self._layouts = layouts
        self._searches: OrderedDict[int, _Search] = OrderedDict()

    def longest_hit(
        self, sequence_id: int, root: PrefixNode, token_ids: Sequence[int], limit: int
    ) -> list[PrefixNode]:
        """As ``longest_hit``. The tokens of a sequence id do not change before ``forget``."""
        search = self._searches.get(sequence_id)
        asked = (root.digest, len(token_ids), limit)
        if search is None or (search.root.digest, search.length, search.limit) != asked:
            search = self._searches[sequence_id] = _Search(root, len(token_ids), limit)
        self._searches.move_to_end(sequence_id)
        if len(self._searches) > MAX_REMEMBERED:
            self._searches.popitem(last=False)
        if search.version != self._index.version:
            search.found = longest_hit(
                self._index, self._layouts, search.root, token_ids, limit, search.hashed
            )
            search.version = self._index.version
        return list(search.found)

    def forget(self, sequence_id: int) -> None:
        """The sequence runs or has ended; unknown ids are ignored."""
        self._searches.pop(sequence_id, None)

    def __len__(self) -> int:
        return len(self._searches)
