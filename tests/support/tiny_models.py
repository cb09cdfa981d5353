"""Random-weight models of the seven families as complete Hugging Face folders, written without transformers.

TINY (hidden 64) and TINYQ (hidden 256, ffn 512: rows of whole 256-weight blocks). The head is scaled so that
logits have a standard deviation of about 10: the best token leads widely and greedy output is stable against
rounding.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_tokenizers import DEFAULT_TEMPLATE, TinyTokenizer, make_tokenizer

ARCHITECTURES: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
_TOKENIZERS = {
    "llama": "llama3",
    "mistral": "spm_mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "gemma2": "spm_gemma",
    "gemma3": "spm_gemma",
    "phi3": "spm_phi3",
}
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
LOGIT_STD = 10.0


def tiny_config(
    arch: str, tokenizer: TinyTokenizer, *, quantizable: bool, **overrides: Any
) -> dict[str, Any]:
    """config.json of a family at fixture size; ``overrides`` are config keys and win, None included."""
    if arch not in _CLASSES:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    class_name, model_type = _CLASSES[arch]
    gemma = arch in ("gemma2", "gemma3")
    # Head widths differ from hidden / heads where the real families' do (Qwen3, Gemma).
    head_dim = 64 if quantizable else (32 if arch in ("qwen3", "gemma2", "gemma3") else 16)
    if quantizable and arch in ("qwen3", "gemma2", "gemma3"):
        head_dim = 128
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 256 if quantizable else 64,
        "intermediate_size": 512 if quantizable else 128,
        # Gemma 3's sixth layer is its first global one.
        "num_hidden_layers": {"gemma2": 4, "gemma3": 6}.get(arch, 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6 if gemma or arch.startswith("qwen") else 1e-5,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": gemma,
        "use_cache": True,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "transformers_version": "4.56.0",
    }
    if gemma:
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            "sliding_window": 16,
            "attention_bias": False,
            "attn_logit_softcapping": 50.0 if arch == "gemma2" else None,
            "final_logit_softcapping": 30.0 if arch == "gemma2" else None,
        }
        if arch == "gemma3":
            config |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
        pattern = 2 if arch == "gemma2" else 6
        layers = overrides.get("num_hidden_layers", config["num_hidden_layers"])
        config["layer_types"] = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
        ]
    else:
        config["hidden_act"] = "silu"
    if arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "rope_theta": 500000.0}
    elif arch == "mistral":
        config |= {"sliding_window": None}
    elif arch in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
        config |= {"rope_theta": 1000000.0, "attention_bias": False} if arch == "qwen3" else {}
    elif arch == "phi3":
        config |= {
            "original_max_position_embeddings": 2048,
            "partial_rotary_factor": 1.0,
            "rope_scaling": None,
            "sliding_window": None,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        }
    return config | overrides


class _Weights:
    """Draws named tensors; each name has its own stream, so one override leaves the others alone."""

    def __init__(self, seed: int, hidden: int) -> None:
        self.seed = seed
        # 0.3 at hidden 64, and the same spread of activations at other widths.
        self.std = 0.3 * (64 / hidden) ** 0.5
        self.tensors: dict[str, torch.Tensor] = {}

    def draw(self, name: str, *shape: int, std: float, mean: float = 0.0, signs: bool = False) -> None:
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        values = mean + std * rng.standard_normal(shape)
        if signs:
            values *= rng.choice([-1.0, 1.0], shape)
        self.tensors[name] = torch.from_numpy(values.astype(np.float32))

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.draw(f"{name}.weight", rows, columns, std=self.std)
        if bias:
            self.draw(f"{name}.bias", rows, std=self.std)


def tiny_tensors(config: dict[str, Any], *, seed: int = 0, head: str = "auto") -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, f32. ``head``: auto (absent when tied), present or absent."""
    arch = {model_type: arch for arch, (_, model_type) in _CLASSES.items()}[config["model_type"]]
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    gemma = arch in ("gemma2", "gemma3")
    gain = 0.0 if gemma else 1.0
    out = _Weights(seed, hidden)
    head_std = LOGIT_STD / hidden**0.5
    tied = bool(config.get("tie_word_embeddings"))
    out.draw("model.embed_tokens.weight", vocab, hidden, std=head_std if tied else 0.3)
    qkv_bias = arch == "qwen2" or bool(config.get("attention_bias"))
    output_bias = bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            # Gemma's post-norms set how much a sub-layer adds to the scaled embedding.
            loud = gemma and norm in ("post_attention_layernorm", "post_feedforward_layernorm")
            out.draw(f"{layer}.{norm}.weight", hidden, std=0.2, mean=6.0 if loud else gain)
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if arch == "phi3":
            out.linear(f"{attention}.qkv_proj", (heads + 2 * kv_heads) * head_dim, hidden)
            out.linear(f"{mlp}.gate_up_proj", 2 * ffn, hidden)
        else:
            out.linear(f"{attention}.q_proj", heads * head_dim, hidden, bias=qkv_bias)
            out.linear(f"{attention}.k_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
            out.linear(f"{attention}.v_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
            out.linear(f"{mlp}.gate_proj", ffn, hidden, bias=mlp_bias)
            out.linear(f"{mlp}.up_proj", ffn, hidden, bias=mlp_bias)
        out.linear(f"{attention}.o_proj", hidden, heads * head_dim, bias=output_bias)
        out.linear(f"{mlp}.down_proj", hidden, ffn, bias=mlp_bias)
        if arch in ("qwen3", "gemma3"):
            for norm in ("q_norm", "k_norm"):
                out.draw(f"{attention}.{norm}.weight", head_dim, std=0.2, mean=gain)
    # Gains of both signs keep a tied head from answering every token with itself.
    out.draw("model.norm.weight", hidden, std=0.2, mean=1.0, signs=True)
    if gemma:
        out.tensors["model.norm.weight"] -= 1.0
    if head == "present" or (head == "auto" and not tied):
        if tied:
            out.tensors["lm_head.weight"] = out.tensors["model.embed_tokens.weight"].clone()
        else:
            out.draw("lm_head.weight", vocab, hidden, std=head_std)
    return out.tensors


def write_safetensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write model.safetensors, or ``shards`` files with their index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make_tiny(
    arch: str,
    folder: Path,
    *,
    quantizable: bool = False,
    tokenizer: str | None = None,
    dtype: str = "f32",
    shards: int = 1,
    seed: int = 0,
    head: str = "auto",
    chat_template: Any = DEFAULT_TEMPLATE,
    extra_tokens: Sequence[tuple[str, bool]] = (),
    generation_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a TINY (or with ``quantizable`` a TINYQ) model into ``folder`` and return the folder.

    ``tokenizer`` is one of tiny_tokenizers.STYLES; ``head`` auto, present or absent (field report D06); every
    other keyword is a config.json key. The same arguments always give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = make_tokenizer(
        tokenizer or _TOKENIZERS.get(arch, "llama3"), chat_template=chat_template, extra_tokens=extra_tokens
    )
    config = tiny_config(arch, words, quantizable=quantizable, **overrides)
    config["torch_dtype"] = _DTYPE_NAMES[dtype]
    tensors = {
        name: tensor.to(_DTYPES[dtype]).contiguous()
        for name, tensor in tiny_tensors(config, seed=seed, head=head).items()
    }
    write_model_folder(folder, config, tensors, words, shards=shards, generation_config=generation_config)
    return folder


def write_model_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    words: TinyTokenizer,
    *,
    shards: int = 1,
    generation_config: dict[str, Any] | None = None,
) -> None:
    """Write config, generation config, tokenizer and weights of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    eos: int | list[int] = list(words.eos_ids) if len(words.eos_ids) > 1 else words.eos_id
    generation = {"bos_token_id": words.bos_id, "eos_token_id": eos, "pad_token_id": words.pad_id}
    generation = {key: value for key, value in generation.items() if value is not None}
    generation |= generation_config or {}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    words.write(folder)
    write_safetensors(folder, tensors, shards)


def tiny_gguf(hf_folder: Path, out: Path, dtype: str = "f32") -> Path:
    """Write the GGUF form of a folder through the project's own dense writer."""
    from edgellm_quantize.writers import write_dense_gguf

    write_dense_gguf(hf_folder, out, dtype)
    return out
