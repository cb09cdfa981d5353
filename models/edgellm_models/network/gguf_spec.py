"""ModelSpec from GGUF metadata: keys, defaults and per-family rules as llama.cpp's loader has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_models.architectures import gguf_architecture
from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import (
    REQUIRED,
    metadata_float,
    metadata_int,
    metadata_int_per_layer,
    metadata_str,
    type_label,
)
from edgellm_models.network import spec_checks as limits
from edgellm_models.network.spec import LayerSpec, ModelSpec, RopeSpec, TensorShape

_SWA_PERIOD = {"gemma2": 2, "gemma3": 6}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


class _Keys:
    """Reads ``<architecture>.<key>``; the errors name the whole key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def integer(self, key: str, maximum: int, default: int | None = None, minimum: int = 1) -> int:
        if default is None:
            return metadata_int(self.metadata, self.name(key), minimum=minimum, maximum=maximum)
        return metadata_int(self.metadata, self.name(key), default, minimum=minimum, maximum=maximum)

    def number(self, key: str, minimum: float, maximum: float, default: float | None = None) -> float | None:
        return metadata_float(self.metadata, self.name(key), default, minimum=minimum, maximum=maximum)

    def uniform(self, key: str, num_layers: int, maximum: int, default: int | None = None) -> int:
        """One value for all layers; an array with one per layer is accepted where all are the same."""
        values = metadata_int_per_layer(
            self.metadata,
            self.name(key),
            num_layers,
            REQUIRED if default is None else default,
            minimum=1,
            maximum=maximum,
        )
        if len(set(values)) != 1:
            raise BadInputError(
                f"the model's metadata key {self.name(key)!r} differs from layer to layer "
                f"({sorted(set(values))}), which is not supported"
            )
        return values[0]


def read_gguf_spec(metadata: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> ModelSpec:
    """See ``read_spec``."""
    architecture = gguf_architecture(metadata, "the file")
    keys = _Keys(metadata, architecture)
    num_layers = keys.integer("block_count", 1 << 31)
    limits.check_layers_exist(num_layers, keys.name("block_count"), tensors)
    hidden = keys.integer("embedding_length", limits.MAX_WIDTH)
    heads = keys.uniform("attention.head_count", num_layers, limits.MAX_HEADS)
    kv_heads = keys.uniform("attention.head_count_kv", num_layers, limits.MAX_HEADS, heads)
    head_dim = _head_dim(keys, hidden, heads)
    context = keys.integer("context_length", limits.MAX_CONTEXT)
    gemma = architecture in ("gemma2", "gemma3")
    windows = _windows(keys, architecture, num_layers)
    ropes = _ropes(keys, architecture, head_dim, context, tensors)
    layers = tuple(LayerSpec(window, len(ropes) - 1 if window is not None else 0) for window in windows)
    eps = metadata_float(metadata, keys.name("attention.layer_norm_rms_epsilon"), minimum=0.0, maximum=1.0)
    spec = ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=keys.uniform("feed_forward_length", num_layers, limits.MAX_FFN),
        vocab_size=_vocab_size(keys, metadata, tensors),
        context_length=context,
        rms_eps=eps,
        activation="gelu_tanh" if gemma else "silu",
        layers=layers,
        ropes=ropes,
        query_scale=_query_scale(keys, architecture, num_layers, hidden, heads, head_dim),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_softcap=_softcap(
            keys, "attn_logit_softcapping", 50.0 if architecture == "gemma2" else None
        ),
        final_softcap=_softcap(keys, "final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        # GGUF states no flag: a head that is absent is the embedding, one that is there is used.
        tied_embeddings="output.weight" not in tensors,
        norm_offset=0.0,  # converters add Gemma's 1
        permuted_qk=architecture == "llama",
        required_biases=("attn_q", "attn_k", "attn_v") if architecture == "qwen2" else (),
    )
    return limits.check_spec(spec)


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    computed = hidden // heads if hidden % heads == 0 else None
    key_length = keys.integer("attention.key_length", limits.MAX_HEAD_DIM, computed, minimum=2)
    value_length = keys.integer("attention.value_length", limits.MAX_HEAD_DIM, key_length, minimum=2)
    if key_length != value_length:
        raise BadInputError(
            f"{keys.name('attention.key_length')} {key_length} and {keys.name('attention.value_length')} "
            f"{value_length} differ, which no supported family has"
        )
    return key_length


def _vocab_size(keys: _Keys, metadata: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> int:
    rows = limits.vocab_rows(tensors)
    if rows is not None:
        return rows
    tokens = metadata.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, list | tuple) and tokens else None
    return keys.integer("vocab_size", limits.MAX_VOCAB, default)


def _softcap(keys: _Keys, key: str, default: float | None) -> float | None:
    """A cap of 0 is off."""
    return keys.number(key, 0.0, 1e9, default) or None


def _query_scale(
    keys: _Keys, architecture: str, num_layers: int, hidden: int, heads: int, head_dim: int
) -> float:
    stated = keys.number("attention.scale", 0.0, 1e6)
    if stated:
        return stated
    if _LAYERS_OF_27B.get(architecture) == num_layers:
        return float((hidden / heads) ** -0.5)
    return float(head_dim**-0.5)


def _windows(keys: _Keys, architecture: str, num_layers: int) -> list[int | None]:
    """Each layer's window: the period's last layer is global. Only families whose files mean it are asked.

    Other families' files may carry a window that was never in force; with a flag for each layer it is meant.
    """
    key = keys.name("attention.sliding_window_pattern")
    pattern = keys.metadata.get(key)
    if architecture not in ("gemma2", "gemma3", "phi3") and not isinstance(pattern, list | tuple):
        return [None] * num_layers
    default = 4096 if architecture == "gemma2" else 0
    window = keys.integer("attention.sliding_window", limits.MAX_CONTEXT, default, minimum=0) or None
    if architecture == "phi3":
        return [window] * num_layers
    if isinstance(pattern, list | tuple):
        if len(pattern) != num_layers or not all(flag in (0, 1) for flag in pattern):
            raise BadInputError(
                f"the model's metadata key {key!r} must state 0 or 1 for each of {num_layers} layers, "
                f"but it is {type_label(pattern)}"
            )
        return limits.windows_by_layer(window, [bool(flag) for flag in pattern])
    period = keys.integer("attention.sliding_window_pattern", 1 << 31, _SWA_PERIOD[architecture], minimum=0)
    # As llama.cpp: a period of 0 makes every layer sliding, 1 none.
    sliding = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    return limits.windows_by_layer(window, sliding)


def _ropes(
    keys: _Keys, architecture: str, head_dim: int, context: int, tensors: Mapping[str, TensorShape]
) -> tuple[RopeSpec, ...]:
    """The rope of the global layers and, for gemma3, that of the sliding ones, which is not scaled."""
    dims = keys.integer("rope.dimension_count", limits.MAX_HEAD_DIM, head_dim, minimum=2)
    base = keys.number("rope.freq_base", 1.0, limits.MAX_ROPE_BASE, 10_000.0) or 10_000.0
    factor = keys.number("rope.scaling.factor", 0.0, limits.MAX_FACTOR)
    if factor is None:
        factor = keys.number("rope.scale_linear", 0.0, limits.MAX_FACTOR)
    factor = factor or 1.0  # 0 stands for none
    scaling = metadata_str(keys.metadata, keys.name("rope.scaling.type"), "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise BadInputError(
            f"{keys.name('rope.scaling.type')} {scaling!r} is not supported; "
            "supported are none, linear, yarn and longrope"
        )
    original = keys.integer("rope.scaling.original_context_length", limits.MAX_CONTEXT, context)
    attention = keys.number("rope.scaling.attn_factor", limits.MIN_FACTOR, limits.MAX_FACTOR, 1.0) or 1.0
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        rope = RopeSpec(
            base=base,
            dims=dims,
            scaling="longrope",
            factor=context / original,
            original_context=original,
            attention_factor=attention,
        )
    elif scaling == "longrope" and tensors:
        raise BadInputError(
            f"{keys.name('rope.scaling.type')} is longrope, but tensor rope_factors_long.weight is missing"
        )
    elif scaling == "yarn" and factor != 1.0:
        rope = _yarn(keys, base, dims, factor, original, attention)
    elif scaling == "linear" and factor != 1.0:
        rope = RopeSpec(base=base, dims=dims, scaling="linear", factor=factor)
    else:
        rope = RopeSpec(base=base, dims=dims)
    if architecture != "gemma3":
        return (rope,)
    local = keys.number("rope.freq_base_swa", 1.0, limits.MAX_ROPE_BASE, 10_000.0) or 10_000.0
    return (rope, RopeSpec(base=local, dims=dims))


def _yarn(keys: _Keys, base: float, dims: int, factor: float, original: int, attention: float) -> RopeSpec:
    """attn_factor multiplies the paper's 0.1 ln(factor) + 1."""
    from math import log

    if keys.number("rope.scaling.yarn_ext_factor", -1.0, 1.0, 1.0) not in (1.0, -1.0):
        raise BadInputError(f"{keys.name('rope.scaling.yarn_ext_factor')} other than 1 is not supported")
    attention *= (
        keys.number("rope.scaling.yarn_attn_factor", limits.MIN_FACTOR, limits.MAX_FACTOR, 1.0) or 1.0
    )
    return RopeSpec(
        base=base,
        dims=dims,
        scaling="yarn",
        factor=factor,
        original_context=original,
        attention_factor=attention * (0.1 * log(factor) + 1.0 if factor > 1 else 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", limits.MIN_FACTOR, limits.MAX_FACTOR, 32.0)
        or 32.0,
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", limits.MIN_FACTOR, limits.MAX_FACTOR, 1.0)
        or 1.0,
    )
