"""What the KV manager keeps of one sequence: its tokens, prefix nodes and block tables. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.cache.prefix_index import PrefixNode

NULL_BLOCK = -1
"""Stands in a table for a block that a window has left behind or that was evicted."""


@dataclass(frozen=True)
class GroupLayout:
    """One layer group as the manager sees it."""

    window: int | None
    """Positions a query sees, itself included; None is all."""
    num_blocks: int

    def first_seen(self, committed: int, slack: int = 0) -> int:
        """The first position that queries from ``committed - slack`` on see."""
        return 0 if self.window is None else max(0, committed - self.window + 1 - slack)


@dataclass
class SequenceBlocks:
    """One open sequence.

    position   0 ........ first_live * size ........ committed ........ grown
    table      null               |  committed KV        |  slots in use or to be overwritten
    """

    root: PrefixNode
    tables: list[list[int]]
    """Per group, block ids by block index. Whoever changes them sets ``shown`` to None."""
    first_live: list[int]
    """Per group, the entries before this one are null because of the window."""
    skipped: list[int]
    """Per group, how many of those never had a block: the prefix hit began behind them."""
    evicted: list[set[int]]
    """Per group, the entries that are null because of ``evict``."""
    chain: list[PrefixNode] = field(default_factory=list)
    """One node per full committed block; empty without a prefix cache."""
    tokens: list[int] = field(default_factory=list)
    """The committed tokens."""
    grown: int = 0
    """Positions below this have slots."""
    epoch: int = 0
    """The number of the last eviction, which the blocks that fill after it depend on; 0 is none yet."""
    exact_blocks: int | None = None
    """How many leading blocks were full at the first eviction; None before it."""
    host: list[list[int]] | None = None
    """While the sequence is offloaded, per group, host block ids by block index, and no ``tables``."""
    shown: tuple[tuple[int, ...], ...] | None = None
    """``tables`` as plans carry them, while they are the same."""
    reused: int = 0
    """Tokens that it was opened with."""
    conversation: tuple[str, str] | None = None
    """Salt and conversation id."""
    publishes: bool = True
    """Others may reuse its full blocks. Without, it has no ``chain``."""

    @property
    def committed(self) -> int:
        return len(self.tokens)
