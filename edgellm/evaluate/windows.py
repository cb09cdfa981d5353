"""Which tokens of a text are scored in which window: as llama.cpp's llama-perplexity has it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_models.errors import BadInputError


@dataclass(frozen=True)
class WindowPlan:
    """A text cut into windows of ``ctx`` tokens that know nothing of each other.

    window    t0 t1 ... t(ctx/2) t(ctx/2+1) ... t(ctx-1)
              [ read only      ] [ scored              ]     and where the model wants one, t0 is BOS instead

    The tokens behind the last full window are not scored.
    """

    token_ids: tuple[int, ...]
    ctx: int
    bos_id: int | None
    """Takes the place of each window's first token; None where the model wants no BOS."""
    num_windows: int
    scores_all: bool = False
    """Every token behind a window's first counts, those with little before them too."""

    @property
    def first_row(self) -> int:
        """Position in a window of the token whose row scores the first token that counts."""
        return 0 if self.scores_all else self.ctx // 2

    @property
    def rows_per_window(self) -> int:
        return self.ctx - 1 - self.first_row

    @property
    def num_scored(self) -> int:
        return self.num_windows * self.rows_per_window

    @property
    def unscored_tail(self) -> int:
        """Tokens behind the last window."""
        return len(self.token_ids) - self.num_windows * self.ctx

    def window(self, index: int) -> tuple[int, ...]:
        """The ``ctx`` ids of a window."""
        ids = self.token_ids[index * self.ctx : (index + 1) * self.ctx]
        return ids if self.bos_id is None else (self.bos_id, *ids[1:])


def plan_windows(
    token_ids: Sequence[int],
    ctx: int,
    bos_id: int | None,
    max_windows: int | None = None,
    scores_all: bool = False,
) -> WindowPlan:
    """The windows of a text. BadInputError when a window is too short to score in, or the text for one."""
    if ctx < 4:
        raise BadInputError(f"--ctx {ctx} is too short to score anything in; take 4 or more")
    full = len(token_ids) // ctx
    if full < 1:
        raise BadInputError(
            f"the text has {len(token_ids)} tokens and a window takes {ctx}; give a longer text or a smaller "
            "--ctx"
        )
    num_windows = full if max_windows is None else min(full, max_windows)
    return WindowPlan(tuple(token_ids), ctx, bos_id, num_windows, scores_all)
