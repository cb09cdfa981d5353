"""What drafting by layers or by a smaller model would take on large shapes: costs, and acceptance needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure
from acceptance.random_shapes import SHAPES, write_shape
from edgellm.cli.layer_skip import finish
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.planning.speculation import break_even_acceptance, speed_up
from edgellm.runner.skip_probe import SkipProbe
from edgellm_models.network.sub_layers import SkippedSubLayers

PROMPT = tuple(range(100, 356))
LENGTHS = range(1, 17)
SHARES = (0.25, 0.4)
GAIN = 1.05


def needed(gain: float, pass_cost: float, verify: dict[int, float]) -> float | None:
    """The least acceptance at which some draft length makes decoding ``gain`` times as fast."""
    for percent in range(1, 1001):
        acceptance = percent / 1000
        if any(speed_up(acceptance, k, pass_cost, verify[k]) >= gain for k in LENGTHS):
            return acceptance
    return None


def figure(name: str, cost: float, verify: dict[int, float], more: str = "") -> Figure:
    """What drafts at this cost of a pass would need."""
    least = needed(GAIN, cost, verify)
    even = [break_even_acceptance(k, cost, verify[k]) for k in LENGTHS]
    breaks = min((one for one in even if one is not None), default=None)
    return Figure(
        name=name,
        value="none would do" if least is None else least,
        unit=f"acceptance for {GAIN} times plain (no loss from "
        f"{'none' if breaks is None else f'{breaks:.3f}'}); c {cost:.3f}, v(2) {verify[1]:.2f}, "
        f"v(4) {verify[3]:.2f}, v(8) {verify[7]:.2f}{more}",
        promise="none",
        met=True,
        detail={"c": cost, "v": verify},
    )


def run() -> Iterator[Figure]:
    smaller: tuple[str, float] | None = None
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_shape(shape, Path(folder) / f"{name}.gguf")
            config = EngineConfig(spec="auto", ctx=1024, kernels="native", device="cpu")
            runtime = load_runtime(config.resolve(environ={}), path, name)
            skip = runtime.layer_skip
            assert skip is not None
            probe = SkipProbe(skip.program, skip.kv, [PROMPT])
            next(iter(probe.prepare()))  # the prompt's KV
            costs = finish(probe.costs())
            verify = {k: costs.of_step(1 + k) for k in LENGTHS}
            for share in SHARES:
                inner = range(1, shape.layers - 1)
                count = round(share * 2 * shape.layers)
                units = [(kind, layer) for layer in inner for kind in (0, 1)]
                spread = [units[i * len(units) // count] for i in range(count)]
                skipped = SkippedSubLayers.of(
                    (layer for kind, layer in spread if kind == 0),
                    (layer for kind, layer in spread if kind == 1),
                )
                cost = finish(probe.pass_cost(skipped))
                yield figure(
                    f"{name}, Q4_0, native: drafting without {len(skipped)} of {2 * shape.layers} sub-layers",
                    cost,
                    verify,
                )
            seconds = finish(probe.step_seconds())
            if smaller is not None:
                other, theirs = smaller
                yield figure(
                    f"{name}, Q4_0, native: drafting with --draft {other}",
                    theirs / seconds,
                    verify,
                    f"; plain steps of {1000 * theirs:.1f} and {1000 * seconds:.1f} ms",
                )
            smaller = name, seconds
            runtime.close()
