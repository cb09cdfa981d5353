"""ModelSpec from GGUF metadata: llama.cpp's defaults and family rules, bounds, errors that name the key."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.network import read_spec
from edgellm_models.network.spec import ModelSpec


def metadata(architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 6,
        f"{architecture}.context_length": 2048,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 128,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": ["a"] * 50,
    }
    for key, value in changes.items():
        if not key.startswith(("general.", "tokenizer.")):
            key = f"{architecture}.{key}"
        made[key] = value
        if value is ...:
            del made[key]
    return made


def spec(architecture: str = "llama", tensors: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return read_spec("gguf", metadata(architecture, changes), tensors or {})


def read(architecture: str, changes: dict[str, Any], *names: str) -> ModelSpec:
    infos = {f"blk.{i}.attn_norm.weight": SimpleNamespace(shape=(64,)) for i in range(6)}
    infos |= {name: SimpleNamespace(shape=(8,)) for name in names}
    return read_spec("gguf", metadata(architecture, changes), infos)


def windows(made: ModelSpec) -> list[int | None]:
    return [layer.window for layer in made.layers]


def test_defaults() -> None:
    made = spec()
    assert (made.num_kv_heads, made.head_dim, made.vocab_size) == (4, 16, 50)
    assert made.ropes[0].base == 10000.0 and made.ropes[0].dims == 16 and made.ropes[0].scaling == "none"
    assert made.permuted_qk and made.tied_embeddings and made.norm_offset == 0.0
    assert not spec("qwen2").permuted_qk
    assert spec("qwen2").required_biases == ("attn_q", "attn_k", "attn_v")


def test_head_sizes_are_the_stated_ones() -> None:
    """D01: key_length and value_length, not embedding / heads."""
    made = read(
        "qwen3", {"attention.key_length": 32, "attention.value_length": 32, "attention.head_count_kv": 2}
    )
    assert (made.head_dim, made.num_kv_heads, made.ropes[0].dims, made.qk_norm) == (32, 2, 32, True)
    with pytest.raises(BadInputError, match=r"qwen3\.attention\.key_length 32 and .*value_length 16 differ"):
        read("qwen3", {"attention.key_length": 32, "attention.value_length": 16})


def test_head_that_is_missing_is_the_embedding() -> None:
    """C11: presence decides in a GGUF."""
    assert read("llama", {}).tied_embeddings
    assert not read("llama", {}, "output.weight").tied_embeddings
    assert not read("gemma3", {}, "output.weight").tied_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("llama", {"attention.sliding_window": 8}, [None] * 6),
        ("qwen2", {"attention.sliding_window": 8}, [None] * 6),
        (
            "llama",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True] * 4 + [False] * 2},
            [8] * 4 + [None] * 2,
        ),
        ("gemma2", {}, [4096, None] * 3),
        ("gemma2", {"attention.sliding_window": 8}, [8, None] * 3),
        ("gemma3", {"attention.sliding_window": 8}, [8] * 5 + [None]),
        ("gemma3", {}, [None] * 6),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3}, [8, 8, None] * 2),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 3},
            [8, None] * 3,
        ),
        ("phi3", {}, [None] * 6),
        ("phi3", {"attention.sliding_window": 0}, [None] * 6),
        ("phi3", {"attention.sliding_window": 2047}, [2047] * 6),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read(architecture, changes)) == expected


def test_gemma_query_scales_by_layer_count() -> None:
    """The 27B models scale by hidden / heads; a GGUF says so by its layer count only."""
    changes = {"attention.key_length": 32, "attention.value_length": 32}
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        assert spec(architecture, **changes).query_scale == 32**-0.5
        assert spec(architecture, **changes, block_count=layers).query_scale == 16**-0.5
    assert spec("gemma2").attention_softcap == 50.0 and spec("gemma2").final_softcap == 30.0
    assert spec("gemma2", final_logit_softcapping=0.0).final_softcap is None
    assert spec("gemma3").attention_softcap is None and spec("gemma3").final_softcap is None


def test_gemma3_ropes() -> None:
    """Only the global layers' rope is scaled; the sliding layers' base defaults to 10,000."""
    made = read(
        "gemma3",
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    )
    assert [(rope.base, rope.factor) for rope in made.ropes] == [(1e6, 8.0), (10000.0, 1.0)]
    assert [layer.rope for layer in made.layers] == [1, 1, 1, 1, 1, 0]
    assert read("gemma3", {"attention.sliding_window": 8, "rope.freq_base_swa": 5e3}).ropes[1].base == 5e3


def test_scalings() -> None:
    """D07: every way in which a GGUF states a scaling."""
    assert spec(**{"rope.scale_linear": 4.0}).ropes[0].factor == 4.0
    assert spec(**{"rope.scaling.factor": 4.0}).ropes[0].scaling == "linear"
    assert spec(**{"rope.scaling.factor": 0.0}).ropes[0].scaling == "none"
    assert spec(**{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).ropes[0].scaling == "none"
    changes = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn = spec("qwen2", **changes, **{"rope.scaling.original_context_length": 512}).ropes[0]
    assert (yarn.scaling, yarn.original_context, yarn.beta_fast, yarn.beta_slow) == ("yarn", 512, 32.0, 1.0)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    scaled = spec("qwen2", **changes, **{"rope.scaling.yarn_attn_factor": 0.5}).ropes[0]
    assert scaled.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


def test_longrope_of_phi3() -> None:
    changes = {
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.19,
    }
    made = read("phi3", changes, "rope_factors_long.weight", "rope_factors_short.weight")
    (rope,) = made.ropes
    assert (rope.scaling, rope.dims, rope.original_context) == ("longrope", 12, 256)
    assert rope.attention_factor == 1.19 and made.rope_switch_length == 256
    assert read("phi3", changes).ropes[0].scaling == "none"
    with pytest.raises(BadInputError, match=r"rope_factors_long\.weight is missing"):
        read("phi3", changes | {"rope.scaling.type": "longrope"})


def test_per_layer_arrays() -> None:
    """C04: honoured where all layers agree, refused by key where they do not."""
    assert spec(**{"attention.head_count_kv": [2] * 6}).num_kv_heads == 2
    for key in ("attention.head_count_kv", "attention.head_count", "feed_forward_length"):
        with pytest.raises(BadInputError, match=rf"llama\.{key}.*differs from layer to layer"):
            spec(**{key: [4, 4, 4, 4, 4, 2]})
    with pytest.raises(BadInputError, match="5 values for 6 layers"):
        spec(**{"attention.head_count_kv": [2] * 5})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba9"}, "mamba9"),
        ({"general.architecture": ...}, "general.architecture"),
        ({"general.architecture": 3}, "general.architecture"),
        ({"block_count": ...}, "llama.block_count"),
        ({"block_count": "6"}, "llama.block_count"),
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": 10**6}, "llama.block_count"),
        ({"context_length": ...}, "llama.context_length"),
        ({"embedding_length": 2**40}, "llama.embedding_length"),
        ({"embedding_length": -64}, "llama.embedding_length"),
        ({"attention.head_count": 0}, "llama.attention.head_count"),
        ({"attention.head_count": 5}, "llama.attention.key_length"),
        ({"attention.head_count_kv": 3}, "3 key/value heads"),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv"),
        ({"attention.layer_norm_rms_epsilon": ...}, "llama.attention.layer_norm_rms_epsilon"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "llama.attention.layer_norm_rms_epsilon"),
        ({"rope.dimension_count": 17}, "17"),
        ({"rope.dimension_count": 32}, "32"),
        ({"rope.freq_base": -1.0}, "llama.rope.freq_base"),
        ({"rope.scaling.type": "magic"}, "magic"),
        ({"rope.scaling.type": 1}, "llama.rope.scaling.type"),
        ({"tokenizer.ggml.tokens": ...}, "llama.vocab_size"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Any], named: str) -> None:
    """C04: an impossible type or value names the key."""
    with pytest.raises(BadInputError) as caught:
        spec(**changes)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_layer_count_beyond_the_file_is_found_at_once() -> None:
    """C05: the first missing tensor is named."""
    with pytest.raises(
        BadInputError, match=r"blk\.6\.attn_norm\.weight is missing: llama\.block_count says 7"
    ):
        read("llama", {"block_count": 7})
    with pytest.raises(BadInputError, match=r"blk\.6\.attn_norm\.weight is missing"):
        read("llama", {"block_count": 10**6})
