"""What a config.json leaves out is what the family's config class in transformers assumes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoConfig

from edgellm_models.network import read_spec

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 8},
    {"sliding_window": 64},
    {"sliding_window": 64, "use_sliding_window": True},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 10},
    {"sliding_window_pattern": 4},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"query_pre_attn_scalar": 100},
    {"final_logit_softcapping": None, "attn_logit_softcapping": 20.0},
    {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_defaults(family: str, changes: dict[str, Any]) -> None:
    config = SIZES | changes | {"model_type": family}
    made = AutoConfig.for_model(**copy.deepcopy(config))
    spec = read_spec("safetensors", config, {})
    assert spec.num_kv_heads == made.num_key_value_heads
    assert spec.head_dim == getattr(made, "head_dim", made.hidden_size // made.num_attention_heads)
    assert spec.context_length == made.max_position_embeddings
    assert spec.rms_eps == made.rms_norm_eps
    assert spec.tied_embeddings is made.tie_word_embeddings
    gemma = family.startswith("gemma")
    activation = made.hidden_activation if gemma else made.hidden_act
    assert spec.activation == {"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)
    assert spec.query_scale == (made.query_pre_attn_scalar if gemma else spec.head_dim) ** -0.5
    if gemma:
        assert spec.attention_softcap == made.attn_logit_softcapping
        assert spec.final_softcap == made.final_logit_softcapping
    window = getattr(made, "sliding_window", None) if family != "llama" else None
    kinds = getattr(made, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None else "full_attention"] * made.num_hidden_layers
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in spec.layers] == expected
    parameters = made.rope_parameters
    for layer, kind in zip(spec.layers, kinds, strict=True):
        theta = parameters[kind]["rope_theta"] if family == "gemma3_text" else parameters["rope_theta"]
        assert spec.ropes[layer.rope].base == theta
