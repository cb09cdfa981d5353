"""How much the KV of a block may matter: the norms of its values beside those of its keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from edgellm_kernels.batch import KVStorage, SplitKVStorage
from edgellm_kernels.kv_store_torch import dequantize


def block_scores(kv: KVStorage, blocks: Sequence[int]) -> list[float]:
    """Per block the mean of norm(v) / norm(k) over its positions, kv heads and layers (arXiv 2509.04377).

    All slots of the blocks must be written. Reads every form of pages; the rotation of int4 keeps norms. Each
    block is read by itself in f32, so its score has the same bits whatever is asked for beside it. A score
    that is no number is 0.
    """
    if isinstance(kv, SplitKVStorage):
        parts = [part for part in kv.parts if part.keys.shape[0]]
        means = zip(*(block_scores(part, blocks) for part in parts), strict=True)
        weights = [part.keys.shape[0] for part in parts]
        return [sum(w * m for w, m in zip(weights, own, strict=True)) / sum(weights) for own in means]
    scores = []
    for block in blocks:
        norms = []
        for pages, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
            # [layers, block_size, kv_heads, dim]
            rows = dequantize(pages[:, block], None if scales is None else scales[:, block])
            norms.append(torch.linalg.vector_norm(rows, dim=-1))
        keys, values = norms
        score = float((values / keys.clamp_min(torch.finfo(torch.float32).tiny)).double().mean())
        scores.append(score if math.isfinite(score) else 0.0)
    return scores
