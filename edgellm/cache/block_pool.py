"""The free list of one layer group's KV blocks, and the block table of one sequence in it. Integers only."""

from __future__ import annotations

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
    """Blocks 0 .. num_blocks - 1 of one layer group; each is free or belongs to one sequence."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks; EngineError when there are fewer."""
        if count > len(self._free):
            raise EngineError(f"the KV cache has {len(self._free)} free blocks, {count} are needed")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Takes blocks back. A block that is free already is a fault of ours."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} was freed twice"
            self._is_free[block] = True
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in the free list exactly once or owned."""
        assert len(set(self._free)) == len(self._free) == sum(self._is_free)


class BlockTable:
    """The blocks of one sequence in one layer group, by block index; -1 where a window has moved on."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self._first_live = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def prepare(self, committed: int, length: int) -> None:
        """Makes room for positions below ``length``; gives back what queries from ``committed`` on cannot
        see.

        A query at position p sees the keys from p - window + 1 on, so a block is dead when its last position
        lies before committed - window + 1.
        """
        size, window = self._pool.block_size, self._pool.window
        if window is not None:
            dead = min(max(0, (committed - window + 1) // size), len(self._blocks))
            if dead > self._first_live:
                self._pool.free(self._blocks[self._first_live : dead])
                self._blocks[self._first_live : dead] = [-1] * (dead - self._first_live)
                self._first_live = dead
        missing = -(-length // size) - len(self._blocks)
        if missing > 0:
            self._blocks.extend(self._pool.allocate(missing))

    def release(self) -> None:
        """Gives every block back."""
        self._pool.free(self._blocks[self._first_live :])
        self._blocks = []
        self._first_live = 0
