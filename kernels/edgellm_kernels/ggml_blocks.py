"""Torch decoders of the GGUF block types, and the Q8_0 encoder that further types are held with.

Every decoder does the reference's float operations in the reference's order (gguf/quants.py, ggml-quants.c),
so its f32 results have the same bits. The byte maps are those of weights.BlockLayout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.weight_forms import BlockLayout

_CHUNK_ELEMENTS = 1 << 22
"""Weights decoded at a time: bounds the scratch memory (a few bytes per weight) whatever the tensor's
size."""


def block_elements(layout: BlockLayout) -> int:
    """Weights in one block."""
    return GGML_TYPES_BY_NAME[layout.value].block_elements


def block_bytes(layout: BlockLayout) -> int:
    """Bytes of one block."""
    return GGML_TYPES_BY_NAME[layout.value].block_bytes


def _f16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The half at byte ``start`` of every block, as f32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, span: int) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 2n]: low nibbles of ``span`` bytes, then their high nibbles, and so
    on."""
    grouped = packed.reshape(packed.shape[0], -1, 1, span)
    return torch.cat((grouped & 0x0F, grouped >> 4), dim=2).flatten(1)


def _bit_fields(packed: torch.Tensor, span: int, width: int) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 8n / width]: of every ``span`` bytes field 0 of each, then field 1 ..."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    grouped = packed.reshape(packed.shape[0], -1, 1, span)
    return ((grouped >> shifts) & ((1 << width) - 1)).flatten(1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[blocks, 32] uint8 of 0 or 16: bit j of the little-endian u32 at ``start`` belongs to weight j."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, start : start + 4].unsqueeze(2) >> shifts) & 1
    return bits.flatten(1) << 4


def block_codes(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """The integer codes of blocks [blocks, bytes], before scales and offsets: uint8 [blocks, weights].

    Q8_0's signed codes come with 128 added. NOTE: a set high bit of Q3_K means that 4 is NOT subtracted.
    """
    if layout is BlockLayout.Q4_0:
        return _nibbles(blocks[:, 2:18], 16)
    if layout is BlockLayout.Q4_1:
        return _nibbles(blocks[:, 4:20], 16)
    if layout is BlockLayout.Q5_0:
        return _nibbles(blocks[:, 6:22], 16) | _fifth_bits(blocks, 2)
    if layout is BlockLayout.Q5_1:
        return _nibbles(blocks[:, 8:24], 16) | _fifth_bits(blocks, 4)
    if layout is BlockLayout.Q8_0:
        return blocks[:, 2:34] ^ 0x80
    if layout is BlockLayout.Q2_K:
        return _bit_fields(blocks[:, 16:80], 32, 2)
    if layout is BlockLayout.Q3_K:
        return _bit_fields(blocks[:, 32:96], 32, 2) | (_bit_fields(blocks[:, :32], 32, 1) << 2)
    if layout is BlockLayout.Q4_K:
        return _nibbles(blocks[:, 16:144], 32)
    if layout is BlockLayout.Q5_K:
        return _nibbles(blocks[:, 48:176], 32) | (_bit_fields(blocks[:, 16:48], 32, 1) << 4)
    return _nibbles(blocks[:, :128], 64) | (_bit_fields(blocks[:, 128:192], 32, 2) << 4)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _f16(blocks, 0) * (block_codes(blocks, BlockLayout.Q4_0).float() - 8.0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _f16(blocks, 0) * block_codes(blocks, BlockLayout.Q4_1).float() + _f16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _f16(blocks, 0) * (block_codes(blocks, BlockLayout.Q5_0).float() - 16.0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _f16(blocks, 0) * block_codes(blocks, BlockLayout.Q5_1).float() + _f16(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _f16(blocks, 0) * blocks[:, 2:34].contiguous().view(torch.int8).float()


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [blocks, 256] times one scale per span, scales [blocks, spans]."""
    return codes.view(codes.shape[0], scales.shape[1], -1) * scales.unsqueeze(2)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    # bytes: 0..15 scale | min << 4, 16..79 bit pairs, 80..81 d, 82..83 dmin
    scales = blocks[:, :16]
    codes = block_codes(blocks, BlockLayout.Q2_K).float()
    minima = _f16(blocks, 82) * (scales >> 4).float()
    return (_scaled(codes, _f16(blocks, 80) * (scales & 0x0F).float()) - minima.unsqueeze(2)).flatten(1)


def q3_k_scales(blocks: torch.Tensor) -> torch.Tensor:
    """The 16 scales of Q3_K blocks, -32 to 31: f32 [blocks, 16]."""
    low = _nibbles(blocks[:, 96:104], 8)  # scales 0..7 low nibble, 8..15 high nibble
    high = _bit_fields(blocks[:, 104:108], 4, 2)
    return (low | (high << 4)).float() - 32.0


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    # bytes: 0..31 high bits, 32..95 bit pairs, 96..107 scales, 108..109 d
    codes = block_codes(blocks, BlockLayout.Q3_K)
    return _scaled(codes.float() - 4.0, _f16(blocks, 108) * q3_k_scales(blocks)).flatten(1)


def k_scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima of Q4_K and Q5_K blocks: uint8 [blocks, 8] each, from bytes 4..15."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scales, minima


def _k_scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d * scale and dmin * min of Q4_K and Q5_K, each f32 [blocks, 8]: bytes 0..1 d, 2..3 dmin."""
    scales, minima = k_scales_and_minima(blocks)
    return _f16(blocks, 0) * scales.float(), _f16(blocks, 2) * minima.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales_and_minima(blocks)
    codes = block_codes(blocks, BlockLayout.Q4_K).float()
    return (_scaled(codes, scales) - minima.unsqueeze(2)).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales_and_minima(blocks)
    codes = block_codes(blocks, BlockLayout.Q5_K)
    return (_scaled(codes.float(), scales) - minima.unsqueeze(2)).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # bytes: 0..127 low nibbles, 128..191 high bit pairs, 192..207 int8 scales, 208..209 d
    codes = block_codes(blocks, BlockLayout.Q6_K)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(codes.float() - 32.0, _f16(blocks, 208) * scales).flatten(1)


_DECODERS: dict[BlockLayout, Callable[[torch.Tensor], torch.Tensor]] = {
    BlockLayout.Q4_0: _q4_0,
    BlockLayout.Q4_1: _q4_1,
    BlockLayout.Q5_0: _q5_0,
    BlockLayout.Q5_1: _q5_1,
    BlockLayout.Q8_0: _q8_0,
    BlockLayout.Q2_K: _q2_k,
    BlockLayout.Q3_K: _q3_k,
    BlockLayout.Q4_K: _q4_k,
    BlockLayout.Q5_K: _q5_k,
    BlockLayout.Q6_K: _q6_k,
}


def _check_rows(data: torch.Tensor, layout: BlockLayout, in_features: int) -> None:
    expected = GGML_TYPES_BY_NAME[layout.value].row_bytes(in_features)
    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] != expected:
        raise ValueError(
            f"{layout.value} rows of {in_features} weights are uint8 [N, {expected}], "
            f"not {data.dtype} {list(data.shape)}"
        )


def dequantize(data: torch.Tensor, layout: BlockLayout, in_features: int) -> torch.Tensor:
    """Decode block-quantized rows: uint8 [N, row bytes] -> f32 [N, in_features], on the device of ``data``.

    Bit for bit what gguf.quants.dequantize gives. Scratch memory is bounded. ValueError if the shapes
    disagree.
    """
    _check_rows(data, layout, in_features)
    rows = data.shape[0]
    out = torch.empty((rows, in_features), dtype=torch.float32, device=data.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, in_features))
    for start in range(0, rows, step):
        chunk = data[start : start + step]
        blocks = chunk.reshape(-1, block_bytes(layout))
        out[start : start + step] = _DECODERS[layout](blocks).view(chunk.shape[0], in_features)
    return out


def dequantize_rows(
    data: torch.Tensor, layout: BlockLayout, in_features: int, row_ids: torch.Tensor
) -> torch.Tensor:
    """Decode chosen rows only (an embedding lookup): row_ids int64 [M] -> f32 [M, in_features]."""
    return dequantize(data.index_select(0, row_ids), layout, in_features)


def encode_q8_0(weights: torch.Tensor, peaks: Sequence[int] = (127,)) -> torch.Tensor:
    """Encode f32 [N, K] as Q8_0: uint8 [N, K / 32 * 34], K a multiple of 32.

    The largest magnitude of each block gets one of the codes ``peaks``, whichever leaves the least squared
    error: a source whose values lie on a coarse integer grid is then held without loss. ValueError if a scale
    exceeds f16.
    """
    rows, in_features = weights.shape
    blocks = weights.reshape(-1, 32)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    best_error = torch.full_like(largest, float("inf"))
    best_scale = torch.zeros_like(largest, dtype=torch.float16)
    best_codes = torch.zeros_like(blocks, dtype=torch.int8)
    for peak in peaks:
        scale = (largest / peak).half()  # codes are chosen for the scale as it is stored
        decoded_scale = scale.float()
        codes = (blocks / decoded_scale).nan_to_num(0.0, 127.0, -127.0).round_().clamp_(-127, 127)
        error = (codes * decoded_scale - blocks).square_().sum(dim=1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better, codes.to(torch.int8), best_codes)
    if not bool(torch.isfinite(best_error).all()):
        raise ValueError("a weight is not finite or too large for Q8_0")
    packed = torch.cat((best_scale.view(torch.uint8), best_codes.view(torch.uint8)), dim=1)
    return packed.view(rows, in_features // 32 * 34)
