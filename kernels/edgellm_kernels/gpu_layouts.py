"""Packs weights into planes for the GPU kernels: the numbers of the file, in loads of 16 bytes.

Every form cuts K into blocks of 32 weights, and each block into 4 lanes of 8: lane i holds the weights
i + 4 p of its block at the places p = 0 to 7. A thread takes a block in one load, and the
activations that it needs for a place are 4 neighbours, in their natural order. In a lane, place p is field
n = p // 2 + 4 (p % 2): places 2j and 2j + 1 lie 16 bits apart, so that one mask makes two f16 of them.

    4 bits     [N, K / 2] bytes, a u32 per lane: field n in bits 4n .. 4n + 3
    2 bits     [N, K / 4] bytes, a u16 per lane: field n in bits 2n, 2n + 1
    8 bits     [N, K] bytes, two u32 per lane, the first ones of a block's lanes before the second ones:
               fields 0, 1, 4, 5 are the bytes of the first, 2, 3, 6, 7 of the second; signed codes have 128
               added
    high 1     [N, K / 8] bytes, a byte per lane: bit n (above the low bits of the code)
    high 2     [N, K / 4] bytes, as 2 bits

The scales of a block lie side by side in their own planes, see ``ScaleKind``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edgellm_kernels import ggml_blocks
from edgellm_kernels.int_groups import codes_of, dequantize_groups
from edgellm_kernels.weight_forms import (
    BlockLayout,
    BlockQuantWeight,
    DenseWeight,
    HeldPart,
    IntWeight,
    LinearWeight,
    PlaneWeight,
    StackedWeight,
)

BLOCK = 32
LANES = 4
_FIELDS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The place at each field."""
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The field at each place."""
_BYTES = [0, 1, 4, 5, 2, 3, 6, 7]
"""The field at each byte of 8-bit codes; its own inverse."""
_CHUNK_ELEMENTS = 1 << 22
"""Weights packed or decoded at a time: bounds the scratch memory."""


class ScaleKind(enum.IntEnum):
    """What the scale planes hold, a block at a time. f32 arithmetic in the order written here."""

    F16 = 0
    """scales [N, K/32] f16: w = s (q - offset)"""
    F16_MIN = 1
    """scales [N, K/32, 2] f16: w = s q + m"""
    U8_MIN = 2
    """scales [N, K/32, 2] uint8, supers [N, K/256, 2] f16: w = (d s) q - (dmin m)"""
    I8_HALVES = 3
    """scales [N, K/32, 2] int8, one per 16 weights, supers [N, K/256] f16: w = (d s) (q - offset)"""
    NIBBLE_HALVES = 4
    """scales [N, K/32, 2] uint8 (low nibble s, high m) per 16, supers as U8_MIN: w = (d s) q - (dmin m)"""
    GROUP = 5
    """scales [N, groups] f16 or f32, zeros [N, groups] uint8: w = s (q - z)"""


@dataclass(frozen=True)
class PlaneForm:
    """How the codes and scales of one weight are held."""

    low_bits: int
    """2, 4 or 8"""
    high_bits: int
    """0, 1 or 2, above the low ones"""
    offset: int
    """Subtracted from a code; with GROUP the zero point is."""
    scale_kind: ScaleKind


FORMS = {
    "Q4_0": PlaneForm(4, 0, 8, ScaleKind.F16),
    "Q4_1": PlaneForm(4, 0, 0, ScaleKind.F16_MIN),
    "Q5_0": PlaneForm(4, 1, 16, ScaleKind.F16),
    "Q5_1": PlaneForm(4, 1, 0, ScaleKind.F16_MIN),
    "Q8_0": PlaneForm(8, 0, 128, ScaleKind.F16),
    "Q2_K": PlaneForm(2, 0, 0, ScaleKind.NIBBLE_HALVES),
    "Q3_K": PlaneForm(2, 1, 4, ScaleKind.I8_HALVES),
    "Q4_K": PlaneForm(4, 0, 0, ScaleKind.U8_MIN),
    "Q5_K": PlaneForm(4, 1, 0, ScaleKind.U8_MIN),
    "Q6_K": PlaneForm(4, 2, 32, ScaleKind.I8_HALVES),
    "INT4": PlaneForm(4, 0, 0, ScaleKind.GROUP),
    "INT8": PlaneForm(8, 0, 0, ScaleKind.GROUP),
}
"""By the name in PlaneWeight.form: the GGUF types, and integer grids of up to 4 and of 8 bits."""


def pack_codes(codes: torch.Tensor, form: PlaneForm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """uint8 codes [rows, K] -> the low plane and the plane of the high bits, see the module's docstring."""
    rows, k = codes.shape
    lanes = codes.view(rows, k // BLOCK, 8, LANES).transpose(2, 3)[
        ..., _FIELDS
    ]  # [rows, blocks, lane, field]
    high = _join(lanes >> form.low_bits, form.high_bits) if form.high_bits else None
    if form.low_bits == 8:
        words = lanes[..., _BYTES].view(rows, k // BLOCK, LANES, 2, 4)
        return words.transpose(2, 3).reshape(rows, k), high
    return _join(lanes & ((1 << form.low_bits) - 1), form.low_bits), high


def _join(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of so many bits, the first lowest: [rows, blocks, lanes, 8] -> [rows, bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    grouped = codes.reshape(codes.shape[0], -1, 8 // bits)
    return (grouped << shifts).sum(-1, dtype=torch.uint8)


def _split(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``_join``: [rows, bytes] -> [rows, blocks, lanes, 8]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    fields = (plane.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.reshape(plane.shape[0], -1, LANES, 8)


def unpack_codes(low: torch.Tensor, high: torch.Tensor | None, form: PlaneForm) -> torch.Tensor:
    """The inverse of ``pack_codes``: uint8 [rows, K]."""
    rows = low.shape[0]
    if form.low_bits == 8:
        words = low.view(rows, -1, 2, LANES, 4).transpose(2, 3)
        lanes = words.reshape(rows, -1, LANES, 8)[..., _BYTES]
    else:
        lanes = _split(low, form.low_bits)
    if high is not None:
        lanes = lanes | (_split(high, form.high_bits) << form.low_bits)
    return lanes[..., _PLACES].transpose(2, 3).reshape(rows, -1)


def _k_pairs(blocks: torch.Tensor) -> torch.Tensor:
    """The 6-bit scales and minima of Q4_K and Q5_K: uint8 [blocks, 8, 2]."""
    scales, minima = ggml_blocks.k_scales_and_minima(blocks)
    return torch.stack((scales, minima), dim=2)


def _parts(
    layout: BlockLayout, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scale plane and supers of GGUF blocks [blocks, bytes], still block by block."""
    codes = ggml_blocks.block_codes(blocks, layout)
    halves = blocks.view(blocks.shape[0], -1)
    if layout in (BlockLayout.Q4_0, BlockLayout.Q5_0, BlockLayout.Q8_0):
        return codes, halves[:, :2], None
    if layout in (BlockLayout.Q4_1, BlockLayout.Q5_1):
        return codes, halves[:, :4], None
    if layout is BlockLayout.Q2_K:
        return codes, blocks[:, :16], blocks[:, 80:84]
    if layout is BlockLayout.Q3_K:
        return codes, ggml_blocks.q3_k_scales(blocks).to(torch.int8).view(torch.uint8), blocks[:, 108:110]
    if layout is BlockLayout.Q6_K:
        return codes, blocks[:, 192:208], blocks[:, 208:210]
    return codes, _k_pairs(blocks).flatten(1), blocks[:, :4]


def _pack_blocks(part: BlockQuantWeight, device: torch.device) -> PlaneWeight:
    rows, k = part.shape
    form = FORMS[part.layout.value]
    planes: list[list[torch.Tensor]] = [[], [], [], []]
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows, step):
        chunk = part.data[start : start + step].to(device)
        blocks = chunk.reshape(-1, ggml_blocks.block_bytes(part.layout))
        codes, scales, halves = _parts(part.layout, blocks)
        low, high = pack_codes(codes.reshape(chunk.shape[0], k), form)
        for plane, piece in zip(planes, (low, high, scales, halves), strict=True):
            if piece is not None:
                plane.append(piece.reshape(chunk.shape[0], -1))
    low, scales = torch.cat(planes[0]), torch.cat(planes[2])
    supers = torch.cat(planes[3]) if planes[3] else None
    return PlaneWeight(
        form=part.layout.value,
        codes=low,
        high=torch.cat(planes[1]) if planes[1] else None,
        scales=_typed(scales, form.scale_kind),
        supers=None if supers is None else supers.contiguous().view(torch.float16),
        zeros=None,
        order=None,
        group_blocks=1,
        out_features=rows,
        in_features=k,
        bias=None if part.bias is None else part.bias.to(device=device, dtype=torch.float32),
    )


def _typed(scales: torch.Tensor, kind: ScaleKind) -> torch.Tensor:
    if kind in (ScaleKind.F16, ScaleKind.F16_MIN):
        return scales.contiguous().view(torch.float16)
    return scales.contiguous().view(torch.int8) if kind is ScaleKind.I8_HALVES else scales.contiguous()


def _pack_groups(part: IntWeight, device: torch.device) -> PlaneWeight | None:
    """None where groups are no whole blocks: kernels then take the weight as floats."""
    rows, k = part.shape
    size = min(part.group_size, k)
    if k % BLOCK or size % BLOCK:
        return None
    order = None
    if part.group_index is not None:
        index = part.group_index.long()
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order], torch.arange(k, device=index.device) // size):
            return None
    name = "INT8" if part.bits == 8 else "INT4"
    halves = part.scales.to(torch.float16)
    exact = torch.equal(halves.float(), part.scales.float())
    zeros = part.zeros
    if zeros is None:
        zeros = torch.full(part.scales.shape, 1 << (part.bits - 1), dtype=torch.uint8)
    codes = []
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows, step):
        rows_codes = codes_of(part, start, min(rows, start + step))
        rows_codes = rows_codes if order is None else rows_codes[:, order]
        codes.append(pack_codes(rows_codes.contiguous().to(device), FORMS[name])[0])
    return PlaneWeight(
        form=name,
        codes=torch.cat(codes),
        high=None,
        scales=(halves if exact else part.scales.float()).to(device).contiguous(),
        supers=None,
        zeros=zeros.to(device).contiguous(),
        order=None if order is None else order.to(device),
        group_blocks=size // BLOCK,
        out_features=rows,
        in_features=k,
        bias=None if part.bias is None else part.bias.to(device=device, dtype=torch.float32),
    )


def pack_part(part: HeldPart, device: torch.device, dtype: torch.dtype) -> HeldPart:
    """One matrix in planes; floats of ``dtype`` where it is dense or its groups fit no form of planes."""
    bias = None if part.bias is None else part.bias.to(device=device, dtype=torch.float32)
    if isinstance(part, BlockQuantWeight):
        return _pack_blocks(part, device)
    if isinstance(part, IntWeight):
        packed = _pack_groups(part, device)
        return packed or DenseWeight(dequantize_groups(part, dtype).to(device), bias)
    if isinstance(part, DenseWeight):
        return DenseWeight(part.data.to(device=device, dtype=dtype), bias)
    raise TypeError(f"a {type(part).__name__} is packed already")


def _joins(first: HeldPart, second: HeldPart) -> bool:
    """Whether both parts can be one matrix."""
    if isinstance(first, DenseWeight) and isinstance(second, DenseWeight):
        return True
    if not (isinstance(first, PlaneWeight) and isinstance(second, PlaneWeight)):
        return False
    if (first.order is None) != (second.order is None):
        return False
    same_order = first.order is None or second.order is None or torch.equal(first.order, second.order)
    shapes = (first.form, first.group_blocks, first.scales.dtype, first.in_features)
    return same_order and shapes == (
        second.form,
        second.group_blocks,
        second.scales.dtype,
        second.in_features,
    )


def _join_rows(parts: Sequence[HeldPart]) -> HeldPart:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    bias = None
    if any(part.bias is not None for part in parts):
        biases = [
            part.bias
            if part.bias is not None
            else first_codes(part).new_zeros(part.shape[0], dtype=torch.float32)
            for part in parts
        ]
        bias = torch.cat(biases)
    if isinstance(first, DenseWeight):
        return DenseWeight(torch.cat([first_codes(part) for part in parts]), bias)
    assert isinstance(first, PlaneWeight)

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return replace(
        first,
        codes=joined("codes"),
        high=None if first.high is None else joined("high"),
        scales=joined("scales"),
        supers=None if first.supers is None else joined("supers"),
        zeros=None if first.zeros is None else joined("zeros"),
        bias=bias,
        out_features=sum(part.shape[0] for part in parts),
    )


def first_codes(part: HeldPart) -> torch.Tensor:
    """The tensor that holds a part's floats or codes."""
    return part.codes if isinstance(part, PlaneWeight) else part.data


def pack_weight(weight: LinearWeight, device: torch.device, dtype: torch.dtype) -> LinearWeight:
    """A weight in planes; neighbouring parts of one form become one matrix."""
    if not isinstance(weight, StackedWeight):
        return pack_part(weight, device, dtype)
    groups: list[list[HeldPart]] = []
    for part in weight.parts:
        packed = pack_part(part, device, dtype)
        if groups and _joins(groups[-1][0], packed):
            groups[-1].append(packed)
        else:
            groups.append([packed])
    joined = tuple(_join_rows(group) for group in groups)
    return joined[0] if len(joined) == 1 else StackedWeight(joined)


def decode_planes(weight: PlaneWeight, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Rows start to end as f32 [rows, K], the same bits as decoding the file: the twin of the kernels."""
    form = FORMS[weight.form]
    rows = slice(start, weight.out_features if end is None else end)
    codes = unpack_codes(weight.codes[rows], None if weight.high is None else weight.high[rows], form)
    count, k = codes.shape
    scales = weight.scales[rows]
    steps = codes.float() - float(form.offset)
    kind = form.scale_kind
    if kind is ScaleKind.GROUP:
        assert weight.zeros is not None
        index = torch.arange(k, device=codes.device) // (BLOCK * weight.group_blocks)
        steps = (steps - weight.zeros[rows].float()[:, index]).mul_(scales.float()[:, index])
        if weight.order is None:
            return steps
        out = torch.empty_like(steps)
        out[:, weight.order] = steps
        return out
    if kind is ScaleKind.F16:
        return (steps.view(count, -1, BLOCK) * scales.float().unsqueeze(2)).view(count, k)
    pairs = scales.view(count, -1, 2)
    if kind is ScaleKind.F16_MIN:
        scale, minimum = pairs.float().unbind(2)
        return (scale.unsqueeze(2) * steps.view(count, -1, BLOCK) + minimum.unsqueeze(2)).view(count, k)
    assert weight.supers is not None
    supers = weight.supers[rows].float()
    if kind is ScaleKind.I8_HALVES:
        scale = supers.unsqueeze(2) * scales.view(count, -1, 16).float()
        return (steps.view(count, -1, 16) * scale.view(count, -1, 1)).view(count, k)
    d, dmin = supers.view(count, -1, 2, 1).unbind(2)
    if kind is ScaleKind.NIBBLE_HALVES:
        scale, minimum = scales & 0x0F, scales >> 4
    else:
        scale, minimum = pairs.unbind(2)
    span = k // scale.shape[1]
    scale = (d * scale.view(count, d.shape[1], -1).float()).view(count, -1, 1)
    minimum = (dmin * minimum.view(count, d.shape[1], -1).float()).view(count, -1, 1)
    return (steps.view(count, -1, span) * scale - minimum).view(count, k)
