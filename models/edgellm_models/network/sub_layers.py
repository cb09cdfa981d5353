"""Which sub-layers of a decoder a drafting pass leaves out: attention and feed-forward apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SkippedSubLayers:
    """Layers whose attention, and layers whose feed-forward, does not run.

    Everything else is the model: the same weights, the same ops. A skipped attention writes no K and V; the
    verification that follows writes those of every layer at the same positions.
    """

    attention: frozenset[int] = frozenset()
    feed_forward: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attention: Iterable[int] = (), feed_forward: Iterable[int] = ()) -> SkippedSubLayers:
        return cls(frozenset(attention), frozenset(feed_forward))

    def __len__(self) -> int:
        return len(self.attention) + len(self.feed_forward)

    def check(self, num_layers: int) -> None:
        """ValueError when the first or the last block is not whole, or a layer does not exist."""
        named = self.attention | self.feed_forward
        wrong = sorted(index for index in named if not 0 < index < num_layers - 1)
        if wrong:
            raise ValueError(
                f"sub-layers of layer {wrong[0]} cannot be skipped: of {num_layers} layers those from 1 to "
                f"{num_layers - 2} may lack some, the first and the last one stay whole"
            )
