"""The hyper-parameters of a dense model as GGUF metadata, with the rotary tables that become tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.network.spec import ModelSpec, RopeSpec
from edgellm_quantize.gguf_values import GGUFValue, MetadataTable, array, f32, text, u32

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}
"""general.file_type of the dense types (llama.h, llama_ftype)."""
_LLAMA_FAMILIES = ("llama", "mistral")
_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


@dataclass
class ModelFields:
    """What a model's configuration becomes in a GGUF file."""

    metadata: MetadataTable = field(default_factory=dict)
    rope_tables: dict[str, list[float]] = field(default_factory=dict)
    """Tensor name to f32 values: rope_freqs.weight or rope_factors_{long,short}.weight."""
    query_gain: float = 1.0
    """Factor for the query projection where the loaders' own query scale differs from the model's."""
    notices: list[Notice] = field(default_factory=list)


def gguf_architecture(spec: ModelSpec) -> str:
    """general.architecture: GGUF has no mistral, it is a llama there."""
    return "llama" if spec.architecture in _LLAMA_FAMILIES else spec.architecture


def permutes_qk(spec: ModelSpec) -> bool:
    """Whether q and k rows go into interleaved rotary order (GGUF's llama)."""
    return spec.architecture in _LLAMA_FAMILIES and not spec.permuted_qk


def model_fields(spec: ModelSpec, *, name: str, dtype: str) -> ModelFields:
    """Metadata of a Hugging Face model read as ``spec``. BadInputError where GGUF cannot express it."""
    arch = gguf_architecture(spec)
    out = ModelFields()
    out.metadata = {
        "general.architecture": text(arch),
        "general.type": text("model"),
        "general.name": text(name),
        "general.file_type": u32(FILE_TYPES[dtype]),
        "general.quantization_version": u32(2),
    }

    def put(key: str, value: GGUFValue) -> None:
        out.metadata[f"{arch}.{key}"] = value

    put("block_count", u32(spec.num_layers))
    put("context_length", u32(spec.context_length))
    put("embedding_length", u32(spec.hidden_size))
    put("feed_forward_length", u32(spec.ffn_size))
    put("vocab_size", u32(spec.vocab_size))
    put("attention.head_count", u32(spec.num_heads))
    put("attention.head_count_kv", u32(spec.num_kv_heads))
    put("attention.key_length", u32(spec.head_dim))
    put("attention.value_length", u32(spec.head_dim))
    put("attention.layer_norm_rms_epsilon", f32(spec.rms_eps))
    if spec.attention_softcap is not None:
        put("attn_logit_softcapping", f32(spec.attention_softcap))
    if spec.final_softcap is not None:
        put("final_logit_softcapping", f32(spec.final_softcap))
    _put_windows(spec, arch, put, out)
    _put_ropes(spec, arch, put, out)
    _check_activation(spec)
    out.query_gain = _query_gain(spec, out)
    return out


def _check_activation(spec: ModelSpec) -> None:
    expected = "gelu_tanh" if spec.architecture in ("gemma2", "gemma3") else "silu"
    if spec.activation != expected:
        raise BadInputError(
            f"a GGUF {spec.architecture} model has the activation {expected}, this one has {spec.activation}"
        )


def _put_windows(spec: ModelSpec, arch: str, put: Callable[[str, GGUFValue], None], out: ModelFields) -> None:
    windows = {layer.window for layer in spec.layers}
    limited = windows - {None}
    if len(limited) > 1:
        raise BadInputError(f"GGUF has one sliding window per model, this one has {sorted(limited, key=str)}")
    window = next(iter(limited), None)
    sliding = [layer.window is not None for layer in spec.layers]
    if arch == "phi3":
        # A window of 0 marks the models without one (Phi-4).
        put("attention.sliding_window", u32(window or 0))
    elif window is not None:
        put("attention.sliding_window", u32(window))
    period = _WINDOW_PERIODS.get(arch)
    if period is not None:
        if sliding != [(index + 1) % period != 0 for index in range(spec.num_layers)]:
            put("attention.sliding_window_pattern", array("BOOL", sliding))
    elif window is not None:
        if arch != "phi3":
            put("attention.sliding_window_pattern", array("BOOL", sliding))
        if window < spec.context_length:
            out.notices.append(
                Notice(
                    "sliding_window_ignored",
                    f"the sliding window of {window} tokens is in the file, but llama.cpp ignores it for "
                    f"{arch} models: its answers differ once a text is longer",
                )
            )


def _put_ropes(spec: ModelSpec, arch: str, put: Callable[[str, GGUFValue], None], out: ModelFields) -> None:
    rope = spec.ropes[0]
    if arch == "gemma3":
        local = spec.ropes[-1]
        if local.scaling != "none" and local is not rope:
            raise BadInputError(
                f"GGUF cannot scale the rope of sliding layers, this model has {local.scaling}"
            )
        put("rope.freq_base_swa", f32(local.base))
    elif len({layer.rope for layer in spec.layers}) > 1:
        raise BadInputError(
            f"GGUF has one rope for all layers of a {arch} model, this one has {len(spec.ropes)}"
        )
    put("rope.dimension_count", u32(rope.dims))
    put("rope.freq_base", f32(rope.base))
    if arch == "phi3":
        put("rope.scaling.original_context_length", u32(rope.original_context or spec.context_length))
    if rope.scaling == "linear":
        put("rope.scaling.type", text("linear"))
        put("rope.scaling.factor", f32(rope.factor))
    elif rope.scaling == "dynamic":
        out.notices.append(
            Notice(
                "rope_scaling_dropped",
                f"dynamic rope scaling (factor {rope.factor:g}) cannot be written: the file is right up to "
                f"{spec.context_length} tokens, beyond which the original model rescales",
            )
        )
    elif rope.scaling == "yarn":
        _put_yarn(rope, put, out)
    elif rope.scaling == "longrope":
        put("rope.scaling.type", text("longrope"))
        put("rope.scaling.original_context_length", u32(rope.original_context or spec.context_length))
        put("rope.scaling.attn_factor", f32(_longrope_attention(rope, spec.context_length)))
        out.rope_tables["rope_factors_long.weight"] = list(rope.long_factors)
        out.rope_tables["rope_factors_short.weight"] = list(rope.short_factors)
    elif rope.scaling == "llama3":
        if arch != "llama":
            raise BadInputError(f"llama3 rope scaling is known of GGUF's llama models only, not of {arch}")
        out.rope_tables["rope_freqs.weight"] = llama3_divisors(rope)


def _put_yarn(rope: RopeSpec, put: Callable[[str, GGUFValue], None], out: ModelFields) -> None:
    if not rope.truncate:
        raise BadInputError("yarn rope scaling with truncate false cannot be written to GGUF")
    if rope.original_context is None:
        raise BadInputError("yarn rope scaling without original_max_position_embeddings")
    put("rope.scaling.type", text("yarn"))
    put("rope.scaling.factor", f32(rope.factor))
    put("rope.scaling.original_context_length", u32(rope.original_context))
    if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
        put("rope.scaling.yarn_beta_fast", f32(rope.beta_fast))
        put("rope.scaling.yarn_beta_slow", f32(rope.beta_slow))
        out.notices.append(
            Notice(
                "yarn_betas_ignored",
                f"yarn's beta_fast {rope.beta_fast:g} and beta_slow {rope.beta_slow:g} are in the file, but "
                f"llama.cpp takes 32 and 1 for these families",
            )
        )

    def strength(mscale: float) -> float:
        """YaRN's attention temperature (Peng et al. 2023, eq. 22)."""
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    attention = rope.attention_factor
    if attention is None and rope.mscale and rope.mscale_all_dim:
        attention = strength(rope.mscale) / strength(rope.mscale_all_dim)
    if attention is not None and not math.isclose(attention, strength(1.0)):
        # Loaders multiply this with the paper's value.
        put("rope.scaling.attn_factor", f32(attention / strength(1.0)))


def _longrope_attention(rope: RopeSpec, context: int) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = rope.original_context or context
    scale = context / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def llama3_divisors(rope: RopeSpec) -> list[float]:
    """Divisor of each inverse frequency under llama3 scaling: 1 for short waves, factor for long ones."""
    assert rope.original_context is not None
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    divisors = []
    for index in range(rope.dims // 2):
        wavelength = 2 * math.pi * rope.base ** (2 * index / rope.dims)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope.factor)
        else:
            smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            divisors.append(1.0 / ((1.0 - smooth) / rope.factor + smooth))
    return divisors


def _query_gain(spec: ModelSpec, out: ModelFields) -> float:
    """What the query weights are multiplied with so that the loaders' fixed query scale gives the model's.

    GGUF states no query scale for these families: loaders take 1/sqrt(head_dim), and for the layer counts of
    the 27B Gemmas 1/sqrt(hidden / heads).
    """
    if _LAYERS_OF_27B.get(spec.architecture) == spec.num_layers:
        loaded = 1 / math.sqrt(spec.hidden_size // spec.num_heads)
    else:
        loaded = 1 / math.sqrt(spec.head_dim)
    gain = spec.query_scale / loaded
    if math.isclose(gain, 1.0, rel_tol=1e-6):
        return 1.0
    where = "query norm" if spec.qk_norm else "query projection"
    out.notices.append(
        Notice(
            "query_scale_folded",
            f"the query scale {spec.query_scale:g} is not the one that loaders assume ({loaded:g}): "
            f"the factor {gain:g} was folded into the {where} weights",
        )
    )
    return gain
