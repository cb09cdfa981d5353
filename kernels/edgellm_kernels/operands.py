"""What the ops take and return besides tensors: prepared activations and an attention layer's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Prepared:
    """Activations that are ready for the linears that share them (q, k and v; gate and up).

    A backend that multiplies quantized activations quantizes them once, here; torch keeps the floats.
    """

    values: torch.Tensor
    """[tokens, K] in the backend's compute type"""
    quantized: Any = None
    """The backend's own form, opaque to everybody else."""

    @property
    def num_tokens(self) -> int:
        return self.values.shape[0]


@dataclass(frozen=True)
class HeadShape:
    """The heads of one attention layer. Row layout of a fused qkv result: all q heads, all k heads, all v
    heads.
    """

    num_heads: int
    num_kv_heads: int
    k_dim: int
    """Elements of a query and of a key head."""
    v_dim: int

    @property
    def q_width(self) -> int:
        return self.num_heads * self.k_dim

    @property
    def k_width(self) -> int:
        return self.num_kv_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.num_kv_heads * self.v_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + self.k_width + self.v_width
