"""Bytes that a forward pass needs beside weights and KV: activations of a chunk, and logits."""

from __future__ import annotations

from edgellm.planning.shape import ModelShape

PREFILL_CHUNK = 512
"""Tokens of a prompt that run at once."""


def workspace_bytes(shape: ModelShape, batch: int = 1, chunk: int = PREFILL_CHUNK) -> int:
    """Most bytes alive at once in a step of ``chunk`` prompt tokens, or of ``batch`` decoding sequences.

    Rows are f32: residual stream and normed copy, fused q, k and v with the attention's output, or the two
    halves of the feed-forward with their product, whichever is more; the logits of each sequence, twice,
    since sampling works on a copy.
    """
    rows = max(chunk, batch)
    query = shape.num_heads * shape.head_dim
    fused = query + 2 * shape.num_kv_heads * shape.head_dim
    widest = max(fused + 2 * query, 3 * shape.ffn_size)
    return 4 * rows * (3 * shape.hidden_size + widest) + 8 * batch * shape.vocab_size
