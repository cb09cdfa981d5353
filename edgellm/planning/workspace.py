"""Bytes that a forward pass needs beside weights and KV, and what the process takes before any model."""

from __future__ import annotations

from edgellm.planning.shape import ModelShape

PREFILL_CHUNK = 512
"""Tokens of a prompt that run at once."""
NATIVE, TORCH = "native", "torch"

PROCESS_BYTES = 256_000_000
"""Python with torch and everything else that a first answer imports, measured with CPU builds on Linux."""
TOKEN_BYTES, MERGED_TOKEN_BYTES = 430, 850
"""Of a vocabulary's entry in the tokenizer, of one with scores and of one with merges."""

_SAMPLED_BYTES = 70
"""Per entry of the vocabulary, while one token is drawn: scores and noise in f64, ids, hashes."""
_NATIVE_SHARE = 1.02
"""Of the step program's buffers in whole pages, with what the allocator keeps beside them."""
_NATIVE_FIXED = 4_000_000
"""Tiles of attention, tables and the batch's own tensors."""
_TORCH_SHARE = 1.5
"""Torch's allocator keeps half as much again of what came and went."""
_TILE_ELEMENTS = 1 << 21
"""Scores of a tile, and elements of its keys and of its values (attention_torch.py)."""
_TILE_QUERIES = 256


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

    The native step program keeps its buffers, all of them at once; torch's come and go with every op.
    ``drafted``: tokens that a sequence may verify besides its next one.
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
        return int(_NATIVE_SHARE * rows * (4 * floats + widest * 80 // 32)) + head + _NATIVE_FIXED
    keys = min(context or shape.context_length, max(256, _TILE_ELEMENTS // (shape.num_heads * _TILE_QUERIES)))
    tile = 4 * shape.num_heads * min(rows, _TILE_QUERIES) * keys
    tile += 2 * 4 * shape.num_kv_heads * shape.head_dim * keys if decodes_kv else 0
    attention = 4 * rows * (2 * shape.hidden_size + fused + 3 * query)
    feed_forward = 4 * rows * 3 * (shape.hidden_size + shape.ffn_size)
    return int(_TORCH_SHARE * (attention + feed_forward + tile + head))


def process_bytes(shape: ModelShape, has_merges: bool = True) -> int:
    """What the program takes beside the model on the CPU: imports and the tokenizer."""
    return PROCESS_BYTES + (MERGED_TOKEN_BYTES if has_merges else TOKEN_BYTES) * shape.vocab_size
