"""A tiny model of which known sub-layers do nothing, and costs of its passes that are no chance."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from edgellm.runner.skip_probe import SkipProbe
from edgellm.speculative.calibration import Costs
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.dead_layers import make_with_dead

LAYERS = 8
DEAD = SkippedSubLayers.of(attention=(1, 3, 5), feed_forward=(2, 3, 6))
COSTS = Costs(0.06, 0.06, {2: 1.02, 4: 1.05, 8: 1.1, 16: 1.2})


def give_costs(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets probes measure these."""

    def measured(self: SkipProbe) -> Generator[None, None, Costs]:
        yield
        return costs

    def of_pass(self: SkipProbe, skipped: SkippedSubLayers) -> Generator[None, None, float]:
        yield
        return costs.of_pass(skipped)

    monkeypatch.setattr(SkipProbe, "costs", measured)
    monkeypatch.setattr(SkipProbe, "pass_cost", of_pass)


def make_partly_dead(folder: Path) -> Path:
    """``LAYERS`` layers, of which ``DEAD`` is dead."""
    return make_with_dead(
        "llama", folder, num_layers=LAYERS, attention=DEAD.attention, feed_forward=DEAD.feed_forward
    )
