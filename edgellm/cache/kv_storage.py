"""Sizes and allocates the pages of the KV cache, one storage per layer group of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.cache.block_pool import BlockPool, blocks_for
from edgellm_kernels.batch import KVStorage
from edgellm_models.errors import BadInputError, ResourceError
from edgellm_models.network.spec import ModelSpec

KV_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

BLOCK_SIZE = 16
"""Positions per block."""


def kv_dtype(name: str) -> torch.dtype:
    """The torch type of a ``--kv-dtype``; auto is f32. BadInputError names what is not available."""
    if name == "auto":
        return torch.float32
    if name not in KV_DTYPES:
        raise BadInputError(
            f"a KV cache of type {name!r} is not available; choose one of auto, {', '.join(KV_DTYPES)}"
        )
    return KV_DTYPES[name]


def kv_bytes_per_position(spec: ModelSpec, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one position in ``num_layers`` layers."""
    return 2 * num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def kv_bytes(
    spec: ModelSpec, context: int, dtype: torch.dtype, chunk: int, block_size: int = BLOCK_SIZE
) -> int:
    """Bytes of the whole cache for one sequence of ``context`` tokens, in whole blocks, windows freed."""
    return sum(
        blocks_for(context, block_size, group.window, chunk)
        * block_size
        * kv_bytes_per_position(spec, len(group.layers), dtype)
        for group in spec.kv_groups
    )


def largest_context(spec: ModelSpec, budget_bytes: int, dtype: torch.dtype, chunk: int) -> int:
    """The longest context, at most the trained one, whose cache fits in ``budget_bytes``; 0 is none."""
    low, high = 0, spec.context_length
    while low < high:
        middle = (low + high + 1) // 2
        if kv_bytes(spec, middle, dtype, chunk) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def make_pools(
    spec: ModelSpec, context: int, chunk: int, block_size: int = BLOCK_SIZE
) -> tuple[BlockPool, ...]:
    """One pool per layer group, each with the blocks of one sequence of ``context`` tokens."""
    return tuple(
        BlockPool(blocks_for(context, block_size, group.window, chunk), block_size, group.window)
        for group in spec.kv_groups
    )


def allocate_storage(
    spec: ModelSpec, pools: Sequence[BlockPool], dtype: torch.dtype, device: str = "cpu"
) -> tuple[KVStorage, ...]:
    """The pages of every pool, in the order of the spec's groups.

    Not zeroed: memory that is never written is never paid for, and attention reads no slot that was not
    written. ResourceError says what was asked for when it cannot be had.
    """
    storages = []
    for group, pool in zip(spec.kv_groups, pools, strict=True):
        # [layers, blocks, block_size, kv_heads, head_dim]
        shape = (len(group.layers), pool.num_blocks, pool.block_size, spec.num_kv_heads, spec.head_dim)
        try:
            keys = torch.empty(shape, dtype=dtype, device=device)
            values = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            nbytes = pool.num_blocks * pool.block_size * kv_bytes_per_position(spec, len(group.layers), dtype)
            raise ResourceError(
                f"no memory for a KV cache of {nbytes / 2**20:.0f} MiB; lower --ctx or use --kv-dtype f16"
            ) from error
        storages.append(KVStorage(keys, values))
    return tuple(storages)
