"""Types under a budget of bytes: where bits buy the most, by measured sensitivity."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgellm_models.errors import UsageError


@dataclass(frozen=True)
class TypeOption:
    """One way to store a tensor."""

    type_name: str
    nbytes: int
    error: float
    """What the model loses if only this tensor is stored so, in any unit that adds up over tensors (KL
    divergence, or tr(E H E^T) weighted by what the output feels of it)."""


@dataclass(frozen=True)
class BudgetResult:
    """What was chosen."""

    types: dict[str, str]
    nbytes: int
    error: float


def choose_under_budget(options: Mapping[str, Sequence[TypeOption]], budget_bytes: int) -> BudgetResult:
    """The types with the least summed error whose bytes do not exceed ``budget_bytes``.

    Greedy along the lower convex hull of every tensor's (bytes, error): the step with the greatest fall of
    error per byte first, which is optimal at the sizes where a step ends (Everett 1963); what is then left
    over is spent on the best single change that still fits, until none does. UsageError, with the least
    possible size, when nothing fits.
    """
    for name, choices in options.items():
        if not choices:
            raise ValueError(f"tensor {name} has no type to choose from")
    current = {name: min(choices, key=lambda o: (o.nbytes, o.error)) for name, choices in options.items()}
    used = sum(option.nbytes for option in current.values())
    if used > budget_bytes:
        raise UsageError(
            f"the target of {budget_bytes} bytes cannot be met: the smallest types take {used} bytes"
        )
    hulls = {name: _hull(choices) for name, choices in options.items()}
    places = dict.fromkeys(hulls, 0)
    steps = [entry for name in hulls if (entry := _step(name, hulls[name], 0)) is not None]
    heapq.heapify(steps)
    while steps:
        _, name, cost = heapq.heappop(steps)
        if used + cost > budget_bytes:
            continue  # the tensor stays on this corner; smaller steps of others may still fit
        places[name] += 1
        used += cost
        current[name] = hulls[name][places[name]]
        following = _step(name, hulls[name], places[name])
        if following is not None:
            heapq.heappush(steps, following)
    used = _spend_rest(options, current, used, budget_bytes)
    return BudgetResult(
        {name: option.type_name for name, option in current.items()},
        used,
        sum(option.error for option in current.values()),
    )


def _hull(choices: Sequence[TypeOption]) -> list[TypeOption]:
    """The lower convex hull from the smallest option to the one with the least error."""
    corners: list[TypeOption] = []
    for option in sorted(choices, key=lambda o: (o.nbytes, o.error)):
        if corners and option.error >= corners[-1].error:
            continue  # larger and no better
        while len(corners) >= 2 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], option):
            corners.pop()
        corners.append(option)
    return corners


def _slope(before: TypeOption, after: TypeOption) -> float:
    """Fall of the error per byte."""
    return (before.error - after.error) / max(1, after.nbytes - before.nbytes)


def _step(name: str, hull: list[TypeOption], place: int) -> tuple[float, str, int] | None:
    """(minus the fall per byte, name, bytes) of the step after corner ``place``."""
    if place + 1 >= len(hull):
        return None
    before, after = hull[place], hull[place + 1]
    return -_slope(before, after), name, after.nbytes - before.nbytes


def _spend_rest(
    options: Mapping[str, Sequence[TypeOption]], current: dict[str, TypeOption], used: int, budget: int
) -> int:
    while True:
        best: tuple[float, str, TypeOption] | None = None
        for name, choices in options.items():
            now = current[name]
            for option in choices:
                gain = now.error - option.error
                fits = used + option.nbytes - now.nbytes <= budget
                if gain > 0 and fits and (best is None or gain > best[0]):
                    best = (gain, name, option)
        if best is None:
            return used
        _, name, option = best
        used += option.nbytes - current[name].nbytes
        current[name] = option
