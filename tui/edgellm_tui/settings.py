"""What the screen is told when it opens: the conversation's settings and its own rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgellm.contracts import ConstraintSpec, SamplingParams


@dataclass(frozen=True)
class ChatSettings:
    """Settings of one chat screen."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    system_prompt: str = ""
    constraint: ConstraintSpec | None = None
    """What every answer must be."""
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """For the chat template of every answer."""
    can_think: bool | None = None
    """The model's template can be told whether to think; None where nobody knows."""
    theme: str = "edgellm-dark"
    """One of the screen's own themes or of Textual's."""
    theme_file: Path | None = None
    """Keeps the theme that was chosen last for the next session."""
    flush_interval_s: float = 0.1
    """Shortest time between two repaints of a streaming answer."""
    max_flush_interval_s: float = 5.0
    """Longest such time, when repainting itself is slow."""
    paint_share: float = 0.25
    """Share of one core that painting may take from the engine before repaints are spaced out."""
    stats_interval_s: float = 0.25
    sampling_origins: Mapping[str, str] = field(default_factory=dict)
    """Where a value of ``sampling`` comes from, such as ``model``; shown beside it."""
    prompts_file: Path | None = None
    """Questions of earlier sessions, which Up brings back; None keeps them no longer than the screen."""
    chat_extra: Mapping[str, str] = field(default_factory=dict)
    """Kept with every chat that is begun, such as the MODEL argument that it can be gone on with."""
    keymap: Mapping[str, str] = field(default_factory=dict)
    """Other keys by the names in the table of commands, such as ``{"regenerate": "f5"}``."""
    panel: bool | None = None
    """Whether the live panel is shown; None shows it where there is room beside the conversation."""
    save_folder: Path | None = None
    """Where ``/save`` without a path writes; None is the working folder."""

    def told(self, variable: str, value: bool | None) -> ChatSettings:
        """With a template variable of one chat; None, or a template without that switch, changes nothing."""
        if value is None or self.can_think is False:
            return self
        return replace(self, template_variables={**self.template_variables, variable: value})
