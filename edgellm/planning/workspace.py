"""Bytes that a forward pass needs beside weights and KV, and what the process takes before any model."""

from __future__ import annotations

from edgellm.cache.kv_sizes import KV_ON_TORCH
from edgellm.planning.shape import ModelShape

PREFILL_CHUNK = 512
"""Tokens of a prompt that run at once."""
NATIVE, TORCH = "native", "torch"

PROCESS_BYTES = 262_000_000
"""Python with torch and everything else that a first answer imports, measured with CPU builds on Linux."""
TOKEN_BYTES, MERGED_TOKEN_BYTES = 430, 850
"""Of a vocabulary's entry in the tokenizer, of one with scores and of one with merges."""

_SAMPLED_BYTES = 19
"""Per entry of the vocabulary, while one token is drawn: scores and their sorted copy in f64, three masks."""
_NATIVE_FIXED = 500_000
"""Tiles of attention, tables, the batch's own tensors, noise of one piece."""
_TILE_KEYS, _PART_BYTES = 128, 1 << 19
"""Keys of a tile, and the results of tiles that are merged later (attention.cpp): those of single queries
take what they take, several together so much."""
_TORCH_STREAMS = 5
"""Tensors as large as the hidden states that torch holds besides those counted, measured."""
_MIXED_STREAMS = {"fp8": 2, "int4": 5}
"""The same where native kernels compute all but the attention over such KV, measured."""
TORCH_KEPT_BYTES = 60_000_000
"""What malloc's heap keeps of freed tensors. Large blocks given back at once would keep it lower, and cost a
third of a prompt's speed."""
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
    kv_dtype: str = "f32",
) -> int:
    """Most bytes held at once in a step of ``chunk`` prompt tokens and one row for each of ``batch``
    sequences.

    The native step program keeps its buffers, all of them at once; torch's come and go with every op.
    ``drafted``: tokens that a sequence may verify besides its next one.
    ``kv_dtype``: of pages that are not f32 torch decodes tiles, also where only attention is left to it.
    """
    longest = min(chunk, context or chunk)
    rows = longest if batch == 1 else min(chunk + batch, batch * longest)
    query = shape.num_heads * shape.head_dim
    fused = query + 2 * shape.num_kv_heads * shape.head_dim
    head = 4 * batch * (1 + drafted) * shape.vocab_size + _SAMPLED_BYTES * shape.vocab_size
    if kernels == NATIVE and kv_dtype not in KV_ON_TORCH:
        angles = shape.head_dim * len(set(shape.windows))
        floats = 3 * shape.hidden_size + fused + 2 * query + 3 * shape.ffn_size + angles
        widest = max(shape.hidden_size, query, shape.ffn_size)
        if batch > 1:  # a lone answer's steps keep their logits
            head += 4 * (1 + drafted) * shape.vocab_size
        # Besides the widest input as 16-bit integers with their scales: 80 bytes for 32.
        tiles = -(-(context or shape.context_length) // _TILE_KEYS)
        parts = max(_PART_BYTES, 4 * batch * shape.num_heads * (shape.head_dim + 2) * tiles)
        return rows * (4 * floats + widest * 80 // 32) + head + parts + _NATIVE_FIXED
    kv = shape.num_kv_heads * shape.head_dim
    queries = min(rows, _TILE_QUERIES)
    keys = min(
        context or shape.context_length,
        max(256, _TILE_ELEMENTS // (shape.num_heads * _TILE_QUERIES)),
        max(256, _TILE_ELEMENTS // kv),
    )
    # Scores and their mask, the running softmax, keys and values read from pages, decoded where not f32.
    tile = (4 * shape.num_heads + 1) * queries * keys + 3 * 4 * query * queries
    tile += 2 * (4 + (kv_dtype != "f32")) * kv * keys
    # Alive beside a sub-layer's own: its input, the residual, the output of the one before.
    streams = _MIXED_STREAMS[kv_dtype] if kernels == NATIVE else _TORCH_STREAMS
    stream = (3 + streams) * shape.hidden_size
    attention = 4 * rows * (stream + fused + 3 * query) + tile
    feed_forward = 4 * rows * (stream + 3 * shape.ffn_size)
    return int(max(attention, feed_forward, 4 * rows * stream + head))


def process_bytes(shape: ModelShape, has_merges: bool = True, *, kernels: str = NATIVE) -> int:
    """What the program takes beside the model on the CPU: imports, the tokenizer, what malloc keeps."""
    tokenizer = (MERGED_TOKEN_BYTES if has_merges else TOKEN_BYTES) * shape.vocab_size
    return PROCESS_BYTES + tokenizer + (TORCH_KEPT_BYTES if kernels == TORCH else 0)
