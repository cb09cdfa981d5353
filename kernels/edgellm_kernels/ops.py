"""The tensor operations of a decoder at fused granularity: the only module of this package that others call.

``load_kernels`` chooses an implementation per op once, when a model is loaded. The protocols here are the
contract that every backend meets; each op has a torch reference (``*_torch.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from edgellm_kernels import sampling_torch, step_native
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.kv_scores_torch import block_scores
from edgellm_kernels.native_library import load_library, why_missing
from edgellm_kernels.native_structs import serves as native_serves
from edgellm_kernels.operands import HeadShape, Prepared
from edgellm_kernels.registry import OPS, KernelUnavailableError, choose, explain, keep_fused, triton_missing
from edgellm_kernels.rope_torch import rope_angles
from edgellm_kernels.row_native import NativeRow
from edgellm_kernels.sampling_torch import DrawTables
from edgellm_kernels.step_native import SKIPS_ATTENTION, SKIPS_FEED_FORWARD, NativeStep, StepSpec
from edgellm_kernels.step_native import can_compile as can_compile_step
from edgellm_kernels.weights import BlockQuantWeight, DenseWeight, LinearWeight, NativeWeight, PlaneWeight

__all__ = [
    "SKIPS_ATTENTION",
    "SKIPS_FEED_FORWARD",
    "DrawTables",
    "HeadShape",
    "KernelUnavailableError",
    "Kernels",
    "NativeRow",
    "NativeStep",
    "Prepared",
    "StepSpec",
    "block_scores",
    "can_compile_step",
    "draw_rows",
    "explain",
    "largest",
    "load_kernels",
    "native_missing",
    "native_serves",
    "rope_angles",
]


class Embed(Protocol):
    def __call__(
        self,
        token_ids: torch.Tensor,
        weight: DenseWeight | BlockQuantWeight | NativeWeight | PlaneWeight,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Rows of the embedding table times ``scale``: int64 [tokens] -> f32 [tokens, hidden]."""
        ...


class AddRmsNorm(Protocol):
    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        post_norm: torch.Tensor | None = None,
    ) -> tuple[Prepared, torch.Tensor]:
        """Add a sub-layer's output to the residual stream and norm the sum for the next sub-layer.

        x: f32 [tokens, hidden], or None where there is nothing to add yet. residual: f32 [tokens, hidden].
        ``post_norm`` is a gain with which x itself is normed before it is added (Gemma). Returns
        (rms_norm(residual') * weight, residual') with residual' = residual + x, in f32: the stream may pass
        65504.
        """
        ...


class Linear(Protocol):
    def __call__(self, x: Prepared, weight: LinearWeight, add: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias (+ add): [tokens, K] -> f32 [tokens, N]."""
        ...


class GateUp(Protocol):
    def __call__(self, x: Prepared, weight: LinearWeight, activation: str) -> Prepared:
        """activation(gate) * up, where the first half of the weight's rows is gate and the second up.

        [tokens, K] -> [tokens, N / 2]. activation: silu or gelu_tanh.
        """
        ...


class RopeAngles(Protocol):
    def __call__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of position * frequency, times ``factor``: f32 [tokens, pairs] each.

        positions: int64 [tokens]; frequencies: f32 [pairs] or [tokens, pairs]. The angle is rounded to f32.
        """
        ...


class QkNormRopeStore(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVStorage,
        layer: int,
        tables: GroupTables,
    ) -> torch.Tensor:
        """Split fused rows [tokens, qkv_width], norm q and k heads (where gains [k_dim] are given), rotate.

        cos and sin: f32 [tokens, pairs]; element i of a head turns with element i + pairs, those from 2 *
        pairs on stay. K and V go to ``tables.slot_mapping`` (a slot of -1 is written nowhere) in ``kv``'s
        form, and with ``tables.tail`` to its rings; what a row stores never depends on how many rows there
        are. ``layer`` counts within the group. Returns the rotated q, f32 [tokens, heads, k_dim].
        """
        ...


class PlanAttention(Protocol):
    def __call__(self, batch: ForwardBatch, tables: GroupTables, block_size: int) -> Any:
        """What the attention of all layers of a group shares in one forward pass; opaque, may be None."""
        ...


class PagedAttention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        kv: KVStorage,
        layer: int,
        tables: GroupTables,
        batch: ForwardBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        plan: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> Prepared:
        """softmax(softcap(q k^T * scale)) v over the stored keys a query may see: [tokens, heads * v_dim].

        A query at position p sees the keys of its sequence at positions p - window + 1 .. p that lie in live
        blocks, those of its own prefill chunk included: they too are read from ``kv``. A query that sees none
        gives zeros, and so do rows behind the last sequence. Cost follows the live blocks; scratch does not
        grow with queries * keys. ``plan`` is what plan_attention gave for these tables; None makes one.
        ``sinks``: f32 [heads], a learned logit per head (neither scaled nor capped) that joins the softmax of
        every row and has no value: weights then sum to less than 1. Kept sink tokens are something else: keys
        that stay in the table.
        """
        ...


class LmHead(Protocol):
    def __call__(self, x: Prepared, weight: LinearWeight, softcap: float | None = None) -> torch.Tensor:
        """Logits f32 [rows, vocab], soft-capped where the family does that."""
        ...


@dataclass(frozen=True)
class Kernels:
    """One implementation per op, chosen at load and handed to the decoder."""

    device: torch.device
    dtype: torch.dtype
    """What linears compute in; norms, rope and attention compute in f32."""
    activations: str
    """What linears multiply weights with: exact (the compute type itself), int16 (native kernels; on a GPU
    two terms of 8 bits, of single rows) or int8 (on a GPU, of single rows)."""
    chosen: Mapping[str, str]
    """Op -> backend."""
    embed: Embed
    add_rms_norm: AddRmsNorm
    linear: Linear
    gate_up: GateUp
    rope_angles: RopeAngles
    qk_norm_rope_store: QkNormRopeStore
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    lm_head: LmHead


def native_missing() -> str:
    """Why there is no native kernel library; empty where there is one."""
    return why_missing()


ACTIVATIONS = ("auto", "exact", "int16", "int8")
_LINEAR_OPS = ("linear", "gate_up", "lm_head")


def load_kernels(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    preferred: str = "auto",
    activations: str = "auto",
) -> Kernels:
    """Choose every op's implementation for a device and compute type.

    ``preferred``: auto, torch, triton or native. ``activations``: exact, int16 (integers with a scale per 32:
    of 16 bits in the native kernels, of 15 in the Triton GEMV), int8 (the Triton GEMV only) or auto: int16
    in the native kernels, else exact. Raises KernelUnavailableError, naming the op or the precision and what
    there is.
    """
    chosen = {op: choose(op, device, dtype, preferred) for op in OPS}
    if torch.device(device).type == "cuda":
        keep_fused()  # draws are Triton's there whatever computes the rest
    precision = _precision(chosen["linear"].backend, activations)
    functions = {op: implementation.load() for op, implementation in chosen.items()}
    for op in ("add_rms_norm", "paged_attention"):
        if chosen[op].backend == "torch":
            functions[op] = partial(functions[op], dtype=dtype)
    for op in _LINEAR_OPS:
        if chosen[op].backend == "native":
            functions[op] = partial(functions[op], exact=precision == "exact")
        elif chosen[op].backend == "triton":
            functions[op] = partial(functions[op], dtype=dtype, activations=precision)
    if chosen["paged_attention"].backend == "triton":
        functions["paged_attention"] = partial(functions["paged_attention"], dtype=dtype)
    backends = {op: implementation.backend for op, implementation in chosen.items()}
    return Kernels(
        device=torch.device(device), dtype=dtype, activations=precision, chosen=backends, **functions
    )


def _precision(backend: str, activations: str) -> str:
    """exact, int16 or int8. KernelUnavailableError for what the linears of this backend do not have."""
    if activations not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise KernelUnavailableError(f"activations cannot be {activations!r}: choose {known}")
    if backend == "triton":
        return "exact" if activations == "auto" else activations
    if activations == "int8":
        raise KernelUnavailableError(
            f"int8 activations need the triton kernels on a GPU, and {backend} kernels compute here: "
            "choose activations auto, exact or int16"
        )
    if backend == "native":
        return "exact" if activations == "exact" else "int16"
    if activations == "int16":
        raise KernelUnavailableError(
            f"int16 activations need the native or triton kernels, and {backend} kernels compute here: "
            "choose activations auto or exact"
        )
    return "exact"


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row [rows, n] the largest value and its first place; NaN and its place where there is one.

    The same values whichever backend finds them.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and load_library() is not None:
        return step_native.largest(logits)
    best = logits.max(dim=-1)
    return best.values, best.indices


def draw_rows(logits: torch.Tensor, tables: DrawTables) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row [rows, n] f32 a drawn id, int64 [rows], and its largest logit, f32 [rows].

    See sampling_torch, whose ids the GPU's kernels draw too.
    """
    if logits.device.type == "cuda" and not triton_missing():
        from edgellm_kernels import sampling_triton

        return sampling_triton.draw(logits, tables)
    return sampling_torch.draw(logits, tables)
