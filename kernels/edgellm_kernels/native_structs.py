"""The structs of the native library as ctypes has them, and how they are filled from tensors."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.native_library import NativeError, NativeLibrary

KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Pages(ctypes.Structure):
    """KVPages of kv_pages.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, _I) for name in ("key_type", "value_type")),
        *((name, _I) for name in ("blocks", "block_size", "kv_heads", "k_dim", "v_dim")),
    ]


class Tables(ctypes.Structure):
    """GroupTables of kv_pages.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("block_table", "block_positions", "slot_mapping", "key_lengths")),
        ("max_blocks", _I),
    ]


class Rows(ctypes.Structure):
    """BatchRows of kv_pages.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("positions", _P),
        ("query_starts", _P),
        ("sequences", _I),
        ("tokens", _I),
    ]


class Attention(ctypes.Structure):
    """AttentionCall of attention.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("q", _P),
        ("out", _P),
        ("pages", Pages),
        ("tables", Tables),
        ("rows", Rows),
        ("heads", _I),
        ("window", _I),
        ("scale", _F),
        ("softcap", _F),
    ]


class RopeStore(ctypes.Structure):
    """RopeStoreCall of rows.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("qkv", "q", "q_norm", "k_norm", "cos", "sin")),
        ("pages", Pages),
        ("slots", _P),
        *((name, _I) for name in ("heads", "pairs", "tokens")),
        ("eps", _F),
    ]


MAX_PARTS = 3


class StepLinear(ctypes.Structure):
    """StepLinear of step.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("formats", _I * MAX_PARTS),
        ("rows", _I * MAX_PARTS),
        ("data", _P * MAX_PARTS),
        ("biases", _P * MAX_PARTS),
        ("orders", _P * MAX_PARTS),
        ("parts", _I),
        ("k", _I),
    ]


class StepLayer(ctypes.Structure):
    """StepLayer of step.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, _P) for name in ("post_attention_norm", "post_ffn_norm")),
        *((name, StepLinear) for name in ("qkv", "attn_output", "gate_up", "down")),
        *((name, _I) for name in ("group", "rope", "window")),
    ]


class StepRope(ctypes.Structure):
    """StepRope of step.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("frequencies", _P),
        ("pairs", _I),
        ("factor", _F),
        ("reserved", ctypes.c_int32),
    ]


class StepModel(ctypes.Structure):
    """StepModel of step.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("layers", "ropes", "output_norm")),
        *((name, StepLinear) for name in ("head", "embedding")),
        *((name, _I) for name in ("num_layers", "num_ropes", "num_groups", "hidden", "heads", "ffn")),
        *((name, _I) for name in ("activation", "exact")),
        *((name, _F) for name in ("eps", "query_scale", "softcap", "embedding_scale")),
    ]


class StepCall(ctypes.Structure):
    """StepCall of step.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _P) for name in ("token_ids", "embedded", "pages", "groups", "angles", "logit_rows")),
        *((name, _P) for name in ("skipped", "logits", "last_x", "last_residual")),
        ("rows", Rows),
        ("num_logit_rows", _I),
    ]


STEP_OPS = (
    "embed",
    "norm",
    "qkv",
    "rope",
    "attention",
    "attn_output",
    "gate_up",
    "gate",
    "down",
    "head",
)
"""What edgellm_step_seconds counts, in its order."""


def check_sizes(library: NativeLibrary) -> None:
    """NativeError where the library was built from structs of another shape."""
    sizes = (ctypes.c_int64 * 5)()
    library.call("edgellm_attention_struct_sizes", ctypes.addressof(sizes))
    steps = (ctypes.c_int64 * 5)()
    library.call("edgellm_step_struct_sizes", ctypes.addressof(steps))
    structs = (
        Pages,
        Tables,
        Rows,
        Attention,
        RopeStore,
        StepLinear,
        StepLayer,
        StepRope,
        StepModel,
        StepCall,
    )
    theirs, ours = [*sizes, *steps], [ctypes.sizeof(struct) for struct in structs]
    if theirs != ours:
        raise NativeError(f"structs of {theirs} bytes in the library, {ours} here: build it again")


def serves(kv: KVStorage) -> bool:
    """Whether the native ops read and write pages of this form: all but int4."""
    return kv.keys.dtype in KV_TYPES and kv.values.dtype in KV_TYPES and kv.tail is None


def fill_pages(pages: Pages, kv: KVStorage, layer: int) -> None:
    """The pages of one layer. The struct holds addresses: ``kv`` must outlive it."""
    keys, values = kv.keys[layer], kv.values[layer]
    assert keys.is_contiguous() and values.is_contiguous()
    pages.keys, pages.values = keys.data_ptr(), values.data_ptr()
    pages.key_scales = None if kv.key_scales is None else kv.key_scales[layer].data_ptr()
    pages.value_scales = None if kv.value_scales is None else kv.value_scales[layer].data_ptr()
    pages.key_type, pages.value_type = KV_TYPES[kv.keys.dtype], KV_TYPES[kv.values.dtype]
    pages.blocks, pages.block_size, pages.kv_heads, pages.k_dim = keys.shape
    pages.v_dim = kv.v_dim


def fill_tables(into: Tables, tables: GroupTables) -> None:
    """The struct holds addresses: ``tables`` must outlive it."""
    for tensor in (tables.block_table, tables.block_positions, tables.slot_mapping, tables.key_lengths):
        assert tensor.is_contiguous()
    assert tables.block_table.dtype == torch.int32 and tables.slot_mapping.dtype == torch.int64
    assert tables.block_positions.dtype == torch.int32 and tables.key_lengths.dtype == torch.int32
    into.block_table = tables.block_table.data_ptr()
    into.block_positions = tables.block_positions.data_ptr()
    into.slot_mapping = tables.slot_mapping.data_ptr()
    into.key_lengths = tables.key_lengths.data_ptr()
    into.max_blocks = tables.block_table.shape[1]


def fill_rows(into: Rows, batch: ForwardBatch) -> None:
    """The struct holds addresses: ``batch`` must outlive it."""
    assert batch.positions.dtype == torch.int64 and batch.query_starts.dtype == torch.int32
    assert batch.positions.is_contiguous() and batch.query_starts.is_contiguous()
    into.positions, into.query_starts = batch.positions.data_ptr(), batch.query_starts.data_ptr()
    into.sequences, into.tokens = batch.query_starts.shape[0] - 1, batch.positions.shape[0]
