"""What choosing types for a target size takes in memory, and what of it a limit leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm_models.errors import Notice
from edgellm_quantize import feedback_share, sensitivity
from edgellm_quantize.capture import keeps_activated, stage_shapes
from edgellm_quantize.estimates import ENCODING_BYTES, PROGRAM_BYTES, activation_bytes

if TYPE_CHECKING:
    from edgellm_models.network.spec import ModelSpec

_LINEARS = 7
_LEAST_ROWS = 256
_LOGITS = 6
"""Tensors of logits that are there at once: of both models, their logarithms, shares and products."""
_SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class Choosing:
    """How types are chosen."""

    measured: bool
    """The model runs; otherwise the errors of the weights decide."""
    feedback: bool
    """What error feedback leaves is measured too."""
    rows: int
    """Rows that run at once for the latter."""
    nbytes: int
    notices: tuple[Notice, ...] = ()


def choosing_within_memory(spec: ModelSpec, *, feedback: bool, max_memory: int | None) -> Choosing:
    """The best way of choosing that keeps ``max_memory``, with notices of what is left out.

    ``feedback``: blocks will be rounded with error feedback. The last way is that of a job without
    calibration, which is not checked here.
    """
    rows = feedback_share.ROWS_PER_PART
    measuring = sensitivity_bytes(spec)
    if feedback:
        while max_memory is not None and rows > _LEAST_ROWS and feedback_bytes(spec, rows) > max_memory:
            rows //= 2
        both = max(measuring, feedback_bytes(spec, rows))
        if max_memory is None or both <= max_memory:
            return Choosing(True, True, rows, both)
    if max_memory is None or measuring <= max_memory:
        if not feedback:
            return Choosing(True, False, rows, measuring)
        detail = (
            "types are chosen as if no error feedback followed: max-memory does not hold what measuring takes"
        )
        return Choosing(True, False, rows, measuring, (Notice("feedback_not_measured", detail),))
    return Choosing(False, False, rows, PROGRAM_BYTES + ENCODING_BYTES)


def sensitivity_bytes(spec: ModelSpec) -> int:
    """Bytes that ``sensitivity.measured_sensitivity`` takes at its peak, the program included."""
    shapes = stage_shapes(spec).values()
    layer = 4 * sum(n * k for n, k in shapes)
    table = spec.vocab_size * spec.hidden_size
    tokens, scored = sensitivity.TOKENS, sensitivity.TOKENS // sensitivity.SCORED_EVERY
    layers = min(sensitivity.LAYERS, spec.num_layers)
    states = (_LINEARS * layers + 3) * tokens * spec.hidden_size * 4
    # The layer as it is beside the layer with one matrix rounded, which is made first.
    running = 2 * layer + activation_bytes(spec, tokens, tokens)
    rounding = layer + _encoding(max(n * k for n, k in shapes))
    kept, logits = scored * spec.vocab_size * 4, _LOGITS * sensitivity.HEAD_ROWS * spec.vocab_size * 4
    heads = kept + max(logits + 5 * table, _encoding(table))  # f32, and the blocks that it is made from
    peak = max(running, rounding, heads)
    return PROGRAM_BYTES + _SCRATCH_BYTES + states + peak


def _encoding(weights: int) -> int:
    """A matrix in blocks, and f32 of the strip that is rounded: itself, decoded, their difference."""
    return weights + 12 * min(weights, sensitivity.STRIP_WEIGHTS)


def feedback_bytes(spec: ModelSpec, rows: int) -> int:
    """Bytes that ``feedback_share.feedback_shares`` takes with so many rows at once, the program included."""
    shapes = stage_shapes(spec).values()
    layer = 4 * sum(n * k for n, k in shapes)
    tokens, ffn, q = feedback_share.TOKENS, spec.ffn_size, spec.num_heads * spec.head_dim
    parts = (3 * tokens // 4, tokens // 4)
    streams = sum(
        part * (spec.hidden_size + max(q, ffn if keeps_activated(part, ffn) else 0)) * 4 for part in parts
    )
    collecting = layer + 2 * max(k for _, k in shapes) ** 2 * 4 + activation_bytes(spec, rows, rows)
    rounding = max(k * k * 4 * (7 if k <= 4096 else 4) + 6 * n * k * 4 for n, k in shapes)
    return PROGRAM_BYTES + _SCRATCH_BYTES + streams + max(collecting, rounding)
