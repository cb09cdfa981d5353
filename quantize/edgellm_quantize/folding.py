"""Rescales channels between an operation and the linears behind it: the function of the layer stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from edgellm_quantize.capture import STAGE_STEMS

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec


class Tensors(Protocol):
    """Where the tensors of a layer are read: f32, by canonical name, in the conventions of their file."""

    def matrix(self, name: str) -> torch.Tensor: ...

    def vector(self, name: str) -> torch.Tensor: ...

    def has(self, name: str) -> bool: ...


class CheckpointTensors:
    """The tensors of a checkpoint, dense."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def matrix(self, name: str) -> torch.Tensor:
        from edgellm_quantize.grids import dequantize

        return dequantize(self.checkpoint.weight(name))

    def vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.vector(name)

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)


def fold_width(spec: ModelSpec, stage: str) -> int:
    """How many channels of a stage's input can be rescaled independently.

    Query heads that share a value head share its channels, so ``attn_output`` has kv_heads * head_dim.
    """
    return {
        "qkv": spec.hidden_size,
        "attn_output": spec.num_kv_heads * spec.head_dim,
        "gate_up": spec.hidden_size,
        "ffn_down": spec.ffn_size,
    }[stage]


def expand(spec: ModelSpec, stage: str, scales: torch.Tensor) -> torch.Tensor:
    """One factor per column of the stage's linears: [fold_width] -> [K]."""
    if stage != "attn_output":
        return scales
    repeat = spec.num_heads // spec.num_kv_heads
    return scales.view(spec.num_kv_heads, 1, spec.head_dim).expand(-1, repeat, -1).reshape(-1)


def fold(
    tensors: Tensors, spec: ModelSpec, layer: int, stage: str, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of a layer that change when the input of ``stage`` is divided by ``scales`` [fold_width].

    Its linears' columns are multiplied; what makes the input is divided: the norm's gain before q, k, v and
    before gate and up (stored gains of Gemma lack an offset, which is kept), the rows of v before the output
    projection, the rows of up before down, with their biases. Returns f32 tensors by canonical name.
    """
    prefix = f"blk.{layer}."
    columns = expand(spec, stage, scales)
    changed: dict[str, torch.Tensor] = {}
    for stem in STAGE_STEMS[stage]:
        name = f"{prefix}{stem}.weight"
        if tensors.has(name):
            changed[name] = tensors.matrix(name) * columns
    if stage in ("qkv", "gate_up"):
        name = f"{prefix}{'attn_norm' if stage == 'qkv' else 'ffn_norm'}.weight"
        changed[name] = (tensors.vector(name) + spec.norm_offset) / scales - spec.norm_offset
        return changed
    stem, rows = source_rows(tensors, spec, layer, stage)
    weight = tensors.matrix(f"{prefix}{stem}.weight").clone()
    weight[rows] /= scales[:, None]
    changed[f"{prefix}{stem}.weight"] = weight
    if tensors.has(f"{prefix}{stem}.bias"):
        bias = tensors.vector(f"{prefix}{stem}.bias").clone()
        bias[rows] /= scales
        changed[f"{prefix}{stem}.bias"] = bias
    return changed


def source_rows(tensors: Tensors, spec: ModelSpec, layer: int, stage: str) -> tuple[str, slice]:
    """The linear whose rows make the input of ``attn_output`` or ``ffn_down``, and which: (stem, rows)."""
    prefix = f"blk.{layer}."
    if stage == "attn_output":
        if tensors.has(f"{prefix}attn_qkv.weight"):
            start = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            return "attn_qkv", slice(start, None)
        return "attn_v", slice(None)
    assert stage == "ffn_down", stage
    fused = not tensors.has(f"{prefix}ffn_gate.weight")
    return "ffn_up", slice(spec.ffn_size, None) if fused else slice(None)


def fold_all(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, scales: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Several stages of one layer folded one after the other."""
    from edgellm_quantize.overlay import OverlayCheckpoint

    overlay = OverlayCheckpoint(checkpoint)
    tensors = CheckpointTensors(overlay)
    for stage, factors in scales.items():
        overlay.replaced |= fold(tensors, spec, layer, stage, factors)
    return overlay.replaced
