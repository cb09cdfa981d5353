"""What the screen is told when it opens: the conversation's settings and its own rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgellm.contracts import ConstraintSpec, SamplingParams


@dataclass(frozen=True)
class ChatSettings:
    """Settings of one chat screen."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    system_prompt: str = ""
    constraint: ConstraintSpec | None = None
    """What every answer must be."""
    theme: str = "edgellm-dark"
    """One of the screen's own themes or of Textual's."""
    flush_interval_s: float = 0.1
    """Shortest time between two repaints of a streaming answer."""
    max_flush_interval_s: float = 5.0
    """Longest such time, when repainting itself is slow."""
    paint_share: float = 0.25
    """Share of one core that painting may take from the engine before repaints are spaced out."""
    stats_interval_s: float = 0.25
    save_folder: Path | None = None
    """Where ``/save`` without a path writes; None is the working folder."""
