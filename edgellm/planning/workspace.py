"""Bytes that a forward pass needs beside weights and KV, and what the process takes before any model."""

from __future__ import annotations

from edgellm.planning.shape import ModelShape

PREFILL_CHUNK = 512
"""Tokens of a prompt that run at once."""
NATIVE, TORCH = "native", "torch"

PROCESS_BYTES = 256_000_000
"""Python with torch and everything else that a first answer imports, measured with CPU builds on Linux."""
TOKEN_BYTES = 850
"""Of a vocabulary's entry in the tokenizer with its merges; half of that without merges."""

_SAMPLED_BYTES = 64
"""Per entry of the vocabulary, while one token is drawn: scores and noise in f64, ids, hashes."""
_NATIVE_FIXED = 3_000_000
"""Tiles of attention, tables and the batch's own tensors."""
_TORCH_FIXED = 24_000_000
"""Packed operands of matrix products, and what the allocator keeps between two sizes."""
_TILE_BYTES = 8 << 20
"""Of a tile's scores, and of its decoded keys and values (attention_torch.py)."""


def workspace_bytes(
    shape: ModelShape,
    batch: int = 1,
    context: int | None = None,
    chunk: int = PREFILL_CHUNK,
    *,
    kernels: str = NATIVE,
    drafted: int = 0,
    decodes_kv: bool = False,
) -> int:
    """Most bytes alive at once in a step of ``chunk`` prompt tokens beside ``batch`` - 1 decoding sequences.

    The native step program keeps its buffers, all of them at once; torch's come and go, so only the widest
    stretch of a layer counts. ``drafted``: tokens that a sequence may verify besides its next one.
    ``decodes_kv``: pages are not f32, so torch decodes tiles of them.
    """
    rows = min(chunk, context or chunk) + batch - 1
    query = shape.num_heads * shape.head_dim
    fused = query + 2 * shape.num_kv_heads * shape.head_dim
    head = 4 * batch * (1 + drafted) * shape.vocab_size + _SAMPLED_BYTES * shape.vocab_size
    if kernels == NATIVE:
        angles = shape.head_dim * len(set(shape.windows))
        floats = 3 * shape.hidden_size + fused + 2 * query + 3 * shape.ffn_size + angles
        widest = max(shape.hidden_size, query, shape.ffn_size)
        # Besides the widest input as 16-bit integers with their scales: 80 bytes for 32.
        return rows * (4 * floats + widest * 80 // 32) + head + _NATIVE_FIXED
    tiles = _TILE_BYTES * (3 if decodes_kv else 1)
    attention = 4 * rows * (2 * shape.hidden_size + fused + 3 * query) + 2 * tiles
    feed_forward = 4 * rows * (3 * shape.hidden_size + 3 * shape.ffn_size)
    return max(attention, feed_forward) + head + _TORCH_FIXED


def process_bytes(shape: ModelShape) -> int:
    """What the program takes beside the model on the CPU: imports and the tokenizer."""
    return PROCESS_BYTES + TOKEN_BYTES * shape.vocab_size
