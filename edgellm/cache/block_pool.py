"""The blocks of one layer group: reference counts, and which free ones still hold a prefix. Integers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from edgellm_models.errors import EngineError


def blocks_for(num_tokens: int, block_size: int, window: int | None = None, chunk: int = 1) -> int:
    """Most blocks that a sequence of ``num_tokens`` holds at once in one layer group.

    A window group holds the ``window - 1`` positions before a step and the up to ``chunk`` positions of the
    step; a span of n positions touches at most ceil((n - 1) / block_size) + 1 blocks.
    """
    full = -(-num_tokens // block_size)
    if window is None:
        return full
    span = window - 1 + chunk
    return min(full, -(-(span - 1) // block_size) + 1)


class BlockPool:
    """Blocks 0 .. num_blocks - 1 of one layer group.

    A block is in exactly one of three places:

        empty    reference count 0, content of no use
        cached   reference count 0, hashed: its content is a known prefix; in order of the last use
        used     reference count 1 or more; hashed or not

    Empty blocks are given away first, then the cached one that was used longest ago. ``on_evict`` is told of
    a cached block before it is given away, so that no index names it any more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        *,
        on_evict: Callable[[int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._is_hashed = [False] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        # A linked list with a table: taking a block out of its middle, as a hit does, costs O(1).
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Cached block -> number of the release that put it there; the first is the next to go."""
        self._num_releases = 0
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with a reference count of 2 or more."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_hashed(self, block: int) -> bool:
        """Its content is one that the prefix index knows."""
        return self._is_hashed[block]

    def cached_blocks(self) -> tuple[int, ...]:
        """The cached blocks in the order in which they will be given away."""
        return tuple(self._cached)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with a reference count of 1; EngineError when fewer are free."""
        if count > self.num_free:
            raise EngineError(f"the KV cache has {self.num_free} free blocks, {count} are needed")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._is_hashed[block] = False
            if self._on_evict is not None:
                self._on_evict(block)
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a used or cached block, which is not in the free list from then on."""
        count = self._ref_counts[block]
        if count == 0:
            if block not in self._cached:
                raise AssertionError(f"block {block} is empty and cannot be shared")
            del self._cached[block]
        elif count == 1:
            self._num_shared += 1
        self._ref_counts[block] = count + 1

    def mark_hashed(self, block: int) -> None:
        """From now on the block stays cached when its last reference goes."""
        if self._ref_counts[block] == 0:
            raise AssertionError(f"block {block} is free and cannot be hashed")
        self._is_hashed[block] = True

    def free(self, blocks: Iterable[int]) -> None:
        """Takes one reference from each, in this order: of those that stay cached the first goes first.

        A block that is free already is a fault of ours.
        """
        for block in blocks:
            count = self._ref_counts[block] if block >= 0 else 0
            if count == 0:  # no assert statement: this must hold under ``python -O`` too
                raise AssertionError(f"block {block} was freed twice")
            self._ref_counts[block] = count - 1
            if count == 2:
                self._num_shared -= 1
            elif count == 1:
                if self._is_hashed[block]:
                    self._num_releases += 1
                    self._cached[block] = self._num_releases
                else:
                    self._empty.append(block)

    def check_integrity(self) -> None:
        """Asserts what concerns the pool alone; the names are those of integrity.py."""
        empty, cached = set(self._empty), set(self._cached)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(empty) == len(self._empty), "I1: a block is in the free list twice"
        assert len(empty) + len(cached) + len(used) == self.num_blocks, (
            "I1: the states overlap or miss a block"
        )
        assert empty | cached | used == set(range(self.num_blocks)), "I1: the states overlap or miss a block"
        assert min(self._ref_counts, default=0) >= 0, "I2: a reference count below 0"
        assert self._num_shared == sum(count > 1 for count in self._ref_counts), (
            "I2: the count of shared blocks"
        )
        assert not any(self._is_hashed[block] for block in empty), "I5: an empty block has a hash"
        assert all(self._is_hashed[block] for block in cached), "I4: a cached block without a hash"
        releases = list(self._cached.values())
        assert releases == sorted(releases), "I14: cached blocks are not in the order of their release"
