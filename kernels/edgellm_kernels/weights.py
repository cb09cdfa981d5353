"""The forms in which a linear layer's weight is held, and the only place that changes a layout."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import torch


class BlockLayout(enum.Enum):
    """Row-major block formats as they lie in a GGUF file. Blocks run along K (in_features); fields are little endian.

    The byte order within a block is the contract between toolkit, readers and kernels. In every 4-bit type the low
    nibble of byte j is element j and the high nibble element j + half of the span that the bytes cover.
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
    """84 bytes, 256 weights: 16 bytes scale (low nibble) and min (high); 64 bytes of bit pairs; f16 d, f16 dmin."""
    Q3_K = "Q3_K"
    """110 bytes, 256 weights: 32 bytes of high bits; 64 bytes of bit pairs; 12 bytes of 6-bit scales; f16 d."""
    Q4_K = "Q4_K"
    """144 bytes, 256 weights: f16 d, f16 dmin; 12 bytes of 6-bit scales and mins; 128 nibble bytes (64-weight spans)."""
    Q5_K = "Q5_K"
    """176 bytes, 256 weights: f16 d, f16 dmin; 12 bytes of scales and mins; 32 bytes of fifth bits; 128 nibble bytes."""
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


@dataclass(frozen=True)
class StackedWeight:
    """Linears that share their input, as one: the rows of the parts one after another (q, k, v or gate, up).

    ``prepare`` joins the parts where their forms are equal; where they differ a backend runs them one by one.
    """

    parts: tuple[DenseWeight | BlockQuantWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


LinearWeight: TypeAlias = DenseWeight | BlockQuantWeight | StackedWeight
"""Int4Weight and Int8Weight (GPTQ, AWQ) join this union with their readers; ExpertWeights is a reserved name."""
