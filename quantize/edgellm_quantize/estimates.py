"""What a job will take, before it runs: seconds from short probes of this machine, bytes from its shapes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edgellm_models.errors import Notice, ResourceError

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
_PROBE_WEIGHTS = 1 << 17
_MATRIX = 768
_EFFICIENCY = 0.35
"""Of a large product's speed that the core's mix of work reaches, as measured on a model of 135M."""
_WRITTEN_PER_SECOND = 200e6


def core_seconds(
    spec: ModelSpec, plan: CorePlan, tokens: int, sequence_length: int, rows: Mapping[str, torch.Tensor]
) -> float:
    """Seconds of ``job.run_core`` with ``tokens`` tokens of calibration.

    ``rows`` holds a few weights f32 [n, K] of a tensor for each kind of grid in the plan, by the tensor's
    name: they are rounded as a probe.
    """
    feedback = plan.method != "rtn"
    streams = 2 if feedback and plan.asymmetric_share else 1
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, ffn = spec.hidden_size, spec.ffn_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * ffn, hidden), (hidden, ffn))
    flops = streams * 4.0 * tokens * sequence_length * q  # attention
    for number, (n, k) in enumerate(shapes):
        # Gate and up run twice: for the input of down, and to leave the layer.
        flops += streams * 2.0 * tokens * n * k * (2 if number == 2 else 1)
        if feedback:
            flops += streams * 2.0 * tokens * k * k
            flops += (streams * 4 / 3) * k**3 * (2 if k <= 4096 else 1)
            flops += 2.0 * n * k * k * (2 + streams + 2 * plan.options.descent_passes)
    total = sum(n * k for n, k in shapes) * spec.num_layers
    searching = [_search_seconds(plan.grids[name], values, plan) for name, values in rows.items()]
    slowest = max(searching, default=0.0)
    return spec.num_layers * flops / (_flops_per_second() * _EFFICIENCY) + total * slowest


def encoding_seconds(rows: torch.Tensor, kind: str, effort: str, weights: int, nbytes: int) -> float:
    """Seconds to encode ``weights`` weights as ``kind`` and write ``nbytes``; ``rows`` [n, K] are some."""
    from edgellm_quantize.kquant_codec import encode_rows, usable_cores

    few = rows[: max(1, _PROBE_WEIGHTS // rows.shape[1])].contiguous().numpy()
    encode_rows(few[:1], kind, None, effort, threads=1)  # the first call loads the native library
    start = time.perf_counter()
    encode_rows(few, kind, None, effort, threads=1)
    each = (time.perf_counter() - start) / few.size
    return weights * each / usable_cores() + nbytes / _WRITTEN_PER_SECOND


def tokens_of(spec: CalibrationSpec) -> int:
    """Calibration tokens at most."""
    return spec.samples * spec.sequence_length


def check_memory(needed: int, max_memory: int | None, what: str) -> None:
    """ResourceError where ``max_memory`` is less than what the job needs and cannot do without."""
    if max_memory is not None and needed > max_memory:
        raise ResourceError(
            f"max-memory {max_memory / 2**20:,.0f} MiB: {what} needs {needed / 2**20:,.0f} MiB: allow more"
        )


def estimate_notice(tokens: int) -> Notice:
    """What the estimate of a calibrated job rests on."""
    detail = f"time and memory are estimates for {tokens:,} tokens of calibration, from short probes"
    return Notice("estimate_from_probes", detail)


def _search_seconds(grid: Grid, rows: torch.Tensor, plan: CorePlan) -> float:
    """Per weight."""
    from edgellm_quantize.rounding import round_nearest

    few = rows[: max(1, _PROBE_WEIGHTS // rows.shape[1])].contiguous()
    round_nearest(few[:1], grid, None, plan.options.candidates)
    start = time.perf_counter()
    round_nearest(few, grid, None, plan.options.candidates)
    return (time.perf_counter() - start) / few.numel()


def _flops_per_second() -> float:
    import torch

    matrix = torch.ones((_MATRIX, _MATRIX))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return 2 * _MATRIX**3 / min(times)


def probe_rows(names: Sequence[str], grids: Mapping[str, Grid]) -> list[str]:
    """One tensor for each kind of grid."""
    chosen: dict[Grid, str] = {}
    for name in names:
        if name in grids:
            chosen.setdefault(grids[name], name)
    return list(chosen.values())
