"""Containers that give up their content while it is out of sight: layout pays only for what is near."""

from __future__ import annotations

from collections.abc import Iterable

from textual.containers import Vertical
from textual.geometry import Region
from textual.message import Message


class Fold(Vertical):
    """A column of content that no longer changes. Folded, it keeps its height and lays out none of its
    children.
    """

    def __init__(self, *, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self.folded = False
        self.measured = True
        """Its content is complete, so that its height can be told."""

    class Measured(Message):
        """Content that had been given up is there again."""

    def fold(self) -> bool:
        """True if that changed anything."""
        if self.folded or not self.measured or self.size.width == 0:
            return False
        self.folded = True
        # Not the height it has on the screen: after a change of width that may be the one before.
        self.styles.height = self.get_content_height(self.container_size, self.app.size, self.size.width)
        self.release_content()
        return True

    def unfold(self) -> bool:
        """True if that changed anything."""
        if not self.folded:
            return False
        self.folded = False
        self.restore_content()
        return True

    def release_content(self) -> None:
        for child in self.children:
            child.display = False

    def restore_content(self) -> None:
        self.styles.height = "auto"
        for child in self.children:
            child.display = True


def fold_distant(folds: Iterable[Fold], view: Region, margin: int) -> bool:
    """Folds what is more than ``margin`` lines away from ``view`` (screen coordinates), unfolds what is not.

    True if anything changed: then a container that came into sight has content to be looked at in its turn.
    """
    top, bottom = view.y - margin, view.bottom + margin
    changed = False
    for fold in folds:
        region = fold.region
        # Not laid out yet: an empty region says nothing about where it will be.
        if region.height == 0:
            continue
        distant = region.bottom < top or region.y > bottom
        changed = (fold.fold() if distant else fold.unfold()) or changed
    return changed
