"""Triton paged attention: split-KV for few queries, tiles of queries for many, over pages in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm_kernels import attention_torch, rope_triton
from edgellm_kernels.attention_plan_torch import TorchAttentionPlan
from edgellm_kernels.batch import ForwardBatch, GroupTables, KVStorage
from edgellm_kernels.gpu_configs import attention_tile
from edgellm_kernels.kv_pages_triton import FP8, e4m3_scales, load_tile, page_bytes, page_form
from edgellm_kernels.operands import Prepared

_SPLIT_PROGRAMS = 256
_MAX_SPLITS = 64
_SPLIT_KEYS = 256
"""A split is not worth its part of the result for fewer keys than this."""


@triton.jit(do_not_specialize=("table_width", "num_rows", "splits"))
def attention_kernel(
    q, keys, values, key_scales, value_scales, block_table, block_starts, key_lengths, positions,
    query_starts, sinks, out, peaks, sums, table_width, num_rows, num_heads, num_kv_heads, scale, window,
    softcap, splits,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_AS: tl.constexpr,
    VALUES_AS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """One tile of rows (query, head of a GQA group) of a sequence, over one split of its visible blocks.

    Writes finished rows, or with SPLIT the weighted values with their peak (base 2) and sum, f32.
    """
    sequence, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head, tile = tile % num_kv_heads, tile // num_kv_heads
    first_query = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    row = tile * ROWS + tl.arange(0, ROWS)
    if tile * ROWS < queries * GROUP:
        present = row < queries * GROUP
        query = (first_query + tl.where(present, row // GROUP, 0)).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        position = tl.load(positions + query, mask=present, other=-1).to(tl.int32)
        highest = tl.max(position, axis=0)
        lowest = tl.min(tl.where(present, position, 2147483647), axis=0)
        length = tl.load(key_lengths + sequence)
        # Blocks lie in the order of their positions: those that some row of the tile sees are one range.
        first, end = 0, 0
        entry = tl.arange(0, TABLE)
        table = sequence.to(tl.int64) * table_width
        for start in range(0, table_width, TABLE):
            inside = start + entry < table_width
            live = tl.load(block_table + table + start + entry, mask=inside, other=-1) >= 0
            at = tl.load(block_starts + table + start + entry, mask=inside, other=0)
            end += tl.sum((live & (at <= highest) & (at < length)).to(tl.int32), axis=0)
            if WINDOWED:
                first += tl.sum((live & (at + PAGE <= lowest - window + 1)).to(tl.int32), axis=0)
        # Splits are cut in whole steps of KEYS, counted from the first block that is seen.
        slots = (end - first) * PAGE
        steps = (slots + KEYS - 1) // KEYS
        each = (steps + splits - 1) // splits

        element = tl.arange(0, K_PAD)
        q_at = q + (query * num_heads + head)[:, None] * K_DIM + element[None, :]
        q_tile = tl.load(q_at, mask=present[:, None] & (element < K_DIM)[None, :], other=0.0) * scale
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        sum_ = tl.zeros([ROWS], tl.float32)
        if SINKS:  # a key without a value, which only the first split sees
            sink = tl.load(sinks + head, mask=present, other=float("-inf")).to(tl.float32)
            peak = tl.where(split == 0, sink * 1.4426950408889634, peak)
            sum_ = tl.where(peak == float("-inf"), 0.0, 1.0)
        total = tl.zeros([ROWS, V_PAD], tl.float32)
        v_element = tl.arange(0, V_PAD)
        for step in range(split * each, tl.minimum(steps, split * each + each)):
            slot = step * KEYS + tl.arange(0, KEYS)
            block = first + slot // PAGE
            inside = block < end
            page = tl.load(block_table + table + block, mask=inside, other=0).to(tl.int64)
            key_position = tl.load(block_starts + table + block, mask=inside, other=0) + slot % PAGE
            inside = inside & (key_position < length)
            key_row = (page * PAGE + slot % PAGE) * num_kv_heads + kv_head
            k_tile = load_tile(
                keys, key_scales, key_row[None, :], element[:, None], inside[None, :], K_DIM, KEYS_AS
            )
            scores = tl.dot(q_tile, k_tile, input_precision=PRECISION)
            if KEYS_AS == FP8:
                scores *= e4m3_scales(key_scales, key_row, inside)[None, :]
            if CAPPED:
                # tanh by exp, whose argument is never positive: nothing overflows.
                ratio = tl.abs(scores) / softcap
                decay = tl.exp(-2.0 * ratio)
                capped = softcap * (1.0 - decay) / (1.0 + decay)
                scores = tl.where(scores < 0.0, -capped, tl.where(scores != scores, scores, capped))
            visible = inside[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            # A row that has seen nothing yet keeps -inf, and must not give -inf - -inf.
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(peak - base)
            v_tile = load_tile(
                values,
                value_scales,
                key_row[:, None],
                v_element[None, :],
                inside[:, None],
                V_DIM,
                VALUES_AS,
            )
            sum_ = sum_ * shrink + tl.sum(weights, axis=1)
            total = total * shrink[:, None]
            if VALUES_AS == FP8:
                weights *= e4m3_scales(value_scales, key_row, inside)[None, :]
            total = tl.dot(weights, v_tile, total, input_precision=PRECISION)
            peak = new_peak
        mask = present[:, None] & (v_element < V_DIM)[None, :]
        if SPLIT:
            place = (split.to(tl.int64) * num_rows + query) * num_heads + head
            tl.store(out + place[:, None] * V_DIM + v_element[None, :], total, mask=mask)
            tl.store(peaks + place, peak, mask=present)
            tl.store(sums + place, sum_, mask=present)
        else:
            total = total / tl.where(sum_ == 0.0, 1.0, sum_)[:, None]
            place = query * num_heads + head
            tl.store(out + place[:, None] * V_DIM + v_element[None, :], total, mask=mask)


@triton.jit(do_not_specialize=("num_rows", "sequences", "splits"))
def combine_kernel(
    parts, peaks, sums, query_starts, out, num_rows, sequences, splits,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head made one, in their order; rows behind the last sequence stay."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < tl.load(query_starts + sequences):
        num_heads = tl.num_programs(1)
        split = tl.arange(0, MAX_SPLITS)
        place = (split.to(tl.int64) * num_rows + row) * num_heads + head
        peak = tl.load(peaks + place, mask=split < splits, other=float("-inf"))
        highest = tl.max(peak, axis=0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.sum(tl.load(sums + place, mask=split < splits, other=0.0) * tl.exp2(peak - base), axis=0)
        element = tl.arange(0, V_PAD)
        some = tl.arange(0, AT_ONCE)
        total = tl.zeros([V_PAD], tl.float32)
        for first in range(0, splits, AT_ONCE):
            there = first + some < splits
            these = ((first + some).to(tl.int64) * num_rows + row) * num_heads + head
            factor = tl.exp2(tl.load(peaks + these, mask=there, other=float("-inf")) - base)
            seen = there[:, None] & (element < V_DIM)[None, :]
            part = tl.load(parts + these[:, None] * V_DIM + element[None, :], mask=seen, other=0.0)
            total += tl.sum(part * factor[:, None], axis=0)
        total = total / tl.where(weight == 0.0, 1.0, weight)
        tl.store(out + (row * num_heads + head) * V_DIM + element, total, mask=element < V_DIM)


def num_splits(programs: int, max_key: int) -> int:
    """Programs that share a row's keys: from shapes alone, none below _SPLIT_KEYS keys."""
    return max(1, min(_SPLIT_PROGRAMS // max(1, programs), -(-max_key // _SPLIT_KEYS), _MAX_SPLITS))


def plan_attention(batch: ForwardBatch, tables: GroupTables, block_size: int) -> TorchAttentionPlan | None:
    """See ops.PlanAttention: kernels read the tables; int4 pages, which torch reads, have a plan."""
    return None if tables.tail is None else attention_torch.plan_attention(batch, tables, block_size)


def paged_attention(
    q: torch.Tensor,
    kv: KVStorage,
    layer: int,
    tables: GroupTables,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: TorchAttentionPlan | None = None,
    sinks: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Prepared:
    """See ops.PagedAttention. int4 pages are read by torch; f32 compute takes three tf32 products for one."""
    if kv.has_int4:
        return attention_torch.paged_attention(
            q, kv, layer, tables, batch, scale, window, softcap, plan, sinks
        )
    tokens, num_heads, k_dim = q.shape
    keys, values = kv.keys[layer], kv.values[layer]
    num_kv_heads, v_dim = keys.shape[2], kv.v_dim
    group = num_heads // num_kv_heads
    out = torch.zeros((tokens, num_heads * v_dim), dtype=torch.float32, device=q.device)
    sequences, width = tables.block_table.shape
    if not (sequences and tokens and width and batch.max_query):
        return Prepared(out)
    exact = dtype == torch.float32
    quantized = kv.key_scales is not None or kv.value_scales is not None
    fp8 = torch.float8_e4m3fn in (keys.dtype, values.dtype)
    hopper = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9
    sizes = attention_tile(batch.max_query * group, max(k_dim, v_dim), quantized, exact, hopper, fp8)
    tiles = triton.cdiv(batch.max_query * group, sizes.rows) * num_kv_heads
    splits = num_splits(sequences * tiles, batch.max_key)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = out.new_empty((splits, tokens, num_heads, v_dim))
        peaks, sums = out.new_empty((2, splits, tokens, num_heads))
    attention_kernel[(sequences, tiles, splits)](
        q=rope_triton.hadamard(q) if kv.rotates_keys else q.float().contiguous(),
        keys=page_bytes(keys),
        values=page_bytes(values),
        key_scales=keys if kv.key_scales is None else kv.key_scales[layer],
        value_scales=values if kv.value_scales is None else kv.value_scales[layer],
        block_table=tables.block_table.contiguous(),
        block_starts=tables.block_positions.contiguous(),
        key_lengths=tables.key_lengths,
        positions=batch.positions,
        query_starts=batch.query_starts,
        sinks=parts if sinks is None else sinks.contiguous(),
        out=parts,
        peaks=peaks,
        sums=sums,
        table_width=width,
        num_rows=tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window or 0,
        softcap=softcap or 0.0,
        splits=splits,
        GROUP=group,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=triton.next_power_of_2(max(k_dim, 16)),
        V_PAD=triton.next_power_of_2(max(v_dim, 16)),
        PAGE=kv.block_size,
        ROWS=sizes.rows,
        KEYS=sizes.keys,
        KEYS_AS=page_form(keys),
        VALUES_AS=page_form(values),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        SPLIT=splits > 1,
        PRECISION=sizes.precision,
        TABLE=64,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    if splits > 1:
        combine_kernel[(tokens, num_heads)](
            parts=parts,
            peaks=peaks,
            sums=sums,
            query_starts=batch.query_starts,
            out=out,
            num_rows=tokens,
            sequences=sequences,
            splits=splits,
            V_DIM=v_dim,
            V_PAD=triton.next_power_of_2(v_dim),
            MAX_SPLITS=_MAX_SPLITS,
            AT_ONCE=8,
            num_warps=1,
        )
    return Prepared(out)
