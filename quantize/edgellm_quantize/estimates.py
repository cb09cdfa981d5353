"""What a job will take, before it runs: seconds from short probes of this machine, bytes from its shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgellm_models.errors import Notice, ResourceError
from edgellm_quantize.sizes import memory_size

if TYPE_CHECKING:
    import torch

    from edgellm_models.network.spec import ModelSpec
    from edgellm_quantize.grids import Grid
    from edgellm_quantize.layer_rounding import CorePlan
    from edgellm_quantize.recipe import CalibrationSpec

PROGRAM_BYTES = 400 << 20
"""Interpreter, numpy and torch, as measured."""
ENCODING_BYTES = 320 << 20
"""Rows encoded at once (16 MiB of weights), their bytes and decoded values, scratch of the search."""
_PROBE_WEIGHTS = 1 << 15
_PROBE_ROWS = 2048
_MATRIX = 320
_REPEATS = 5
"""The least of many short runs: other programs only ever add."""
_EFFICIENCY = 0.5
"""Of a large product's speed that the core's mix of work reaches, as measured on a model of 135M."""
_WRITTEN_PER_SECOND = 200e6


def core_seconds(
    spec: ModelSpec,
    plan: CorePlan,
    tokens: int,
    sequence_length: int,
    probes: Sequence[tuple[Grid, torch.Tensor, int]],
) -> float:
    """Seconds of ``job.run_core`` with ``tokens`` tokens of calibration.

    ``probes`` holds each kind of grid in the plan, weights f32 [n, K] of a tensor that gets it (they are
    rounded to learn how long that takes), and how many weights in all get it.
    """
    from edgellm_quantize.capture import HESSIAN_SHARE, keeps_activated, stage_shapes

    feedback = plan.method != "rtn"
    streams = 2 if feedback and plan.asymmetric_share else 1
    width = spec.num_heads * spec.head_dim
    flops = streams * 4.0 * tokens * sequence_length * width  # attention
    for stage, (n, k) in stage_shapes(spec).items():
        # Gate and up run for the input of down, and again to leave the layer where that is not kept.
        again = stage == "gate_up" and not keeps_activated(tokens, spec.ffn_size)
        flops += streams * 2.0 * tokens * n * k * (2 if again else 1)
        if feedback:
            flops += (streams - 1 + HESSIAN_SHARE) * 2.0 * tokens * k * k
            flops += (streams * 4 / 3) * k**3 * (2 if k <= 4096 else 1)
            flops += 2.0 * n * k * k * (2 + streams + 2 * plan.options.descent_passes)
    searching = sum(count * _search_seconds(grid, rows, plan) for grid, rows, count in probes)
    return spec.num_layers * flops / (_flops_per_second() * _EFFICIENCY) + searching


def encoding_seconds(rows: torch.Tensor, kind: str, effort: str, weights: int, nbytes: int) -> float:
    """Seconds to encode ``weights`` weights as ``kind`` and write ``nbytes``; ``rows`` [n, K] are some."""
    from edgellm_quantize.kquant_codec import encode_rows, usable_cores

    few = rows[: max(1, _PROBE_WEIGHTS // rows.shape[1])].contiguous().numpy()
    each = _least(lambda: encode_rows(few, kind, None, effort, threads=1)) / few.size
    return weights * each / usable_cores() + nbytes / _WRITTEN_PER_SECOND


def tokens_of(spec: CalibrationSpec) -> int:
    """Calibration tokens at most."""
    return spec.samples * spec.sequence_length


def activation_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """What running ``rows`` rows of sequences of ``length`` through a layer takes beside its weights."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    total = rows * (2 * spec.hidden_size + 2 * (q + 2 * kv) + 4 * spec.ffn_size) * 4
    if spec.attention_softcap is not None:  # scores are kept, four times while they are capped
        total += 16 * spec.num_heads * length**2
    return total


def check_memory(needed: int, max_memory: int | None, what: str) -> None:
    """ResourceError where ``max_memory`` is less than what the job needs and cannot do without."""
    if max_memory is not None and needed > max_memory:
        raise ResourceError(
            f"max-memory {memory_size(max_memory)}: {what} needs {memory_size(needed)}: allow more"
        )


def estimate_notice(tokens: int) -> Notice:
    """What the estimate of a calibrated job rests on."""
    detail = f"time and memory are estimates for {tokens:,} tokens of calibration, from short probes"
    return Notice("estimate_from_probes", detail)


def _search_seconds(grid: Grid, rows: torch.Tensor, plan: CorePlan) -> float:
    """Per weight."""
    from edgellm_quantize.rounding import round_nearest

    # Many rows of few spans: so the core meets them, and the cost of each small step is shared as there.
    few = rows[:, : grid.span(rows.shape[1])][:_PROBE_ROWS].contiguous()
    return _least(lambda: round_nearest(few, grid, None, plan.options.candidates)) / few.numel()


def _flops_per_second() -> float:
    import torch

    matrix = torch.ones((_MATRIX, _MATRIX))
    return 2 * _MATRIX**3 / min(_least(lambda: matrix @ matrix) for _ in range(_REPEATS))


def _least(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs behind a first one that loads what it needs."""
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
