"""The forms in which a linear layer's weight is held."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch


class BlockLayout(enum.Enum):
    """Row-major block formats as in a GGUF file. Blocks run along K (in_features); fields are little endian.

    The byte order within a block is the contract between toolkit, readers and kernels. In every 4-bit type
    the low nibble of byte j is element j and the high nibble element j + half of the span that the bytes
    cover.
    """

    Q4_0 = "Q4_0"
    """18 bytes, 32 weights: f16 d; 16 nibble bytes. w = d (q - 8)"""
    Q4_1 = "Q4_1"
    """20 bytes, 32 weights: f16 d, f16 m; 16 nibble bytes. w = d q + m"""
    Q5_0 = "Q5_0"
    """22 bytes, 32 weights: f16 d; u32 fifth bits (bit j -> weight j); 16 nibble bytes. w = d (q - 16)"""
    Q5_1 = "Q5_1"
    """24 bytes, 32 weights: f16 d, f16 m; u32 fifth bits; 16 nibble bytes. w = d q + m"""
    Q8_0 = "Q8_0"
    """34 bytes, 32 weights: f16 d; 32 int8. w = d q"""
    Q2_K = "Q2_K"
    """84 bytes, 256 weights: 16 bytes scale (low nibble) and min (high); 64 bytes of bit pairs; f16 d, f16
    dmin.
    """
    Q3_K = "Q3_K"
    """110 bytes, 256 weights: 32 bytes of high bits; 64 bytes of bit pairs; 12 bytes of 6-bit scales; f16 d.
    """
    Q4_K = "Q4_K"
    """144 bytes, 256 weights: f16 d, f16 dmin; 12 bytes of 6-bit scales and mins; 128 nibble bytes (64-weight
    spans).
    """
    Q5_K = "Q5_K"
    """176 bytes, 256 weights: f16 d, f16 dmin; 12 bytes of scales and mins; 32 bytes of fifth bits; 128
    nibble bytes.
    """
    Q6_K = "Q6_K"
    """210 bytes, 256 weights: 128 bytes of low nibbles; 64 bytes of high bit pairs; 16 int8 scales; f16 d."""


@dataclass(frozen=True)
class DenseWeight:
    """A weight stored as floating point, [N, K] row-major."""

    data: torch.Tensor
    """[N, K] f32, f16 or bf16; may be a view of a memory-mapped file."""
    bias: torch.Tensor | None = None
    """[N] f32"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True)
class BlockQuantWeight:
    """A GGUF block-quantized weight, bytes as in the file."""

    data: torch.Tensor
    """[N, bytes per row] uint8; may be a view of a memory-mapped file."""
    layout: BlockLayout
    in_features: int
    bias: torch.Tensor | None = None
    """[N] f32"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class CodeLayout(enum.Enum):
    """Where the integer codes of a grouped weight lie. The rows are N; columns run along K (in_features).

    Readers bring GPTQ (packed along K, transposed), AWQ (packed along N, interleaved) and compressed-tensors
    into one of these two; kernels know no other.
    """

    NIBBLES = "NIBBLES"
    """[N, K / 2] bytes: the low nibble of byte j is column 2j, the high nibble column 2j + 1. Codes of 2, 3
    and 4 bits.
    """
    BYTES = "BYTES"
    """[N, K] bytes: byte k is column k. Codes of 8 bits, 0 to 255."""


@dataclass(frozen=True)
class IntWeight:
    """A weight on an integer grid (GPTQ, AWQ): w[n, k] = scales[n, g] * (code[n, k] - zeros[n, g]).

    The group g of column k is ``group_index[k]``, or k // group_size where that is None. f32 arithmetic:
    the difference is exact, the product is rounded once.
    """

    layout: ClassVar[CodeLayout]

    data: torch.Tensor
    """uint8, see ``layout``."""
    scales: torch.Tensor
    """[N, groups] f16, bf16 or f32; negative ones are allowed."""
    bits: int
    """2, 3, 4 or 8: codes are 0 to 2^bits - 1."""
    group_size: int
    """Columns of a group (of the last one perhaps fewer); K where a row has one group."""
    in_features: int
    zeros: torch.Tensor | None = None
    """[N, groups] uint8; None is 2^(bits - 1) everywhere (symmetric)."""
    group_index: torch.Tensor | None = None
    """[K] int32: the group of each column, where they were quantized in another order (act-order)."""
    bias: torch.Tensor | None = None
    """[N] f32"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, self.zeros, self.group_index, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


class Int4Weight(IntWeight):
    """Codes of up to four bits, two in a byte."""

    layout = CodeLayout.NIBBLES


class Int8Weight(IntWeight):
    """Codes of eight bits."""

    layout = CodeLayout.BYTES


@dataclass(frozen=True)
class NativeWeight:
    """A weight packed for the native library: eight rows of the file interleaved (native/packed.h)."""

    data: torch.Tensor
    """uint8 [bytes]: the file's size, rows rounded up to a multiple of 8."""
    type_id: int
    """The type of the file's blocks, or of dense values (ggml_types), or a grid (native_grids)."""
    out_features: int
    in_features: int
    bias: torch.Tensor | None = None
    """[N] f32"""
    order: torch.Tensor | None = None
    """int64 [K]: column j is column order[j] of the file (act-order); None is the file's order."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.bias, self.order) if part is not None)


@dataclass(frozen=True)
class PlaneWeight:
    """A weight in planes for the GPU kernels: codes apart from scales, see gpu_layouts."""

    form: str
    """A key of gpu_layouts.FORMS."""
    codes: torch.Tensor
    """uint8 [N, bytes of the low bits], rows of a multiple of 8 bytes (16 with 4 and 8 bits)"""
    high: torch.Tensor | None
    """uint8 [N, bytes of the high bits]"""
    scales: torch.Tensor
    """[N, ..], see gpu_layouts.ScaleKind"""
    supers: torch.Tensor | None
    """f16 [N, ..]: what scales and minima of 256 weights are multiplied with."""
    zeros: torch.Tensor | None
    """uint8 [N, groups]"""
    order: torch.Tensor | None
    """int64 [K]: column j of the codes is column order[j] of the file (act-order)."""
    group_blocks: int
    """Blocks of 32 that share a scale."""
    out_features: int
    in_features: int
    bias: torch.Tensor | None = None
    """[N] f32"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.high, self.scales, self.supers, self.zeros, self.order, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


LinearPart: TypeAlias = DenseWeight | BlockQuantWeight | Int4Weight | Int8Weight
"""One matrix of a file."""
HeldPart: TypeAlias = LinearPart | NativeWeight | PlaneWeight
"""One matrix, as in a file or packed."""


@dataclass(frozen=True)
class StackedWeight:
    """Linears that share their input, as one: the rows of the parts one after another (q, k, v or gate, up).

    ``prepare`` joins the parts where their forms are equal; where they differ a backend runs them one by one.
    """

    parts: tuple[HeldPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


LinearWeight: TypeAlias = HeldPart | StackedWeight
"""ExpertWeights is a reserved name."""
