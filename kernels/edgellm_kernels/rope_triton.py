"""Triton q/k norm, rotary embedding and KV write in one launch: a program per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm_kernels import rope_torch
from edgellm_kernels.batch import GroupTables, KVStorage
from edgellm_kernels.kv_pages_triton import page_bytes, page_form, store_row
from edgellm_kernels.operands import HeadShape


@triton.jit
def _hadamard(x, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """x H of every DIM elements of x [BLOCK], as kv_store_torch.hadamard: its butterflies in its order."""
    for i in tl.static_range(0, 16):
        if (1 << i) < DIM:
            pairs = tl.reshape(x, (BLOCK // (2 << i), 2, 1 << i))
            low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (BLOCK,))
    return x * (DIM**-0.5)


@triton.jit
def hadamard_kernel(x, out, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * DIM + tl.arange(0, DIM)
    tl.store(out + row, _hadamard(tl.load(x + row).to(tl.float32), DIM, DIM))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x H along the last dim, a power of two, in one launch: f32."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    if x.numel():
        hadamard_kernel[(x.numel() // x.shape[-1],)](x=x, out=out, DIM=x.shape[-1], num_warps=1)
    return out


@triton.jit
def rope_store_kernel(
    qkv, q_norm, k_norm, cos, sin, slots, q_out, keys, values, key_scales, value_scales, eps, num_heads,
    num_kv_heads, pairs, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, KEYS_AS: tl.constexpr, VALUES_AS: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """Head h of a token: q where h < num_heads, then k, then v."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, BLOCK)
    width = (num_heads + num_kv_heads) * K_DIM + num_kv_heads * V_DIM
    slot = tl.load(slots + token)
    if head >= num_heads + num_kv_heads:
        head = head - num_heads - num_kv_heads
        if slot >= 0:
            mask = element < V_DIM
            start = qkv + token * width + (num_heads + num_kv_heads) * K_DIM + head * V_DIM
            row = tl.load(start + element, mask=mask, other=0.0).to(tl.float32)
            store_row(row, element, mask, values, value_scales, slot, num_kv_heads, head, V_DIM, VALUES_AS)
    else:
        mask = element < K_DIM
        turned = element < 2 * pairs
        partner = tl.where(element < pairs, element + pairs, element - pairs)
        partner = tl.where(turned, partner, element)
        start = qkv + token * width + head * K_DIM
        x = tl.load(start + element, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(start + partner, mask=mask, other=0.0).to(tl.float32)
        if HAS_Q_NORM or HAS_K_NORM:
            factor = tl.rsqrt(tl.sum(x * x, axis=0) / K_DIM + eps)
            is_q = head < num_heads
            if (HAS_Q_NORM and is_q) or (HAS_K_NORM and head >= num_heads):
                gains = q_norm if is_q else k_norm
                x = x * factor * tl.load(gains + element, mask=mask, other=0.0)
                other = other * factor * tl.load(gains + partner, mask=mask, other=0.0)
        pair = tl.where(element < pairs, element, element - pairs)
        c = tl.load(cos + token * pairs + pair, mask=turned & mask, other=1.0)
        s = tl.load(sin + token * pairs + pair, mask=turned & mask, other=0.0)
        x = tl.where(turned, x * c + tl.where(element < pairs, -other, other) * s, x)
        if head < num_heads:
            tl.store(q_out + (token * num_heads + head) * K_DIM + element, x, mask=mask)
        elif slot >= 0:
            head = head - num_heads
            if ROTATED:
                x = _hadamard(x, K_DIM, BLOCK)
            store_row(x, element, mask, keys, key_scales, slot, num_kv_heads, head, K_DIM, KEYS_AS)


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
    """See ops.QkNormRopeStore. int4 pages are written by torch."""
    if kv.has_int4:
        return rope_torch.qk_norm_rope_store(qkv, shape, q_norm, k_norm, eps, cos, sin, kv, layer, tables)
    tokens = qkv.shape[0]
    qkv = qkv.contiguous()
    out = torch.empty((tokens, shape.num_heads, shape.k_dim), dtype=torch.float32, device=qkv.device)
    keys, values = kv.keys[layer], kv.values[layer]
    if tokens:
        rope_store_kernel[(tokens, shape.num_heads + 2 * shape.num_kv_heads)](
            qkv=qkv,
            q_norm=cos if q_norm is None else q_norm,
            k_norm=cos if k_norm is None else k_norm,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            slots=tables.slot_mapping,
            q_out=out,
            keys=page_bytes(keys),
            values=page_bytes(values),
            key_scales=keys if kv.key_scales is None else kv.key_scales[layer],
            value_scales=values if kv.value_scales is None else kv.value_scales[layer],
            eps=eps,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            pairs=cos.shape[1],
            K_DIM=shape.k_dim,
            V_DIM=shape.v_dim,
            BLOCK=triton.next_power_of_2(max(shape.k_dim, shape.v_dim)),
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            KEYS_AS=page_form(keys),
            VALUES_AS=page_form(values),
            ROTATED=kv.rotates_keys,
            num_warps=1,
        )
    return out
