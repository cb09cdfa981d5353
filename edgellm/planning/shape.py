"""A model's shape as planning needs it, from a spec and, where there are any, the declared tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edgellm_models.network.spec import ModelSpec


class DeclaredTensor(Protocol):
    """The part of a reader's TensorInfo that sizes come from."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. Bytes are those of the weights as their file holds them."""

    windows: tuple[int | None, ...]
    """Per layer: the positions that it sees, None for all."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int
    """Trained context, in tokens."""
    parameters: int
    weight_bytes: int
    step_parameters: int
    """Weights that each token is multiplied with: all but an embedding table that is only looked up."""
    step_bytes: int
    """Bytes of those: what a decode step reads of the weights."""
    layer_bytes: int
    """Bytes of the decoder layers alone, without embedding, head and last norm."""
    largest_bytes: int
    """Bytes of the largest tensor."""
    has_merges: bool
    """The tokenizer has a list of merges beside its vocabulary."""
    is_estimate: bool
    """The bytes follow from the shape and one type for all weights; no tensor was declared."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def held_bytes(self, kernels: str) -> int:
        """Weights in memory: packed they take what they take in the file; torch computes with f32, and keeps
        only an embedding that is no head in the file's form."""
        if kernels != "torch":
            return self.weight_bytes
        return 4 * self.step_parameters + self.weight_bytes - self.step_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / self.parameters


def shape_of(
    spec: ModelSpec,
    tensors: Mapping[str, DeclaredTensor],
    *,
    bits_per_weight: float = 16.0,
    has_merges: bool = True,
) -> ModelShape:
    """The shape of a model whose tensors are declared, by canonical name, or of a bare configuration.

    ``bits_per_weight`` counts only where there are no tensors: norms and biases are then counted alike.
    """
    if tensors:
        sizes = {name: (math.prod(info.shape), info.nbytes) for name, info in tensors.items()}
    else:
        counts = _parameters(spec)
        sizes = {name: (count, math.ceil(count * bits_per_weight / 8)) for name, count in counts.items()}
    embedding = sizes.get("token_embd.weight", (0, 0))
    looked_up = "output.weight" in sizes
    parameters = sum(count for count, _ in sizes.values())
    weight_bytes = sum(nbytes for _, nbytes in sizes.values())
    outside = ("token_embd.weight", "output.weight", "output_norm.weight")
    return ModelShape(
        windows=tuple(layer.window for layer in spec.layers),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        parameters=parameters,
        weight_bytes=weight_bytes,
        step_parameters=parameters - (embedding[0] if looked_up else 0),
        step_bytes=weight_bytes - (embedding[1] if looked_up else 0),
        layer_bytes=sum(nbytes for name, (_, nbytes) in sizes.items() if name not in outside),
        largest_bytes=max(nbytes for name, (_, nbytes) in sizes.items() if name != "blk.weight"),
        has_merges=has_merges,
        is_estimate=not tensors,
    )


def _parameters(spec: ModelSpec) -> dict[str, int]:
    """Parameter counts by canonical name of what the family has, the layers joined under one name."""
    hidden, query, kv = (
        spec.hidden_size,
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
    )
    widths = {
        "attn_q": query,
        "attn_k": kv,
        "attn_v": kv,
        "attn_output": hidden,
        "ffn_gate": spec.ffn_size,
        "ffn_up": spec.ffn_size,
        "ffn_down": hidden,
    }
    layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * spec.ffn_size
    layer += (4 if spec.post_norms else 2) * hidden
    layer += 2 * spec.head_dim if spec.qk_norm else 0
    layer += sum(widths.get(name, 0) for name in spec.required_biases)
    counts = {
        "blk.weight": spec.num_layers * layer,
        "output_norm.weight": hidden,
        "token_embd.weight": spec.vocab_size * hidden,
    }
    if not spec.tied_embeddings:
        counts["output.weight"] = spec.vocab_size * hidden
    return counts


def config_bits_per_weight(config: Mapping[str, Any]) -> float:
    """Bits per weight that a config.json implies: of its quantization, else of its type, else 16.

    A group's scale and zero point are counted, the tensors that stay wider are not: an estimate.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    for part in parts:
        quantized = part.get("quantization_config")
        if isinstance(quantized, Mapping):
            bits, group = quantized.get("bits"), quantized.get("group_size")
            if isinstance(bits, int) and 1 <= bits <= 16:
                share = (16 + bits) / group if isinstance(group, int) and group > 0 else 0.0
                return bits + share
    names = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in names:
                return names[part[key]]
    return 16.0


class CatalogEntry(Protocol):
    """The part of a catalog entry that a shape can be guessed from."""

    @property
    def parameters(self) -> int | None: ...
    @property
    def context(self) -> int | None: ...
    @property
    def layers(self) -> int | None: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def weight_bytes(self) -> int | None: ...


GUESSED_VOCAB = 160_000
"""Larger than most vocabularies: a workspace that is guessed should not be too small."""


def catalog_shape(entry: CatalogEntry) -> ModelShape | None:
    """The shape of a model before it is fetched; None where the catalog knows too little.

    Exact are the KV sizes (windows apart, which the catalog does not list) and, for files of known size, the
    weights. The width of the layers follows from 12 hidden^2 parameters per layer.
    """
    parameters, weight_bytes = entry.parameters, entry.weight_bytes
    if not (parameters and weight_bytes and entry.layers and entry.kv_heads and entry.head_dim):
        return None
    hidden = math.ceil(math.sqrt(parameters / (12 * entry.layers)))
    return ModelShape(
        windows=(None,) * entry.layers,
        num_heads=max(entry.kv_heads, -(-hidden // entry.head_dim)),
        num_kv_heads=entry.kv_heads,
        head_dim=entry.head_dim,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        vocab_size=GUESSED_VOCAB,
        context_length=entry.context or 4096,
        parameters=parameters,
        weight_bytes=weight_bytes,
        step_parameters=parameters,
        step_bytes=weight_bytes,
        layer_bytes=weight_bytes,
        largest_bytes=math.ceil(GUESSED_VOCAB * hidden * weight_bytes / parameters),
        has_merges=True,
        is_estimate=True,
    )
