"""Reference of what KV pages hold: quantizes rows on write, decodes blocks on read (forms: see batch.py).

Every step of a write works on one row's elements alone (butterflies, maxima, roundings; no matrix product),
so a row's stored bytes are the same alone, behind drafted rows and in a prefill chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm_kernels.batch import INT4_GROUP, GroupTables, KVStorage, TailStorage, movable

_MAX_SCALE = 65504.0
"""Largest finite f16: elements above 127 times that (of fp8: 448 times) saturate."""
E4M3_MAX = 448.0
"""Largest finite e4m3; what would round above it becomes NaN in torch's conversion."""


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x H along the last dim, a power of two, with the orthonormal H; its own inverse. f32 in, f32 out."""
    shape, dim = x.shape, x.shape[-1]
    step = 1
    while step < dim:
        x = x.reshape(*shape[:-1], dim // (2 * step), 2, step)
        low, high = x[..., 0, :], x[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2)
        step *= 2
    return x.reshape(shape).mul(dim**-0.5)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., dim] f32 -> int8 [.., dim] and f16 [.., 1]: x = q * scale, off by at most half a scale."""
    scales = _scales(x.abs().amax(-1, keepdim=True) / 127.0)
    return _steps(x, scales).clamp_(-127, 127).to(torch.int8), scales


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., dim] f32 -> e4m3 [.., dim] and f16 [.., 1]: x = f * scale, halves to even.

    Off by at most 2^-4 of the element, or by 2^-10 of the scale where that is more. The largest element of a
    row is 448 times the scale: none overflows, and only elements below 2^-14 of the largest lose bits. No
    stored element is NaN: what is not finite shows in the scale.
    """
    scales = _scales(x.abs().amax(-1, keepdim=True) / E4M3_MAX)
    return _quotients(x, scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., dim] f32, already rotated -> packed uint8 [.., dim / 2] and f16 [.., dim / 32].

    Sixteen steps of scale = extreme / -8 from the extreme down, where the extreme is the element of largest
    size: x = (q - 8) * scale, off by half a scale, or by a whole one at the other end of the range.
    """
    groups = x.reshape(*x.shape[:-1], -1, INT4_GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    extreme = torch.where(high.abs() > low.abs(), high, low)
    scales = _scales(extreme / -8.0)
    q = _steps(groups, scales[..., None]).add_(8.0).clamp_(0, 15).to(torch.uint8).reshape(x.shape)
    low_nibbles, high_nibbles = q.chunk(2, dim=-1)
    return low_nibbles | (high_nibbles << 4), scales


def _scales(exact: torch.Tensor) -> torch.Tensor:
    """f16. Too large ones saturate; an infinity or NaN stays, so that whoever reads the row sees it."""
    clamped = exact.clamp(-_MAX_SCALE, _MAX_SCALE)
    return torch.where(exact.isfinite(), clamped, exact).half()


def _steps(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _quotients(x, scales).round_()


def _quotients(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x / scale. Where f16 rounds the scale to 0 the result is 0; see _scales for NaN."""
    divisor = scales.float()
    divisor = torch.where(divisor == 0, torch.inf, divisor)
    return (x / divisor).nan_to_num_(0.0)


def dequantize(data: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Pages of any form -> f32 [.., dim], rotated where they are int4."""
    if scales is None:
        return data.float()
    dim = data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)
    out = torch.empty((*data.shape[:-1], dim), dtype=torch.float32, device=data.device)
    _dequantize_into(data, scales, out)
    return out


def _dequantize_into(data: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    if data.dtype == torch.int8:
        torch.mul(data, scales.float(), out=out)
        return
    if data.dtype == torch.float8_e4m3fn:
        out.copy_(data).mul_(scales.float())
        return
    half = data.shape[-1]
    out[..., :half].copy_(data & 15)
    out[..., half:].copy_(data >> 4)
    # A view even of a part of a buffer: only the last dim is split.
    groups = out.sub_(8.0).view(*out.shape[:-1], -1, INT4_GROUP)
    groups.mul_(scales.float()[..., None])


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVStorage, layer: int, tables: GroupTables) -> None:
    """Write f32 [tokens, kv_heads, dim] rows at their slots; a slot below 0 is written nowhere.

    With tail tables, also stages what attention reads unquantized and keeps what later steps may.
    """
    if kv.rotates_keys:
        k = hadamard(k)
    if kv.rotates_values:
        v = hadamard(v)
    if kv.tail is not None:
        _stage(k, v, kv.tail, layer, tables)
    slots = tables.slot_mapping
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    _store(k, kv.keys[layer], None if kv.key_scales is None else kv.key_scales[layer], slots)
    _store(v, kv.values[layer], None if kv.value_scales is None else kv.value_scales[layer], slots)


def _store(
    rows: torch.Tensor, pages: torch.Tensor, scale_pages: torch.Tensor | None, slots: torch.Tensor
) -> None:
    if scale_pages is None:
        data = rows.to(pages.dtype)
    else:
        data, scales = _QUANTIZERS[pages.dtype](rows)
        scale_pages.view(-1, *scale_pages.shape[2:]).index_copy_(0, slots, scales)
    movable(pages).view(-1, *pages.shape[2:]).index_copy_(0, slots, movable(data))


_QUANTIZERS = {torch.int8: quantize_int8, torch.float8_e4m3fn: quantize_fp8, torch.uint8: quantize_int4}


def _stage(k: torch.Tensor, v: torch.Tensor, tail: TailStorage, layer: int, tables: GroupTables) -> None:
    """Stage the rows held from earlier steps, then those of this step; then the ring takes the new ones."""
    if tables.tail is None:
        tail.staged = None
        return
    staged = []
    for rows, rings in ((k, tail.keys[layer]), (v, tail.values[layer])):
        slots = rings.view(-1, *rings.shape[2:])
        new = rows.to(rings.dtype)
        # A copy: the ring is overwritten next.
        staged.append(torch.cat((slots.index_select(0, tables.tail.read_slots), new)))
        slots.index_copy_(0, tables.tail.write_slots, new.index_select(0, tables.tail.write_rows))
    tail.staged = (staged[0], staged[1])


def read_blocks(
    pages: torch.Tensor, scale_pages: torch.Tensor | None, blocks: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Blocks of a layer as f32 [blocks, block_size, kv_heads, dim].

    ``blocks``: ids as a tensor, or (first, end) of consecutive ids, which copies nothing of f32 pages.
    """
    if isinstance(blocks, torch.Tensor):
        data = _blocks(pages, blocks)
        scales = None if scale_pages is None else scale_pages.index_select(0, blocks)
    else:
        first, end = blocks
        data = pages[first:end]
        scales = None if scale_pages is None else scale_pages[first:end]
    return dequantize(data, scales)


def _blocks(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return movable(pages).index_select(0, blocks).view(pages.dtype)


def read_blocks_into(
    pages: torch.Tensor, scale_pages: torch.Tensor | None, blocks: torch.Tensor, out: torch.Tensor
) -> None:
    """Blocks of a layer, those of several sequences in turn, into f32 [sequences, slots, kv_heads, dim]."""
    if pages.dtype == torch.float32 and out.is_contiguous():
        torch.index_select(pages, 0, blocks, out=out.view(-1, *pages.shape[1:]))
        return
    data = _blocks(pages, blocks).view(*out.shape[:3], -1)
    if scale_pages is None:
        out.copy_(data)
    else:
        _dequantize_into(data, scale_pages.index_select(0, blocks).view(*out.shape[:3], -1), out)
