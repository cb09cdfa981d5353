"""Reference of the rope ops: angles; split rows, norm and rotate q and k, write K and V into their pages."""

from __future__ import annotations

import torch

from edgellm_kernels.batch import GroupTables, KVStorage
from edgellm_kernels.kv_store_torch import store_kv
from edgellm_kernels.norm_torch import rms_norm
from edgellm_kernels.operands import HeadShape


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[1] elements of every head; element i pairs with i + cos.shape[1].

    x [tokens, heads, dim] f32, cos and sin [tokens, pairs] f32. The elements behind stay as they are.
    """
    pairs = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.RopeAngles."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    shape: HeadShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KVStorage,
    layer: int,
    tables: GroupTables,
) -> torch.Tensor:
    """See ops.QkNormRopeStore."""
    tokens = qkv.shape[0]
    q, k, v = torch.split(qkv.float(), [shape.q_width, shape.k_width, shape.v_width], dim=1)
    q = q.view(tokens, shape.num_heads, shape.k_dim)
    k = k.view(tokens, shape.num_kv_heads, shape.k_dim)
    v = v.view(tokens, shape.num_kv_heads, shape.v_dim)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    store_kv(rotate(k, cos, sin), v, kv, layer, tables)
    return rotate(q, cos, sin)
