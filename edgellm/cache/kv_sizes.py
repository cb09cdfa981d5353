"""Bytes of a KV cache by type, in whole blocks and with windows: integers, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.block_pool import blocks_for

KV_BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
INT4_GROUP = 32
"""Elements of an int4 row that share an f16 scale."""
SCALED_KV = ("fp8", "int8", "int4")
"""Types whose rows have f16 scales: one each, int4's one per INT4_GROUP elements."""
KV_ON_TORCH = ("fp8", "int4")
"""Types whose rows torch writes and reads beside native kernels, which have none for them."""
TAIL_SLOTS = 16 + 128 + 32
"""Positions of a running sequence that an int4 cache keeps in bf16 too: the first block, the last ones, and
room for rejected drafts."""


def auto_kv_types(device: str, *, exact: bool) -> tuple[str, ...]:
    """What ``--kv-dtype auto`` takes on a device, best first. ``exact``: linears multiply unrounded values,
    so that pages of 16 bits would be what rounds most; beside activations of 16 bits they cost nothing that
    a reader could find, and a long context decodes half as fast again.
    """
    if device != "cpu":
        return "bf16", "int8"
    return ("f32", "bf16", "int8") if exact else ("f16", "int8")


def head_bytes(kv_dtype: str, dim: int) -> int:
    """Bytes of K or V of one head at one position, its f16 scales included."""
    num_scales = 0 if kv_dtype not in SCALED_KV else dim // INT4_GROUP if kv_dtype == "int4" else 1
    return dim * KV_BITS[kv_dtype] // 8 + 2 * num_scales


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


def pool_blocks(
    windows: Sequence[int | None],
    context: int,
    chunk: int,
    block_size: int,
    *,
    kept: int | None = None,
    num_sequences: int = 1,
    lookahead: int = 0,
    num_contexts: int = 1,
) -> tuple[int, ...]:
    """Blocks of the whole cache, by layer group, ``windows`` being those of the groups.

    Room for ``num_contexts`` sequences of ``context`` tokens and for the windows of ``num_sequences``, longer
    by the ``lookahead`` that a sequence may draft. One of these runs a ``chunk`` of its prompt and the others
    decode. Where a group keeps all positions, its number of blocks is enough for everybody's windows.
    ``kept``: positions that lossy eviction leaves at most in groups without a window.
    """
    keeps_all = kept is None and any(window is None for window in windows)
    whole = num_contexts * blocks_for(context, block_size)
    found = []
    for window in windows:
        if window is None:
            blocks = num_contexts * blocks_for(context if kept is None else min(context, kept), block_size)
        else:
            blocks = blocks_for(context, block_size, window, chunk + 2 * lookahead)
            blocks += (num_sequences - 1) * blocks_for(context, block_size, window, 1 + 2 * lookahead)
            blocks = min(blocks, whole) if keeps_all else blocks
        found.append(blocks)
    return tuple(found)


def pool_bytes(
    layers: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int,
    context: int,
    kv_dtype: str,
    chunk: int,
    block_size: int,
    *,
    kept: int | None = None,
    num_sequences: int = 1,
    lookahead: int = 0,
    num_contexts: int = 1,
) -> int:
    """Bytes of the cache of ``pool_blocks``, its unquantized tails included; ``layers`` holds each layer's
    window, None for all positions."""
    groups = list(dict.fromkeys(layers))
    blocks = pool_blocks(
        groups,
        context,
        chunk,
        block_size,
        kept=kept,
        num_sequences=num_sequences,
        lookahead=lookahead,
        num_contexts=num_contexts,
    )
    by_window = dict(zip(groups, blocks, strict=True))
    per_head = head_bytes(kv_dtype, head_dim)
    pages = sum(by_window[window] for window in layers) * block_size * 2 * num_kv_heads * per_head
    if kv_dtype != "int4":
        return pages
    return pages + num_sequences * TAIL_SLOTS * len(layers) * 2 * num_kv_heads * head_bytes("bf16", head_dim)
