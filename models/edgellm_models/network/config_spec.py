"""ModelSpec from a Hugging Face config.json: keys and defaults of the families' config classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_models.architectures import hf_architecture
from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import metadata_bool, metadata_float, metadata_int, metadata_str
from edgellm_models.network import spec_checks as limits
from edgellm_models.network.config_rope import FULL, SLIDING, read_ropes
from edgellm_models.network.spec import LayerSpec, ModelSpec, TensorShape


@dataclass(frozen=True)
class _Defaults:
    """What a family's config class assumes for an absent key; None means that the key must be there."""

    context: int
    eps: float = 1e-6
    vocab: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: hidden / heads."""
    window: int | None = None
    tied: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None


_DEFAULTS = {
    "llama": _Defaults(context=2048),
    "mistral": _Defaults(context=131072, kv_heads=8, window=4096),
    "qwen2": _Defaults(context=32768, window=4096),
    "qwen3": _Defaults(context=32768, head_dim=128, window=4096),
    "gemma2": _Defaults(
        context=8192,
        vocab=256000,
        hidden=2304,
        ffn=9216,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        window=4096,
        tied=True,
        attention_softcap=50.0,
        final_softcap=30.0,
    ),
    "gemma3": _Defaults(
        context=131072,
        vocab=262208,
        hidden=2304,
        ffn=9216,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        window=4096,
        tied=True,
    ),
    "phi3": _Defaults(context=4096, eps=1e-5),
}
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: multimodal configs nest it, with shared keys outside."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise BadInputError("config.json: text_config must be an object")
    inherited = {key: config[key] for key in ("tie_word_embeddings", "model_type") if key in config}
    return inherited | dict(nested)


def read_config_spec(config: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> ModelSpec:
    """See ``read_spec``."""
    family = hf_architecture(config, "config.json")
    config = text_config(config)
    defaults = _DEFAULTS[family]

    def size(key: str, default: int | None, maximum: int) -> int:
        if default is None:
            return metadata_int(config, key, minimum=1, maximum=maximum)
        return metadata_int(config, key, default, minimum=1, maximum=maximum)

    num_layers = size("num_hidden_layers", defaults.layers, 1 << 31)
    limits.check_layers_exist(num_layers, "num_hidden_layers", tensors)
    hidden = size("hidden_size", defaults.hidden, limits.MAX_WIDTH)
    heads = size("num_attention_heads", defaults.heads, limits.MAX_HEADS)
    # Absent and null differ: null asks for the computed value, whatever the class assumes.
    kv_default = heads if "num_key_value_heads" in config else defaults.kv_heads or heads
    kv_heads = size("num_key_value_heads", kv_default, limits.MAX_HEADS)
    head_dim = _head_dim(config, defaults, hidden, heads)
    context = size("max_position_embeddings", defaults.context, limits.MAX_CONTEXT)
    sliding, window = _sliding_layers(config, family, defaults, num_layers)
    ropes, rope_index = read_ropes(config, family, head_dim, context)
    layers = tuple(
        LayerSpec(window if is_sliding else None, rope_index[SLIDING if is_sliding else FULL])
        for is_sliding in sliding
    )
    gemma = family in ("gemma2", "gemma3")
    if gemma and metadata_bool(config, "use_bidirectional_attention", False):
        raise BadInputError(
            "config.json: use_bidirectional_attention is not supported: this is not a causal decoder"
        )
    scale_base: float = head_dim
    if gemma:
        scale_base = metadata_float(config, "query_pre_attn_scalar", 256.0, minimum=1e-6, maximum=1e9)
    spec = ModelSpec(
        architecture=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=size("intermediate_size", defaults.ffn, limits.MAX_FFN),
        vocab_size=_vocab_size(config, defaults, tensors),
        context_length=context,
        rms_eps=metadata_float(config, "rms_norm_eps", defaults.eps, minimum=0.0, maximum=1.0),
        activation=_activation(config, gemma),
        layers=layers,
        ropes=ropes,
        query_scale=scale_base**-0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_softcap=_softcap(config, "attn_logit_softcapping", defaults.attention_softcap)
        if gemma
        else None,
        final_softcap=_softcap(config, "final_logit_softcapping", defaults.final_softcap) if gemma else None,
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        tied_embeddings=_tied(config, defaults, tensors),
        norm_offset=1.0 if gemma else 0.0,
        required_biases=_required_biases(config, family),
    )
    return limits.check_spec(spec)


def _head_dim(config: Mapping[str, Any], defaults: _Defaults, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return metadata_int(config, "head_dim", minimum=2, maximum=limits.MAX_HEAD_DIM)
    if "head_dim" not in config and defaults.head_dim is not None:
        return defaults.head_dim
    if hidden % heads:
        raise BadInputError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    return hidden // heads


def _vocab_size(config: Mapping[str, Any], defaults: _Defaults, tensors: Mapping[str, TensorShape]) -> int:
    rows = limits.vocab_rows(tensors)
    if rows is None and defaults.vocab is None:
        return metadata_int(config, "vocab_size", minimum=1, maximum=limits.MAX_VOCAB)
    default = rows if rows is not None else defaults.vocab
    stated: int | None = metadata_int(config, "vocab_size", default, minimum=1, maximum=limits.MAX_VOCAB)
    assert stated is not None
    if rows is not None and rows != stated:
        raise BadInputError(
            f"tensor token_embd.weight has {rows} rows, but vocab_size in config.json is {stated}"
        )
    return stated


def _activation(config: Mapping[str, Any], gemma: bool) -> str:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    name = metadata_str(config, key, default)
    if name in ("silu", "swish"):
        return "silu"
    if name in _GELU_TANH:
        return "gelu_tanh"
    raise BadInputError(
        f"config.json: {key} {name!r} is not supported; supported are silu and gelu_pytorch_tanh"
    )


def _softcap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Absent takes the family's default, null switches the cap off."""
    if key in config:
        default = None
    return metadata_float(config, key, default, minimum=1e-3, maximum=1e9)


def _sliding_layers(
    config: Mapping[str, Any], family: str, defaults: _Defaults, num_layers: int
) -> tuple[list[bool], int | None]:
    """Which layers see a window, and its width."""
    if family == "llama":
        return [False] * num_layers, None
    window = metadata_int(
        config,
        "sliding_window",
        None if "sliding_window" in config else defaults.window,
        minimum=1,
        maximum=limits.MAX_CONTEXT,
    )
    if family in ("qwen2", "qwen3") and not metadata_bool(config, "use_sliding_window", False):
        window = None
    if family in ("mistral", "phi3"):
        return [window is not None] * num_layers, window
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or not all(kind in (FULL, SLIDING) for kind in kinds):
            raise BadInputError(f"config.json: layer_types must be a list of {FULL!r} and {SLIDING!r}")
        if len(kinds) != num_layers:
            raise BadInputError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
        sliding = [kind == SLIDING for kind in kinds]
    elif family in ("qwen2", "qwen3"):
        first = metadata_int(config, "max_window_layers", 28, minimum=0, maximum=1 << 31)
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
    else:
        period = 2
        if family == "gemma3":
            period = metadata_int(config, "sliding_window_pattern", 6, minimum=1, maximum=1 << 31)
        sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if any(sliding) and window is None:
        raise BadInputError(
            "config.json: layer_types names sliding_attention layers, but there is no sliding_window"
        )
    return sliding, window


def _tied(config: Mapping[str, Any], defaults: _Defaults, tensors: Mapping[str, TensorShape]) -> bool:
    """As the config says; where it says nothing, as the family's class does or as the missing head proves."""
    if config.get("tie_word_embeddings") is not None:
        return metadata_bool(config, "tie_word_embeddings")
    return defaults.tied or bool(tensors and "output.weight" not in tensors)


def _required_biases(config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    if family == "qwen2":
        return ("attn_q", "attn_k", "attn_v")
    names: tuple[str, ...] = ()
    if family in ("llama", "qwen3", "gemma2", "gemma3") and metadata_bool(config, "attention_bias", False):
        names += ("attn_q", "attn_k", "attn_v", "attn_output")
    if family == "llama" and metadata_bool(config, "mlp_bias", False):
        names += ("ffn_gate", "ffn_up", "ffn_down")
    return names
