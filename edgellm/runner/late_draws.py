"""Steps whose drawn ids are fetched from the device one step late, while the next step runs already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from edgellm.contracts import PENDING, PlannedSequence, SequenceResult, StepPlan, StepResult
from edgellm.runner.sampler import Sampler

MAX_DRAWN = 64
"""Sequences of a step whose ids may be drawn while the next one is planned."""


@dataclass
class FinishedStep:
    """A step that was over when its launch returned."""

    step: StepResult

    def result(self) -> StepResult:
        """See StepInFlight."""
        return self.step

    def token_ids(self) -> dict[int, int]:
        """By sequence id the last token that the step brought."""
        return {one.sequence_id: one.token_ids[-1] for one in self.step.results if one.token_ids}


@dataclass
class LateStep:
    """A step whose ids lie on the device; ``result`` waits until they are here."""

    plan: StepPlan
    drawn_at: Mapping[int, int]
    """By sequence id the place of its id among the drawn ones."""
    fetched: Fetch | None
    """None where nothing is drawn."""
    sampler: Sampler
    _result: StepResult | None = field(default=None, init=False)

    def result(self) -> StepResult:
        """See StepInFlight."""
        if self._result is None:
            ids, best = ([], []) if self.fetched is None else self.fetched.values()
            self._result = StepResult(
                self.plan.step, tuple(self._of(planned, ids, best) for planned in self.plan.sequences)
            )
        return self._result

    def token_ids(self) -> dict[int, int]:
        """As FinishedStep's; waits."""
        return {one.sequence_id: one.token_ids[-1] for one in self.result().results if one.token_ids}

    def _of(self, planned: PlannedSequence, ids: Sequence[int], best: Sequence[float]) -> SequenceResult:
        place = self.drawn_at.get(planned.sequence_id)
        if place is None:
            return SequenceResult(planned.sequence_id, ())
        position = planned.start_position + len(planned.token_ids)
        draw = self.sampler.late(ids[place], best[place], position)
        if draw.error is not None:
            return SequenceResult(planned.sequence_id, (), error=draw.error)
        return SequenceResult(planned.sequence_id, (draw.token_id,))


class Fetch:
    """A copy of drawn ids and largest logits to the host that runs beside what is launched next."""

    def __init__(self, ids: torch.Tensor, best: torch.Tensor) -> None:
        """Enqueued behind what makes ``ids`` int64 [n] and ``best`` f32 [n]."""
        self._wait: Callable[[], object] = lambda: None
        if ids.device.type == "cuda":
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._best = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._best.copy_(best, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._wait = event.synchronize
        else:
            self._ids, self._best = ids.clone(), best.clone()

    def values(self) -> tuple[list[int], list[float]]:
        """Both, once they are here."""
        self._wait()
        return self._ids.tolist(), self._best.tolist()


def has_pending(plan: StepPlan) -> bool:
    """Whether an id of the plan is drawn by the step before it."""
    return any(s.token_ids[-1] == PENDING for s in plan.sequences)


def with_known(plan: StepPlan, token_ids: Mapping[int, int]) -> StepPlan:
    """The plan with its pending ids, by sequence id; any id where the step before brought none: that ends the
    sequence."""
    return replace(
        plan,
        sequences=tuple(
            replace(s, token_ids=(*s.token_ids[:-1], token_ids.get(s.sequence_id, 0)))
            if s.token_ids[-1] == PENDING
            else s
            for s in plan.sequences
        ),
    )
