"""Paged attention, rotary embedding and KV store of the native library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from edgellm_kernels import attention_torch, rope_torch
from edgellm_kernels.attention_plan_torch import TorchAttentionPlan
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.native_library import NativeLibrary, load_library
from edgellm_kernels.native_structs import (
    Attention,
    RopeStore,
    check_sizes,
    fill_pages,
    fill_rows,
    fill_tables,
    serves,
)
from edgellm_kernels.native_threads import pool
from edgellm_kernels.operands import HeadShape, Prepared


@dataclass
class NativeAttentionPlan:
    """A group's tables and the batch's rows as the library takes them, filled once per forward pass."""

    call: Attention
    batch: ForwardBatch
    tables: GroupTables
    block_size: int
    _torch: TorchAttentionPlan | None = None

    def for_torch(self) -> TorchAttentionPlan:
        """The plan of the torch attention, for pages that only that reads; made once."""
        if self._torch is None:
            self._torch = attention_torch.plan_attention(self.batch, self.tables, self.block_size)
        return self._torch


def _library() -> NativeLibrary:
    library = load_library()
    assert library is not None, "chosen without a native library"
    return library


def plan_attention(batch: ForwardBatch, tables: GroupTables, block_size: int) -> NativeAttentionPlan:
    """See ops.PlanAttention."""
    check_sizes(_library())
    call = Attention()
    fill_tables(call.tables, tables)
    fill_rows(call.rows, batch)
    return NativeAttentionPlan(call, batch, tables, block_size)


def paged_attention(
    q: torch.Tensor,
    kv: KVStorage,
    layer: int,
    tables: GroupTables,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: NativeAttentionPlan | None = None,
    sinks: torch.Tensor | None = None,
) -> Prepared:
    """See ops.PagedAttention. int4 pages, and learned sink logits, are left to the torch attention."""
    plan = plan or plan_attention(batch, tables, kv.block_size)
    if not serves(kv) or sinks is not None:
        return attention_torch.paged_attention(
            q, kv, layer, tables, batch, scale, window, softcap, plan.for_torch(), sinks
        )
    assert q.dtype == torch.float32 and q.is_contiguous() and q.shape[2] == kv.keys.shape[4]
    out = torch.empty((q.shape[0], q.shape[1] * kv.v_dim), dtype=torch.float32)
    call = plan.call
    call.q, call.out, call.heads = q.data_ptr(), out.data_ptr(), q.shape[1]
    call.scale, call.window, call.softcap = scale, window or 0, softcap or 0.0
    fill_pages(call.pages, kv, layer)
    library = _library()
    library.call("edgellm_paged_attention", pool(library), ctypes.addressof(call))
    return Prepared(out)


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.RopeAngles."""
    tokens, pairs = positions.shape[0], frequencies.shape[-1]
    cos, sin = torch.empty((2, tokens, pairs), dtype=torch.float32)
    frequencies = frequencies.contiguous()
    _library().call(
        "edgellm_rope_angles",
        positions.data_ptr(),
        frequencies.data_ptr(),
        int(frequencies.ndim == 2),
        tokens,
        pairs,
        factor,
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return cos, sin


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
    """See ops.QkNormRopeStore. int4 pages are written by the torch op."""
    if not serves(kv):
        return rope_torch.qk_norm_rope_store(qkv, shape, q_norm, k_norm, eps, cos, sin, kv, layer, tables)
    tokens = qkv.shape[0]
    assert qkv.dtype == torch.float32 and qkv.is_contiguous() and qkv.shape[1] == shape.qkv_width
    assert cos.is_contiguous() and sin.is_contiguous() and tables.slot_mapping.is_contiguous()
    q = torch.empty((tokens, shape.num_heads, shape.k_dim), dtype=torch.float32)
    call = RopeStore(
        qkv=qkv.data_ptr(),
        q=q.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        slots=tables.slot_mapping.data_ptr(),
        heads=shape.num_heads,
        pairs=cos.shape[1],
        tokens=tokens,
        eps=eps,
    )
    fill_pages(call.pages, kv, layer)
    library = _library()
    library.call("edgellm_qk_norm_rope_store", pool(library), ctypes.addressof(call))
    return q
