"""Steps that are on their way while the next one is planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edgellm.contracts import LaunchingRunner, StepInFlight, StepPlan, StepResult


@dataclass(frozen=True)
class Landed:
    """A step with its results."""

    plan: StepPlan
    result: StepResult
    start: float
    """When it was planned or, if that is later, when the step before it ended: steps do not overlap."""
    began: float
    """When it began to run, as far as that can be seen from here."""


@dataclass(frozen=True)
class _Flight:
    plan: StepPlan
    step: StepInFlight
    start: float
    launched: float


class Flights:
    """Keeps up to ``depth`` steps in flight, and one more while the oldest lands."""

    def __init__(self, runner: LaunchingRunner, depth: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._flights: deque[_Flight] = deque()
        self._landed_at = clock()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def too_many(self) -> bool:
        """Whether the oldest must land before another step is planned."""
        return len(self._flights) > self._depth

    def launch(self, plan: StepPlan, start: float) -> None:
        """Begins a step that was planned at ``start``."""
        launched = self._clock()
        self._flights.append(_Flight(plan, self._runner.launch(plan), start, launched))

    def land(self) -> Landed:
        """Waits for the oldest step."""
        flight, before = self._flights.popleft(), self._landed_at
        result = flight.step.result()
        self._landed_at = self._clock()
        return Landed(flight.plan, result, max(flight.start, before), max(flight.launched, before))
