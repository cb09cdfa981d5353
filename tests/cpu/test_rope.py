"""Rotary embeddings: read from every spelling of a config and equal to transformers' own frequencies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgellm_models.network import read_spec
from edgellm_models.network.rope import Rope, attention_factor, inverse_frequencies
from edgellm_models.network.spec import RopeSpec

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG = [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 7.5, 8.0]
SHORT = [1.0, 1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "linear below 1": {"factor": 0.5},
    "dynamic": {"factor": 2.5},
    "llama3": LLAMA3,
    "llama3 without its own context": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn without context": {"factor": 4.0},
    "yarn betas": {"factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 8, "beta_slow": 2},
    "yarn untruncated": {"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    "yarn attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.75,
    },
    "yarn mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.3,
        "mscale_all_dim": 0.7,
    },
    "yarn mscale alone": {"factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 1.3},
    "longrope": {"long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": 1024},
    "longrope factor": {
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 1024,
        "factor": 32.0,
    },
    "longrope attention_factor": {
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.5,
    },
}


def spec_ropes(config: dict[str, Any]) -> tuple[RopeSpec, ...]:
    return read_spec("safetensors", config, {}).ropes


def oracle(
    config: dict[str, Any], length: int | None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor as transformers computes them from the same config.json."""
    made = AutoConfig.for_model(**copy.deepcopy(config))
    parameters = made.rope_parameters[layer_type] if layer_type else made.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        dims = int(made.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[kind](made, "cpu", seq_len=length, layer_type=layer_type)


def assert_equal_to_oracle(config: dict[str, Any], length: int) -> None:
    (rope,) = spec_ropes(config)
    expected, factor = oracle(config, length)
    torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-6)


def spellings(kind: str, parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same scaling in every form that files of the wild use."""
    outer = {key: value for key, value in BASE.items() if key != "rope_theta"}
    theta = BASE["rope_theta"]
    return {
        "type": BASE | {"rope_scaling": parameters | {"type": kind}},
        "rope_type": BASE | {"rope_scaling": parameters | {"rope_type": kind}},
        "both": BASE | {"rope_scaling": parameters | {"rope_type": kind, "type": kind}},
        "rope_parameters": outer | {"rope_parameters": parameters | {"rope_type": kind, "rope_theta": theta}},
        "theta outside": BASE | {"rope_parameters": parameters | {"rope_type": kind}},
        "theta inside wins": BASE
        | {"rope_parameters": parameters | {"rope_type": kind, "rope_theta": 10000.0}},
    }


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_every_scaling_in_every_spelling(name: str, family: str) -> None:
    """D07: a scaling is applied whatever key names it; frequencies equal transformers' to 1e-6."""
    parameters = SCALINGS[name]
    kind = name.split(" ")[0]
    plain = inverse_frequencies(spec_ropes(BASE | {"model_type": family})[0])
    for spelling, config in spellings(kind, parameters).items():
        for length in (100, 5000):
            assert_equal_to_oracle(config | {"model_type": family}, length)
        (rope,) = spec_ropes(config | {"model_type": family})
        assert not torch.equal(inverse_frequencies(rope, 5000), plain), spelling


@pytest.mark.parametrize("spelling", [{}, {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}])
@pytest.mark.parametrize("theta", [None, 10000.0, 1e6])
def test_plain_rope(spelling: dict[str, Any], theta: float | None) -> None:
    config = {k: v for k, v in BASE.items() if k != "rope_theta"} | spelling | {"model_type": "llama"}
    if theta is not None:
        config["rope_theta"] = theta
    assert_equal_to_oracle(config, 100)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("partial", [1.0, 0.5, 0.75])
def test_phi3(kind: str, partial: float) -> None:
    """Phi-3 names longrope in three ways, states the original context outside and may turn part of a head."""
    pairs = int(16 * partial) // 2
    config = BASE | {
        "model_type": "phi3",
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": partial,
        "rope_scaling": {"type": kind, "long_factor": LONG[:pairs], "short_factor": SHORT[:pairs]},
    }
    (rope,) = spec_ropes(config)
    assert rope.dims == 2 * pairs
    accepted = copy.deepcopy(config)
    accepted["rope_scaling"]["type"] = "longrope"
    for length in (512, 513):
        expected, factor = oracle(accepted, length)
        torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"rope_theta": 2e6, "rope_local_base_freq": 5000.0},
        {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
            }
        },
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 4e6},
    ],
)
def test_gemma3_has_two(spelling: dict[str, Any]) -> None:
    """The global layers' rope is scaled, that of the sliding ones is not; layers know which is theirs."""
    config = {k: v for k, v in BASE.items() if k != "rope_theta"} | spelling
    config |= {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8}
    spec = read_spec("safetensors", config, {})
    for layer, kind in ((0, "sliding_attention"), (4, "sliding_attention"), (5, "full_attention")):
        expected, _ = oracle(config, 100, kind)
        frequencies = inverse_frequencies(spec.ropes[spec.layers[layer].rope])
        torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


def test_llama3_equals_the_table_of_a_gguf() -> None:
    """A GGUF keeps Llama 3's scaling as divisors; the same frequencies come out."""
    (scaled,) = spec_ropes(BASE | {"model_type": "llama", "rope_scaling": LLAMA3 | {"rope_type": "llama3"}})
    plain = RopeSpec(base=scaled.base, dims=scaled.dims)
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    table = RopeSpec(base=scaled.base, dims=scaled.dims, freq_divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(inverse_frequencies(table), inverse_frequencies(scaled), rtol=1e-6, atol=0)


def test_angles_are_exact_at_large_positions() -> None:
    """D14: angles in f32, so that neighbours beyond 256 (half precision's limit) stay apart."""
    rope = Rope(RopeSpec(base=10000.0, dims=64))
    positions = torch.tensor([600, 601, 30000, 30001, 131071])
    cos, sin = rope.cos_sin(positions, None, torch.tensor([5]))
    assert cos.dtype == sin.dtype == torch.float32
    exact = positions.double()[:, None] / 10000.0 ** (torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=0, atol=2e-2)
    torch.testing.assert_close(cos[:2].double(), exact[:2].cos(), rtol=0, atol=2e-4)
    assert (cos[0] - cos[1]).abs().max() > 0.1 and (sin[2] - sin[3]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_each_sequence_chooses_by_its_own_length(kind: str) -> None:
    """A long sequence in the batch leaves a short one's angles alone; padding rows do no harm."""
    (rope_spec,) = spec_ropes(
        BASE | {"model_type": "llama", "rope_scaling": SCALINGS[kind] | {"rope_type": kind}}
    )
    limit = rope_spec.switch_length
    assert limit is not None
    rope = Rope(rope_spec)
    lengths = torch.tensor([limit + 500, 10, limit, limit + 1])
    counts = torch.tensor([2, 3, 1, 2])
    positions = torch.tensor([7, 8, 0, 1, 9, 30, 5, 6, 0])  # the last row is padding
    cos, _ = rope.cos_sin(positions, lengths, counts)
    start = 0
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        rows = positions[start : start + count]
        angles = rows[:, None].float() * inverse_frequencies(rope_spec, length)
        torch.testing.assert_close(cos[start : start + count], angles.cos() * rope.factor, rtol=0, atol=0)
        start += count
    assert not torch.equal(inverse_frequencies(rope_spec, limit), inverse_frequencies(rope_spec, limit + 1))
