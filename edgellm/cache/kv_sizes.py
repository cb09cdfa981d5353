"""Bytes of a KV cache by type, in whole blocks and with windows: integers, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

KV_BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
INT4_GROUP = 32
"""Elements of an int4 row that share an f16 scale."""


def head_bytes(kv_dtype: str, dim: int) -> int:
    """Bytes of K or V of one head at one position, its f16 scales included."""
    if kv_dtype == "int4":
        return dim // 2 + 2 * (dim // INT4_GROUP)
    if kv_dtype == "int8":
        return dim + 2
    return dim * KV_BITS[kv_dtype] // 8


def window_tokens(tokens: int, window: int | None, block_size: int | None) -> int:
    """Positions of a sequence of ``tokens`` for which a layer keeps KV while it decodes.

    A window keeps ``window`` positions; in blocks it touches at most ceil((window - 1) / block) + 1 of them.
    """
    if block_size is None:
        return tokens if window is None else min(tokens, window)
    blocks = -(-tokens // block_size)
    if window is not None:
        blocks = min(blocks, -(-(window - 1) // block_size) + 1)
    return blocks * block_size


def sequence_kv_bytes(
    layers: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int,
    tokens: int,
    kv_dtype: str,
    block_size: int | None = None,
) -> int:
    """Bytes of K and V of one sequence. ``layers`` holds each layer's window, None for all positions.

    Without ``block_size`` exact positions are counted, with it whole blocks.
    """
    per_position = 2 * num_kv_heads * head_bytes(kv_dtype, head_dim)
    return sum(window_tokens(tokens, window, block_size) for window in layers) * per_position
