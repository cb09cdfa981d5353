"""The name tables: both directions agree with each other, with gguf's own tables and with real spellings."""

from __future__ import annotations

import gguf
import pytest

from edgellm_kernels.ggml_types import GGML_TYPES
from edgellm_models.architectures import FAMILIES, GGUF_ARCHITECTURES
from edgellm_models.checkpoint.tensor_names import (
    canonical_name,
    hf_name,
    is_canonical,
    is_vision,
    required_tensors,
)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_required_tensor_survives_both_directions(architecture: str) -> None:
    for name in (*required_tensors(architecture, 3), "output.weight"):
        theirs = hf_name(architecture, name)
        assert theirs is not None and canonical_name(architecture, theirs) == name
        assert is_canonical(architecture, name)


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_names_are_those_of_gguf(architecture: str) -> None:
    """gguf's own map from Hugging Face names gives the same canonical names (gguf knows mistral as llama)."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    mapping = gguf.get_tensor_name_map(arch, 3)
    for name in (*required_tensors(architecture, 3), "output.weight"):
        if architecture == "gemma2" and name == "output.weight":
            continue  # always tied: gguf has no name for it
        assert mapping.get_name(hf_name(architecture, name) or "", (".weight",)) == name


@pytest.mark.parametrize(
    ("architecture", "theirs", "ours"),
    [
        ("gemma3", "language_model.model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"),
        ("gemma3", "model.language_model.embed_tokens.weight", "token_embd.weight"),
        ("gemma3", "language_model.lm_head.weight", "output.weight"),
        ("qwen2", "layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"),
        ("qwen2", "norm.weight", "output_norm.weight"),
        ("llama", "model.layers.0.self_attn.q_norm.weight", None),
        ("llama", "model.layers.00.input_layernorm.weight", None),
        ("llama", "model.layers.-1.input_layernorm.weight", None),
        ("llama", "model.layers.0.input_layernorm.bias", None),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", "blk.0.ffn_up.weight"),
        ("phi3", "model.layers.0.mlp.gate_proj.weight", None),
        ("llama", "", None),
    ],
)
def test_prefixes_biases_and_strangers(architecture: str, theirs: str, ours: str | None) -> None:
    assert canonical_name(architecture, theirs) == ours


def test_rope_tables_exist_in_gguf_only() -> None:
    assert is_canonical("llama", "rope_freqs.weight") and hf_name("llama", "rope_freqs.weight") is None


def test_vision_tensors() -> None:
    assert is_vision("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight")
    assert is_vision("model.multi_modal_projector.mm_input_projection_weight")
    assert not is_vision("model.layers.0.mlp.up_proj.weight")


def test_type_table_is_that_of_gguf() -> None:
    """Every type that gguf knows, with the same name and block size."""
    theirs = {int(key): (key.name, *sizes) for key, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {key: (entry.name, entry.block_elements, entry.block_bytes) for key, entry in GGML_TYPES.items()}
    assert {key: ours[key] for key in theirs} == theirs
