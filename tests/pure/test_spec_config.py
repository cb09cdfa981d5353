"""ModelSpec from config.json: family rules, nested configs, null and absent, bounds, errors by key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.network import read_spec
from edgellm_models.network.spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def spec(family: str = "llama", tensors: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    config = SIZES | {"model_type": family} | changes
    return read_spec("safetensors", {k: v for k, v in config.items() if v is not ...}, tensors or {})


def shaped(*names: str, layers: int = 4, vocab: int = 64) -> dict[str, Any]:
    """Tensor infos of a file: the embedding, the layers' first norms and ``names``."""
    every = ["token_embd.weight", *(f"blk.{i}.attn_norm.weight" for i in range(layers)), *names]
    return {name: SimpleNamespace(shape=(vocab, 64)) for name in every}


def windows(made: ModelSpec) -> list[int | None]:
    return [layer.window for layer in made.layers]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_explicit_head_dim_wins_and_null_is_computed(family: str) -> None:
    """D01: head size as stated; null asks for hidden / heads, whatever the family's class assumes."""
    assert spec(family, head_dim=32).head_dim == 32
    assert spec(family, head_dim=None).head_dim == 16


@pytest.mark.parametrize(
    ("family", "absent"), [("llama", 16), ("mistral", 16), ("qwen2", 16), ("qwen3", 128), ("gemma2", 256)]
)
def test_absent_head_dim_is_the_family_s(family: str, absent: int) -> None:
    """D01: absent is what the family's config class assumes."""
    assert spec(family).head_dim == absent


def test_head_dim_that_cannot_be_computed() -> None:
    with pytest.raises(BadInputError, match="hidden_size 64 is no multiple of num_attention_heads 5"):
        spec(num_attention_heads=5, num_key_value_heads=5)


def test_nested_text_config() -> None:
    """A multimodal config holds the language model's keys one level down and may leave most to the class."""
    made = read_spec(
        "safetensors",
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 9},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        {},
    )
    assert (made.num_heads, made.num_kv_heads, made.head_dim) == (8, 4, 256)
    assert (made.vocab_size, made.context_length) == (262208, 131072)
    assert made.tied_embeddings and made.query_scale == 256**-0.5
    assert windows(made)[:6] == [1024] * 5 + [None]
    assert [rope.scaling for rope in made.ropes] == ["linear", "none"]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"sliding_window": 8}, [None] * 4),
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 8}, [8] * 4),
        ("phi3", {}, [None] * 4),
        ("phi3", {"sliding_window": 2047}, [2047] * 4),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 1}, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True},
            [None, 8, 8, 8],
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, [None] * 4),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 8, None, 8],
        ),
        ("gemma2", {}, [4096, None, 4096, None]),
        ("gemma2", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, [None] * 4),
        ("gemma3_text", {"sliding_window": 8}, [8] * 4),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
    ],
)
def test_windows(family: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    made = spec(family, **changes)
    assert windows(made) == expected


def test_layers_are_grouped_by_window() -> None:
    made = spec("gemma2", sliding_window=8)
    assert [(group.window, group.layers) for group in made.kv_groups] == [(8, (0, 2)), (None, (1, 3))]


@pytest.mark.parametrize(
    ("family", "flag", "has_head", "tied"),
    [
        ("qwen2", True, False, True),
        ("qwen2", True, True, True),
        ("qwen2", False, True, False),
        ("qwen2", ..., True, False),
        ("qwen2", ..., False, True),
        ("llama", ..., False, True),
        ("llama", False, False, False),  # the build says that the head is missing
        ("gemma2", ..., True, True),
        ("gemma3_text", False, True, False),
    ],
)
def test_tied_or_not(family: str, flag: Any, has_head: bool, tied: bool) -> None:
    """D06: the config decides; where it is silent, the family's default or the missing head does."""
    tensors = shaped("output.weight") if has_head else shaped()
    assert spec(family, tensors, tie_word_embeddings=flag).tied_embeddings is tied


def test_gemma_rules() -> None:
    made = spec("gemma2", query_pre_attn_scalar=144)
    assert made.query_scale == 144**-0.5
    assert (made.attention_softcap, made.final_softcap) == (50.0, 30.0)
    assert made.post_norms and made.norm_offset == 1.0 and made.embedding_scale == 8.0
    assert made.activation == "gelu_tanh" and not made.qk_norm
    off = spec("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert off.attention_softcap is None and off.final_softcap is None
    third = spec("gemma3_text")
    assert third.attention_softcap is None and third.final_softcap is None and third.qk_norm


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen2", {}, ("attn_q", "attn_k", "attn_v")),
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        ),
        ("llama", {}, ()),
        ("phi3", {}, ()),
    ],
)
def test_required_biases(family: str, changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    """D15: which linears must have a bias differs."""
    assert spec(family, **changes).required_biases == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba9"}, "mamba9"),
        ({"model_type": ...}, "model_type"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 1.5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "15"),
        ({"head_dim": True}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"hidden_act": "relu"}, "relu"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "magic"}}, "magic"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "long_factor has 7 values",
        ),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [0.0] * 8,
                    "long_factor": [1.0] * 8,
                }
            },
            "short_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
            "original_max",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "text_config"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window"),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInputError) as caught:
        spec(**({"family": changes.pop("model_type")} if "model_type" in changes else {}), **changes)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_layer_count_beyond_the_file_is_found_at_once() -> None:
    """C05: the first missing tensor is named, and a count of a million takes no time or memory."""
    with pytest.raises(BadInputError, match=r"blk\.2\.attn_norm\.weight is missing.*3 layers"):
        spec(tensors=shaped(layers=2), num_hidden_layers=3)
    with pytest.raises(BadInputError, match=r"blk\.4\.attn_norm\.weight is missing.*1000000 layers"):
        spec(tensors=shaped(), num_hidden_layers=10**6)


def test_a_vocabulary_unlike_the_embedding() -> None:
    with pytest.raises(BadInputError, match=r"token_embd\.weight has 80 rows.*64"):
        spec(tensors=shaped(vocab=80))
