"""config.json of published models, as far as sizes need it: public facts to test planning on."""

from __future__ import annotations

from typing import Any


def _llama(
    hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
        **more,
    }


LLAMA2_7B = _llama(4096, 11008, 32, 32, 32, 32000)
LLAMA2_13B = _llama(5120, 13824, 40, 40, 40, 32000)
LLAMA3_70B = _llama(8192, 28672, 80, 64, 8, 128256, max_position_embeddings=8192)
LLAMA3_8B = _llama(4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072)
LLAMA32_1B = _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True)
LLAMA32_3B = _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True)
MISTRAL_7B = {
    **_llama(4096, 14336, 32, 32, 8, 32000),
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
QWEN3_06B = {
    **_llama(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
}
QWEN3_8B = {
    **_llama(4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
}
PHI3_MINI = {
    **_llama(3072, 8192, 32, 32, 32, 32064),
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
}
SMOLLM2_135M = _llama(576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, tie_word_embeddings=True)
GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA3_1B = {
    **GEMMA3_270M,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
}
