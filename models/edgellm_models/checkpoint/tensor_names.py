"""One table per architecture: Hugging Face names and canonical (GGUF-style) names, both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCKS: dict[str, dict[str, str]] = {
    "llama": _PRE_NORMS | _ATTENTION | _MLP,
    "mistral": _PRE_NORMS | _ATTENTION | _MLP,
    "qwen2": _PRE_NORMS | _ATTENTION | _MLP,
    "qwen3": _PRE_NORMS | _ATTENTION | _QK_NORMS | _MLP,
    "gemma2": _GEMMA_NORMS | _ATTENTION | _MLP,
    "gemma3": _GEMMA_NORMS | _ATTENTION | _QK_NORMS | _MLP,
    "phi3": _PRE_NORMS | _PHI3_FUSED,
}
"""Architecture -> canonical stem within a block -> Hugging Face stem within a layer."""

GGUF_ONLY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tables that Hugging Face keeps in config.json."""

_NO_BIAS = ("token_embd", "output_norm")
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.([a-z_.]+)\.(weight|bias)")

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
_VISION = ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.", "embed_vision.")


def block_stems(architecture: str) -> tuple[str, ...]:
    """The canonical stems of one block, such as ``attn_q``."""
    return tuple(_BLOCKS[architecture])


def is_canonical(architecture: str, name: str) -> bool:
    """Whether ``name`` is a tensor that a model of this architecture may have."""
    if name in GGUF_ONLY:
        return True
    if match := _BLOCK_NAME.fullmatch(name):
        stem, kind = match[2], match[3]
        return stem in _BLOCKS[architecture] and (kind == "weight" or not stem.endswith("norm"))
    stem, _, kind = name.rpartition(".")
    return stem in _GLOBAL and (kind == "weight" or (kind == "bias" and stem not in _NO_BIAS))


def required_tensors(architecture: str, num_layers: int) -> Iterator[str]:
    """Every tensor that must be there, in the order a model runs; output.weight is optional (tied models)."""
    yield "token_embd.weight"
    yield "output_norm.weight"
    for index in range(num_layers):
        for stem in _BLOCKS[architecture]:
            yield f"blk.{index}.{stem}.weight"


def hf_name(architecture: str, canonical: str) -> str | None:
    """The name in a Hugging Face text model, or None where it has none (rope tables, unknown names)."""
    if canonical in GGUF_ONLY or not is_canonical(architecture, canonical):
        return None
    if match := _BLOCK_NAME.fullmatch(canonical):
        return f"model.layers.{match[1]}.{_BLOCKS[architecture][match[2]]}.{match[3]}"
    stem, _, kind = canonical.rpartition(".")
    return f"{_GLOBAL[stem]}.{kind}"


def canonical_name(architecture: str, name: str) -> str | None:
    """The canonical name of a Hugging Face tensor, or None for one that is no weight of this architecture.

    Accepts the prefixes of multimodal models (``language_model.model.``, ``model.language_model.``) and names
    of a base model without head, which lack ``model.``.
    """
    name = _text_model_name(name)
    if match := _LAYER_NAME.fullmatch(name):
        stem = _from_hf(architecture).get(match[2])
        canonical = f"blk.{match[1]}.{stem}.{match[3]}" if stem else ""
    else:
        stem, _, kind = name.rpartition(".")
        canonical = next((f"{ours}.{kind}" for ours, theirs in _GLOBAL.items() if theirs == stem), "")
    return canonical if canonical and is_canonical(architecture, canonical) else None


def is_vision(name: str) -> bool:
    """Whether a Hugging Face tensor belongs to the vision part of a multimodal model."""
    return name.removeprefix("model.").startswith(_VISION)


@cache
def _from_hf(architecture: str) -> dict[str, str]:
    return {theirs: ours for ours, theirs in _BLOCKS[architecture].items()}


def _text_model_name(name: str) -> str:
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name.startswith(("model.", "lm_head.")):
        return name
    return f"model.{name}"
