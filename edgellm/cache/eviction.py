"""Which blocks of a full-attention sequence lossy eviction drops, and when: by its own positions and scores.

What a query sees depends on its position, its sequence's tokens and the policy alone:

    position  0 .. sinks, system prompt .. | may go, block by block | .. the last tokens .. | next `stride`
              always seen                    victims                  always seen             written next

Blocks go only at certain positions, the borders: every ``stride`` tokens, from the first one on at which
something must. All queries between two borders see the same blocks, and a step never crosses one. So neither
the cut of a prompt into chunks, nor the batch, nor a preemption that computes a sequence again changes what
a query sees. ``window`` keeps the sinks (StreamingLLM, arXiv 2309.17453), the system prompt and at least the
last tokens asked for; ``budget`` keeps as many tokens as asked for and drops the blocks whose values are
smallest beside their keys (PagedEviction, arXiv 2509.04377).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgellm_models.errors import BadInputError

NUM_SINKS = 4
"""Leading tokens that attention leans on whatever they say (arXiv 2309.17453)."""
MAX_RECENT = 1024
"""``budget`` protects a quarter of its tokens as recent ones, at most so many."""
MAX_STRIDE_BLOCKS = 8
"""Blocks between two borders, at most and at most an eighth of what is kept: prompts run in steps of so
many blocks once they evict, and so much of the budget is free behind a border."""

WINDOW = "window"
BUDGET = "budget"
RANDOM = "random"
"""``budget`` with victims drawn by lot, for comparisons only: no setting offers it."""
POLICIES = (WINDOW, BUDGET, RANDOM)


@dataclass(frozen=True)
class EvictionPlan:
    """The policy of one sequence, in blocks."""

    policy: str
    keep: int
    """The N of ``--kv-window N`` or ``--kv-budget N``."""
    block_size: int
    protected: int
    """Leading blocks that stay: sinks and system prompt."""
    recent: int
    """``window``: tokens before a border that stay. ``budget``: blocks before a border that stay."""
    stride: int
    """Blocks between two borders."""
    max_blocks: int
    """Most blocks that a sequence holds at once, those of the next ``stride`` positions included."""

    @property
    def first_border(self) -> int:
        """The first position at which blocks go. Everything before is exact."""
        blocks = self.max_blocks - self.stride + 1  # the fewest full blocks that leave no room for a stride
        return -(-blocks // self.stride) * self.stride * self.block_size

    @property
    def reuse_limit(self) -> int:
        """Leading tokens whose KV may come from others. A block less than all that is exact, so that a step
        runs, and with it every block is scored, before any goes."""
        return self.first_border - self.block_size

    @property
    def needs_scores(self) -> bool:
        """Whether victims are chosen by what their blocks hold."""
        return self.policy == BUDGET

    def is_border(self, position: int) -> bool:
        """Whether blocks go before the token at this position runs."""
        return position >= self.first_border and position % (self.stride * self.block_size) == 0

    def step_end(self, start: int) -> int:
        """Where a step that begins at ``start`` ends at the latest: the next border."""
        span = self.stride * self.block_size
        return max(self.first_border, (start // span + 1) * span)

    def draft_end(self, start: int) -> int:
        """Where the drafts of a step that begins at ``start`` end: at the next border, and early enough that
        blocks which they fill, and which only the next step scores, are still recent there."""
        end = self.step_end(start)
        return min(end, start + 1 + self.recent * self.block_size) if self.needs_scores else end

    def victims(self, border: int, live: Sequence[int], scores: Sequence[float] = ()) -> list[int]:
        """Block indices that go at a border, ascending.

        ``live``: the indices below ``border`` that are still there, ascending. ``scores``: by block index,
        the smallest go first, of equal ones the oldest; for ``needs_scores`` only.
        """
        assert self.is_border(border)
        num_full = border // self.block_size
        if self.policy == WINDOW:
            first_kept = max(self.protected, (border - self.recent + 1) // self.block_size)
            return [i for i in live if self.protected <= i < first_kept]
        excess = sum(i < num_full for i in live) + self.stride - self.max_blocks
        if excess <= 0:
            return []
        candidates = [i for i in live if self.protected <= i < num_full - self.recent]
        if self.policy == RANDOM:
            lots = random.Random(border)
            return sorted(lots.sample(candidates, excess))
        return sorted(sorted(candidates, key=lambda i: (scores[i], i))[:excess])


def make_plan(policy: str, keep: int, block_size: int, protected_tokens: int) -> EvictionPlan:
    """The plan of a request. BadInputError, with the values and a way out, when nothing could ever go."""
    protected = -(-max(NUM_SINKS, protected_tokens) // block_size)
    if policy == WINDOW:
        if keep < block_size:
            raise BadInputError(
                f"--kv-window {keep} is smaller than a block of the KV cache; use {block_size} or more"
            )
        stride = _stride(keep // block_size)
        # Behind a border lie the blocks from that of position border - keep + 1 on, then the next stride.
        max_blocks = protected + -(-(keep - 1) // block_size) + stride
        return EvictionPlan(policy, keep, block_size, protected, keep, stride, max_blocks)
    if policy not in POLICIES:
        raise BadInputError(f"unknown kv_policy {policy!r}; use stop, {WINDOW} or {BUDGET}")
    plan = _budget(policy, keep // block_size, keep, block_size, protected)
    if plan is None:
        fits = protected + 1
        while _budget(policy, fits, 0, block_size, protected) is None:
            fits += 1
        raise BadInputError(
            f"--kv-budget {keep} has no room beside what is never dropped: sinks and system prompt take "
            f"{protected * block_size} tokens; use {fits * block_size} or more, or a shorter system prompt"
        )
    return plan


def most_positions(policy: str, keep: int, block_size: int) -> int | None:
    """Positions that a sequence holds at most in layers without a window; None where nothing is evicted.

    With room for a system prompt as long as a window, and for the copy of a block that samples share.
    BadInputError as ``make_plan``.
    """
    if policy not in POLICIES:
        return None
    plan = make_plan(policy, keep, block_size, keep if policy == WINDOW else 0)
    return (plan.max_blocks + 1) * block_size


def longest_step(policy: str, keep: int, block_size: int, chunk: int) -> int:
    """Tokens of a prompt that are worth running at once, ``chunk`` at most: up to the first border of a
    sequence without a system prompt. Behind it steps are a stride long anyway, so that a longer first one
    would cost memory and hardly save time. BadInputError as ``make_plan``."""
    if policy not in POLICIES:
        return chunk
    return min(chunk, make_plan(policy, keep, block_size, 0).first_border)


def _stride(blocks: int) -> int:
    return max(1, min(MAX_STRIDE_BLOCKS, blocks // 8))


def _budget(policy: str, blocks: int, keep: int, block_size: int, protected: int) -> EvictionPlan | None:
    """None where protected and recent blocks and the next stride leave no block that may go."""
    stride = _stride(blocks)
    recent = max(1, min(MAX_RECENT // block_size, blocks // 4))
    if protected + recent + stride >= blocks:
        return None
    return EvictionPlan(policy, keep, block_size, protected, recent, stride, blocks)


@dataclass
class Dropped:
    """What one sequence has lost so far, for notices. Tokens of the layers that see everything."""

    tokens: int = 0
    first: int = 0
    """Of the positions that are gone, the first."""
    end: int = 0
    """One past the last."""
    told: int = 0
    """Tokens that the last notice counted."""

    def add(self, blocks: Collection[int], block_size: int) -> None:
        """Counts the blocks of one border."""
        first, end = min(blocks) * block_size, (max(blocks) + 1) * block_size
        self.first = min(self.first, first) if self.tokens else first
        self.end = max(self.end, end)
        self.tokens += len(blocks) * block_size

    def restart(self) -> None:
        """The sequence is computed again, and drops the same again."""
        self.tokens = self.first = self.end = 0

    @property
    def is_news(self) -> bool:
        """The first loss, and each that makes four times of what was told: one per border would be noise."""
        return self.tokens >= max(1, 4 * self.told)
