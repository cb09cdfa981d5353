"""Which ring of unquantized KV each running sequence owns and what it holds. Integers only.

Only int4 storage has rings; what they are for and how slots are laid out: edgellm_kernels/batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_models.errors import EngineError


@dataclass(frozen=True)
class TailSpan:
    """What one sequence may read unquantized in one step."""

    ring: int
    head_from: int
    """Positions from here on and below the ring's head were kept."""
    tail_from: int
    """Positions from here on are still there; at most where the step starts."""


@dataclass
class _Owner:
    ring: int
    began: int
    """The first position that the sequence computed itself, without a gap up to ``end``."""
    end: int
    """One past the last position of its last step."""
    highest: int
    """One past the highest position ever written since it began: what it overwrote does not come back."""


class TailRings:
    """Rings for up to ``num_rings`` running sequences, with ``recent`` slots for positions in turn."""

    def __init__(self, num_rings: int, recent: int) -> None:
        self._num_rings = num_rings
        self._recent = recent
        self._free = list(range(num_rings - 1, -1, -1))
        self._owners: dict[int, _Owner] = {}

    def step(self, sequence_id: int, start: int, count: int) -> TailSpan:
        """What the queries at positions start .. start + count - 1 read; these positions are then kept.

        A sequence that is new, or that goes on behind a gap (positions it took over from the prefix cache) or
        before everything it kept, begins at ``start``. EngineError when every ring has an owner.
        """
        owner = self._owners.get(sequence_id)
        if owner is None:
            owner = self._owners[sequence_id] = _Owner(self._take(), start, start, start)
        elif start > owner.end or start < self._oldest(owner):
            owner.began = owner.highest = start
        span = TailSpan(owner.ring, owner.began, self._oldest(owner))
        owner.end = start + count
        owner.highest = max(owner.highest, owner.end)
        return span

    def fork(self, parent: int, child: int) -> tuple[int, int] | None:
        """The rings to copy from and to, so that the child reads what its parent would; None where the parent
        has none yet.
        """
        owner = self._owners.get(parent)
        if owner is None:
            return None
        ring = self._take()
        self._owners[child] = _Owner(ring, owner.began, owner.end, owner.highest)
        return owner.ring, ring

    def hand_over(self, parent: int, child: int) -> None:
        """As ``fork`` for a parent that is gone: the child takes its ring, and nothing needs copying."""
        owner = self._owners.pop(parent, None)
        if owner is not None:
            self._owners[child] = owner

    def release(self, sequence_id: int) -> None:
        """The sequence ended or was preempted; nothing where it has no ring."""
        owner = self._owners.pop(sequence_id, None)
        if owner is not None:
            self._free.append(owner.ring)

    def check_integrity(self) -> None:
        """Every ring is free or has one owner."""
        owned = [owner.ring for owner in self._owners.values()]
        assert sorted(self._free + owned) == list(range(self._num_rings))

    def _oldest(self, owner: _Owner) -> int:
        return max(owner.began, owner.highest - self._recent)

    def _take(self) -> int:
        if not self._free:
            raise EngineError(
                f"all {self._num_rings} tails of the int4 KV cache are in use: more sequences run than were "
                "planned for"
            )
        return self._free.pop()
