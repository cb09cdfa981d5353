"""One decoder layer's weights and its two sub-layers, attention and feed-forward, in terms of the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.ops import HeadShape, Kernels, Prepared
from edgellm_kernels.weights import LinearWeight
from edgellm_models.network.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """One layer, ready for the kernels. Norm gains are f32 [hidden], those of q and k [head_dim]."""

    attn_norm: torch.Tensor
    qkv: LinearWeight
    """[(heads + 2 kv_heads) * head_dim, hidden]"""
    attn_output: LinearWeight
    ffn_norm: torch.Tensor
    gate_up: LinearWeight
    """[2 * ffn, hidden], gate first"""
    down: LinearWeight
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupState:
    """What the layers of one KV group share in a forward pass."""

    tables: GroupTables
    storage: KVStorage
    window: int | None
    plan: Any


def attention(
    x: Prepared,
    layer: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
    batch: ForwardBatch,
    group: GroupState,
    index_in_group: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attention over the stored keys, those of x included: [tokens, hidden] -> f32 [tokens, hidden]."""
    shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
    qkv = kernels.linear(x, layer.qkv)  # [tokens, qkv_width]
    q = kernels.qk_norm_rope_store(
        qkv,
        shape,
        layer.q_norm,
        layer.k_norm,
        spec.rms_eps,
        *cos_sin,
        group.storage,
        index_in_group,
        group.tables,
    )
    attended = kernels.paged_attention(
        q,
        group.storage,
        index_in_group,
        group.tables,
        batch,
        spec.query_scale,
        group.window,
        spec.attention_softcap,
        group.plan,
    )
    return kernels.linear(attended, layer.attn_output)


def feed_forward(x: Prepared, layer: LayerWeights, spec: ModelSpec, kernels: Kernels) -> torch.Tensor:
    """down(activation(gate(x)) * up(x)): [tokens, hidden] -> f32 [tokens, hidden]."""
    return kernels.linear(kernels.gate_up(x, layer.gate_up, spec.activation), layer.down)
