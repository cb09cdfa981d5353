"""The small files of a Hugging Face folder made from a GGUF: config.json, tokenizer, templates, sampling."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec, RopeSpec
    from edgellm_models.tokenizer.shared import SharedTokenizer

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
_LLAMA3_FACTORS = (8.0, 32.0)
"""Llama 3.1 and 3.2: their other parameters are the same."""
_LLAMA3_CONTEXT = 8192


def config_from_gguf(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """config.json of a GGUF's model. BadInputError where its numbers cannot be said there.

    What is returned is read back and compared with ``spec``: nothing of the model's arithmetic is lost.
    """
    class_name, model_type = _CLASSES[spec.architecture]
    gemma = spec.architecture in ("gemma2", "gemma3")
    keys = checkpoint.metadata
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": float(f"{spec.rms_eps:.7g}"),  # an f32 of the file: 1e-05, not 9.99999974e-06
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }
    activation = "gelu_pytorch_tanh" if spec.activation == "gelu_tanh" else "silu"
    config["hidden_activation" if gemma else "hidden_act"] = activation
    for kind in ("bos", "eos", "pad"):
        key = {"pad": "padding"}.get(kind, kind)
        value = keys.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{kind}_token_id"] = value if isinstance(value, int) else None
    config |= _ropes(checkpoint, spec) | _windows(spec)
    biases = {name.split(".")[-2] for name in checkpoint.tensors() if name.endswith(".bias")}
    if spec.architecture in ("llama", "qwen3", "gemma2", "gemma3"):
        config["attention_bias"] = "attn_q" in biases
    if spec.architecture == "llama":
        config["mlp_bias"] = "ffn_down" in biases
    if gemma:
        config |= {
            "query_pre_attn_scalar": _scalar(spec.query_scale),
            "attn_logit_softcapping": spec.attention_softcap,
            "final_logit_softcapping": spec.final_softcap,
        }
    _check(config, spec, checkpoint)
    return config


def _scalar(query_scale: float) -> float:
    value = query_scale**-2
    return round(value) if abs(value - round(value)) < 1e-3 else value


def _windows(spec: ModelSpec) -> dict[str, Any]:
    window = next((layer.window for layer in spec.layers if layer.window is not None), None)
    if spec.architecture == "llama":
        return {}
    found: dict[str, Any] = {"sliding_window": window}
    if spec.architecture in ("gemma2", "gemma3"):
        kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers]
        found["layer_types"] = kinds
    elif spec.architecture in ("qwen2", "qwen3"):
        found["use_sliding_window"] = False
    return found


def _ropes(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    rope = spec.ropes[0]
    config: dict[str, Any] = {"rope_theta": _whole(rope.base), "rope_scaling": None}
    if rope.dims != spec.head_dim:
        config["partial_rotary_factor"] = rope.dims / spec.head_dim
    if spec.architecture == "gemma3":
        config["rope_local_base_freq"] = _whole(spec.ropes[-1].base)
    if "rope_freqs.weight" in checkpoint.tensors():
        config["rope_scaling"] = _llama3(rope, checkpoint.vector("rope_freqs.weight").tolist())
    elif rope.scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    elif rope.scaling == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    elif rope.scaling == "longrope":
        config["original_max_position_embeddings"] = rope.original_context
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": checkpoint.vector("rope_factors_long.weight").tolist(),
            "short_factor": checkpoint.vector("rope_factors_short.weight").tolist(),
        }
    elif rope.scaling != "none":
        raise BadInputError(f"the rotary scaling {rope.scaling} of this GGUF is not written as a config.json")
    return config


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _llama3(rope: RopeSpec, divisors: Sequence[float]) -> dict[str, Any]:
    """The parameters whose divisors these are (a GGUF keeps the divisors only)."""
    for factor in _LLAMA3_FACTORS:
        wanted = []
        for index in range(rope.dims // 2):
            waves = _LLAMA3_CONTEXT * rope.base ** (-2 * index / rope.dims) / (2 * math.pi)
            smooth = min(max((waves - 1.0) / (4.0 - 1.0), 0.0), 1.0)
            wanted.append(1.0 / ((1.0 - smooth) / factor + smooth))
        if len(divisors) == len(wanted) and all(
            abs(ours - theirs) <= 1e-3 * theirs for ours, theirs in zip(wanted, divisors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise BadInputError(
        "rope_freqs.weight of this GGUF is not the table of Llama 3.1 or 3.2; config.json cannot state it: "
        "quantize from the Hugging Face folder instead"
    )


def _check(config: Mapping[str, Any], spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """The config reads back as the same network."""
    from edgellm_models.network import read_spec

    found = read_spec("safetensors", config, checkpoint.tensors())
    same = replace(
        found,
        permuted_qk=spec.permuted_qk,
        norm_offset=spec.norm_offset,
        required_biases=spec.required_biases,
        ropes=spec.ropes,
        layers=spec.layers,
        rms_eps=spec.rms_eps,
        query_scale=spec.query_scale,
        embedding_scale=spec.embedding_scale,
    )
    close = all(
        math.isclose(getattr(found, name), getattr(spec, name), rel_tol=1e-5)
        for name in ("rms_eps", "query_scale", "embedding_scale")
    )
    windows = [layer.window for layer in found.layers] == [layer.window for layer in spec.layers]
    bases = all(
        math.isclose(found.ropes[ours.rope].base, spec.ropes[theirs.rope].base, rel_tol=1e-6)
        and found.ropes[ours.rope].dims == spec.ropes[theirs.rope].dims
        for ours, theirs in zip(found.layers, spec.layers, strict=True)
    )
    if same != spec or not (close and windows and bases):
        raise BadInputError("the numbers of this GGUF cannot be stated in a config.json of its family")


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> None:
    """tokenizer.json or tokenizer.model, tokenizer_config.json, chat template and generation_config.json."""
    from edgellm_models.tokenizer import load_tokenizer
    from edgellm_models.tokenizer.shared import SharedTokenizer

    keys = checkpoint.metadata
    tokenizer = load_tokenizer(checkpoint.path, "gguf", keys)
    assert isinstance(tokenizer, SharedTokenizer)
    config: dict[str, Any] = {
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unk_id}
    for kind, token_id in ids.items():
        config[f"{kind}_token"] = None if token_id is None else tokenizer.token_text(token_id)
    if keys.get("tokenizer.ggml.model") == "gpt2":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer.json").write_text(_bpe_json(tokenizer), encoding="utf-8")
    else:
        gemma = str(keys.get("general.architecture", "")).startswith("gemma")
        config["tokenizer_class"] = "GemmaTokenizer" if gemma else "LlamaTokenizer"
        config["legacy"] = False
        config["added_tokens_decoder"] = _added_tokens(keys)
        (folder / "tokenizer.model").write_bytes(_sentencepiece(keys, tokenizer.unk_id))
        (folder / "tokenizer.json").write_text(_sentencepiece_json(keys, tokenizer), encoding="utf-8")
    template = keys.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    generation: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    generation["pad_token_id"] = tokenizer.pad_id
    generation = {key: value for key, value in generation.items() if value not in (None, [])}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _bpe_json(tokenizer: SharedTokenizer) -> str:
    from edgellm_models.tokenizer.bpe_tokenizer import BpeTokenizer

    assert isinstance(tokenizer, BpeTokenizer)
    return tokenizer.pipeline_json()


def _added_tokens(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens that are found in a text before it is cut into pieces."""
    from edgellm_models.tokenizer.sentencepiece_proto import CONTROL, UNKNOWN, USER_DEFINED

    types = list(keys.get("tokenizer.ggml.token_type", ()))
    texts = list(keys["tokenizer.ggml.tokens"])
    return {
        str(index): {
            "content": texts[index],
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": int(kind) != USER_DEFINED,
        }
        for index, kind in enumerate(types)
        if int(kind) in (CONTROL, UNKNOWN, USER_DEFINED)
    }


def _sentencepiece_json(keys: Mapping[str, Any], tokenizer: SharedTokenizer) -> str:
    """tokenizer.json beside the model file: transformers reads it without further libraries."""
    from edgellm_models.tokenizer.sentencepiece_proto import BYTE, NORMAL, UNKNOWN
    from edgellm_quantize.spm_tokenizer_json import tokenizer_json

    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(map(str, keys["tokenizer.ggml.tokens"]))]
    types = [int(kind) for kind in keys.get("tokenizer.ggml.token_type", [1] * len(texts))]
    unk_id = tokenizer.unk_id
    if unk_id is None:
        unk_id = next((index for index, kind in enumerate(types) if kind == UNKNOWN), 0)
    added = {int(index): entry["special"] for index, entry in _added_tokens(keys).items()}
    return tokenizer_json(
        texts,
        [float(score) for score in keys["tokenizer.ggml.scores"]],
        added,
        [index for index, kind in enumerate(types) if kind == NORMAL],
        unk_id=unk_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        byte_fallback=types.count(BYTE) == 256,
        space_prefix=bool(keys.get("tokenizer.ggml.add_space_prefix", True)),
    )


def _sentencepiece(keys: Mapping[str, Any], unk_id: int | None) -> bytes:
    """The model file: the GGUF's own pieces, scores and types."""
    from edgellm_models.tokenizer import sentencepiece_proto as proto

    texts = [str(text) for text in keys["tokenizer.ggml.tokens"]]
    scores = [float(score) for score in keys["tokenizer.ggml.scores"]]
    types = [int(kind) for kind in keys.get("tokenizer.ggml.token_type", [1] * len(texts))]
    if unk_id is None:
        unk_id = next((index for index, kind in enumerate(types) if kind == proto.UNKNOWN), 0)
    types[unk_id] = proto.UNKNOWN
    kinds = [
        proto.CONTROL if kind == proto.UNKNOWN and index != unk_id else kind
        for index, kind in enumerate(types)
    ]
    named = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
    trainer, normalizer = proto.bpe_specs(unk_id, types.count(proto.BYTE) == 256)
    prefix = bool(keys.get("tokenizer.ggml.add_space_prefix", True))
    normalizer += bytes((0x18, prefix))  # field 3, add_dummy_prefix: the later value counts
    return proto.write_model(named, scores, kinds, trainer, normalizer, keep_normalizer=True)
