"""Models that between them use every feature that a conversion to GGUF has to carry over."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-8-2": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-spm-head-dim": ("llama", {"tokenizer": "spm_llama", "head_dim": 32}),
    "llama-smollm": ("llama", {"tokenizer": "smollm", "tie_word_embeddings": True}),
    "llama-gpt2-padded": ("llama", {"tokenizer": "gpt2", "vocab_size": 512}),
    "llama-rope-llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}}),
    "llama-rope-llama3-old-key": ("llama", {"rope_scaling": {"type": "llama3", **_LLAMA3}}),
    "llama-rope-parameters": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **_LLAMA3}},
    ),
    "llama-rope-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-rope-yarn": ("llama", {"rope_scaling": {"type": "yarn", **_YARN}}),
    "llama-rope-yarn-factor": ("llama", {"rope_scaling": {"type": "yarn", "attention_factor": 1.5, **_YARN}}),
    "mistral-spm": ("mistral", {}),
    "mistral-nemo": ("mistral", {"tokenizer": "nemo", "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-mha": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-rope-yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", **_YARN}}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {}),
    "gemma2-query-scale": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {}),
    "gemma3-linear-query-scale": (
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 48},
    ),
    "gemma3-layer-types": (
        "gemma3",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2},
    ),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 20.0}),
    "phi3-spm": ("phi3", {}),
    "phi3-bpe-partial": ("phi3", {"tokenizer": "phi4", "partial_rotary_factor": 0.75}),
    "phi3-longrope-short": (
        "phi3",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "longrope", **_LONG},
        },
    ),
    "phi3-longrope-long": (
        "phi3",
        {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **_LONG}},
    ),
}
"""Name to (architecture, keywords of make_tiny)."""
