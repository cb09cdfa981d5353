"""The independent answer: a GGUF's weights, decoded by gguf, in the family's transformers class in f32.

Shares no code with the project: metadata and blocks are read with the gguf package, names and the row order
of q and k follow llama.cpp's converter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.oracles import require_oracle

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def transformers_model(source: Path) -> Any:
    """The f32 model of a GGUF file or a Hugging Face folder, in eager attention, ready to run."""
    AutoModelForCausalLM = require_oracle("transformers").AutoModelForCausalLM

    if source.is_dir():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        return model.eval()
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, {tensor.name for tensor in reader.tensors}, reader)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {}
    for tensor in reader.tensors:
        name = _name(tensor.name, config.model_type)
        if name is not None:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            state[name] = torch.from_numpy(_as_stored_by_transformers(values, tensor.name, fields))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if "lm_head.weight" in missing:
        missing.remove("lm_head.weight")
        model.lm_head.weight = model.model.embed_tokens.weight
    assert not missing and not unexpected, (missing, unexpected)
    if hasattr(config, "rope_freqs"):
        model.model.rotary_emb.inv_freq /= torch.tensor(config.rope_freqs)
    return model.eval()


def transformers_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits f32 [len(ids), vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def greedy(model: Any, ids: Sequence[int], count: int) -> tuple[list[int], list[bool]]:
    """``count`` greedy ids after a prompt, and for each whether it is a tie (see is_tie)."""
    out: list[int] = []
    ties: list[bool] = []
    # Newer versions call past_key_values cache.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    step, cache = torch.tensor([list(ids)]), None
    with torch.no_grad():
        for _ in range(count):
            result = model(step, use_cache=True, logits_to_keep=1, **{name: cache})
            cache = getattr(result, name)
            logits = result.logits[0, -1]
            ties.append(is_tie(logits))
            out.append(int(logits.argmax()))
            step = torch.tensor([[out[-1]]])
    return out, ties


def is_tie(logits: torch.Tensor) -> bool:
    """Whether the two best logits lie within 1e-4 of the largest logit's size."""
    first, second = logits.topk(2).values.tolist()
    return bool(first - second < 1e-4 * float(logits.abs().max()))


def _name(name: str, model_type: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    if not stem.startswith("blk."):
        return None  # factor tables belong to the config
    _, layer, part = stem.split(".")
    names = dict(_LAYER_NAMES)
    if model_type.startswith("gemma"):
        names |= _GEMMA_NAMES
    if model_type == "phi3":
        names["ffn_up"] = "mlp.gate_up_proj"
    return f"model.layers.{layer}.{names[part]}.{kind}"


def _as_stored_by_transformers(values: np.ndarray, name: str, fields: dict[str, Any]) -> np.ndarray:
    architecture = fields["general.architecture"]
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values - 1.0
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = fields["llama.attention.head_count"]
        if part == "attn_k":
            heads = fields.get("llama.attention.head_count_kv", heads)
        # The converter turned [heads, 2, half, ...] into [heads, half, 2, ...].
        rest = values.shape[1:]
        by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest)
        return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)
    return values


def _config(fields: dict[str, Any], names: set[str], reader: Any) -> Any:
    from transformers import AutoConfig

    architecture = fields["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = get("attention.head_count")
    hidden = get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    model_type = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    config: dict[str, Any] = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in names,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    theta = get("rope.freq_base", 10000.0)
    if architecture == "gemma3":
        full = {"rope_type": "default", "rope_theta": theta}
        if get("rope.scaling.factor"):
            full = {"rope_type": "linear", "rope_theta": theta, "factor": get("rope.scaling.factor")}
        local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    elif get("rope.scaling.type") in ("linear", "yarn"):
        rope = {
            "rope_type": get("rope.scaling.type"),
            "rope_theta": theta,
            "factor": get("rope.scaling.factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
        config["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if architecture.startswith("gemma"):
        scale = head_dim
        if get("block_count") == {"gemma2": 46, "gemma3": 62}[architecture]:
            scale = hidden // heads
        config |= {
            "query_pre_attn_scalar": scale,
            "sliding_window": get("attention.sliding_window", 4096),
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": get(
                "attn_logit_softcapping", 50.0 if architecture == "gemma2" else None
            ),
            "final_logit_softcapping": get(
                "final_logit_softcapping", 30.0 if architecture == "gemma2" else None
            ),
        }
        period = 2 if architecture == "gemma2" else 6
        config["layer_types"] = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention"
            for i in range(get("block_count"))
        ]
    elif architecture == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in names or "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
        if "rope_freqs.weight" in names:
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    elif architecture == "phi3":
        config["sliding_window"] = get("attention.sliding_window") or None
        dims = get("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = dims / head_dim
        config["original_max_position_embeddings"] = get(
            "rope.scaling.original_context_length", get("context_length")
        )
        if "rope_factors_long.weight" in names:
            config["rope_parameters"] = {
                "rope_type": "longrope",
                "rope_theta": theta,
                "partial_rotary_factor": dims / head_dim,
                "long_factor": tensors["rope_factors_long.weight"].data.tolist(),
                "short_factor": tensors["rope_factors_short.weight"].data.tolist(),
                "attention_factor": get("rope.scaling.attn_factor", 1.0),
            }
        else:
            config["rope_parameters"]["partial_rotary_factor"] = dims / head_dim
    made = AutoConfig.for_model(model_type, **config)
    if "rope_freqs.weight" in names:
        # transformers has no such table: transformers_model divides the frequencies of the finished model.
        made.rope_freqs = tensors["rope_freqs.weight"].data.tolist()
    return made
