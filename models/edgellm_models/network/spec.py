"""ModelSpec: everything the one decoder must know of a model, whatever file form it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TensorShape(Protocol):
    """The part of a reader's TensorInfo that a spec needs."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding. Angles pair element i with i + dims/2 (the half-split convention)."""

    base: float
    dims: int
    """Rotated elements of each head (partial rotary when less than head_dim)."""
    scaling: str = "none"
    """none, linear, dynamic, llama3, yarn or longrope."""
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the correction range outward to whole dimensions."""
    attention_factor: float | None = None
    """Multiplies cos and sin; None is the default of the scaling."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: divisors of the inverse frequencies below and above original_context."""
    freq_divisors: tuple[float, ...] = ()
    """Divisors per frequency as a GGUF's rope_freqs.weight states them (llama3 scaling, precomputed)."""

    @property
    def switch_length(self) -> int | None:
        """Sequences longer than this turn by other angles than shorter ones; None where length is no matter.

        K that was stored while a sequence was shorter is then of no use: see ModelSpec.rope_switch_length.
        """
        return self.original_context if self.scaling in ("dynamic", "longrope") else None


@dataclass(frozen=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None
    """Positions a query sees, its own included; None is all."""
    rope: int
    """Index into ModelSpec.ropes."""


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV has the same window, so that they can share block tables."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    """Rows of the embedding, padding rows included."""
    context_length: int
    """Trained context, in tokens."""
    rms_eps: float
    activation: str
    """silu or gelu_tanh."""
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    query_scale: float
    """Multiplies q k^T (1/sqrt(head_dim) unless the family says otherwise)."""
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    post_norms: bool = False
    """Gemma: a norm on each sub-layer's output before it is added to the residual stream."""
    tied_embeddings: bool = False
    norm_offset: float = 0.0
    """Added to every stored norm gain at load (Hugging Face Gemma stores gain - 1)."""
    permuted_qk: bool = False
    """The file stores q and k rows in interleaved rotary order (GGUF llama); undone at load."""
    required_biases: tuple[str, ...] = ()
    """Linears (attn_q, ffn_up ...) whose bias must be in the file; any other that is there is used too."""

    @property
    def rope_switch_length(self) -> int | None:
        """Where dynamic or longrope scaling changes all angles: the least over the ropes, None for others.

        A sequence that grows past it (its prompt alone, or while it is generated) must be computed again from
        its first token with the longer length in ``ForwardBatch.rope_lengths``; Transformers drops Phi-3's
        cache likewise.
        """
        return min(
            (rope.switch_length for rope in self.ropes if rope.switch_length is not None), default=None
        )

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by window, in order of first appearance: the order of ForwardBatch.groups."""
        by_window: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_window.setdefault(layer.window, []).append(index)
        return tuple(KVGroup(window, tuple(layers)) for window, layers in by_window.items())
