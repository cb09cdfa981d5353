"""How much room the KV cache gets: the context in force, requests at once, blocks in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm_models.errors import ConfigError, Notice, ResourceError

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm_kernels.batch import KVStorage
    from edgellm_models.network.spec import ModelSpec

FEWEST_AT_ONCE = 4
"""Requests whose windows and tails have room beside a context that nobody asked for."""


def choose_context(
    spec: ModelSpec,
    asked: int | None,
    kv: KVType,
    chunk: int,
    free_bytes: int | None,
    kept: int | None = None,
    most: int | None = None,
) -> tuple[int, Notice]:
    """The context in force and the notice that says it.

    Unasked it is the trained one, or what fits in half of the free memory; asked for it is never above the
    trained one. ``kept`` as in kv_bytes, ``most`` as in sequences_at_once. ResourceError when what was asked
    for does not fit in the free memory, or nothing does.
    """
    from edgellm.cache.kv_storage import kv_bytes, largest_context

    trained = spec.context_length
    if asked is None:
        context = trained
        if free_bytes is not None:
            context = largest_context(
                spec, free_bytes // 2, kv, chunk, kept, FEWEST_AT_ONCE
            ) or largest_context(spec, free_bytes // 2, kv, chunk, kept)
        if context < 1:
            assert free_bytes is not None
            raise ResourceError(
                f"{free_bytes / 1e6:.0f} MB of free memory leave no room for a KV cache; close other "
                "programs or take a smaller model"
            )
    else:
        context = min(asked, trained)
        needed = kv_bytes(spec, context, kv, chunk, kept=kept)
        if free_bytes is not None and needed > free_bytes:
            fitting = largest_context(spec, free_bytes // 2, kv, chunk, kept)
            raise ResourceError(
                f"the {kv.name} KV cache of {context} tokens needs {needed / 1e6:.0f} MB; "
                f"{free_bytes / 1e6:.0f} MB are free; --ctx {fitting} fits in half of that"
            )
    at_once = sequences_at_once(spec, context, kv, chunk, free_bytes, kept, most)
    whole = kv_bytes(spec, context, kv, chunk, kept=kept, num_sequences=at_once)
    size = f"its {kv.name} KV cache takes up to {whole / 1e6:.0f} MB"
    if whole > kv_bytes(spec, context, kv, chunk, kept=kept):  # else nothing of it is each request's own
        what = "unquantized tails" if kv.has_tail else "windows"
        size += f", with the {what} of {at_once} requests at once"
    if asked is not None and asked > trained:
        detail = f"the context is {context} tokens, for which the model was trained, not {asked}; {size}"
        return context, Notice("context_clamped", detail)
    if asked is None and context < trained:
        detail = (
            f"the context is {context} tokens, which fit in half of the free memory, not {trained}; {size}"
        )
        return context, Notice("context_clamped", detail)
    return context, Notice("context", f"the context is {context} tokens (trained: {trained}); {size}")


def sequences_at_once(
    spec: ModelSpec,
    context: int,
    kv: KVType,
    chunk: int,
    free_bytes: int | None,
    kept: int | None = None,
    most: int | None = None,
) -> int:
    """For how many requests the cache has windows and unquantized tails: what the engine runs at once
    (``most``, else MAX_RUNNING), or what half of the free memory has room for."""
    from edgellm.cache.kv_storage import most_sequences
    from edgellm.engine.engine import MAX_RUNNING

    most = most or MAX_RUNNING
    if free_bytes is None:
        return most
    return most_sequences(spec, context, kv, chunk, free_bytes // 2, most, kept)


def check_contexts(
    spec: ModelSpec,
    num_blocks: Sequence[int],
    kv: KVType,
    context: int,
    free_bytes: int | None,
    full_contexts: int,
) -> None:
    """ResourceError where a cache for several whole contexts is more than the free memory."""
    from edgellm.cache.kv_storage import BLOCK_SIZE, kv_bytes_per_position

    needed = sum(
        blocks * BLOCK_SIZE * kv_bytes_per_position(spec, len(group.layers), kv)
        for blocks, group in zip(num_blocks, spec.kv_groups, strict=True)
    )
    if free_bytes is not None and needed > free_bytes:
        raise ResourceError(
            f"the {kv.name} KV cache of {full_contexts} times {context} tokens needs {needed / 1e6:.0f} MB; "
            f"{free_bytes / 1e6:.0f} MB are free: fewer at once, shorter ones, or --kv-dtype int8"
        )


def host_blocks_for(storage: Sequence[KVStorage], device: str) -> tuple[int, ...]:
    """Blocks of each group for the KV of paused requests in host memory, as EDGELLM_KV_HOST says.

    ConfigError when that is no number. On the CPU there is none unless asked for: it would be a second place
    in the same memory.
    """
    pages = [sum(part.nbytes for part in group.pages()) for group in storage]
    text = os.environ.get("EDGELLM_KV_HOST", "")
    if not text:
        return tuple(group.num_blocks if device == "cuda" else 0 for group in storage)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < 1e9:
        raise ConfigError(f"EDGELLM_KV_HOST must be a number of megabytes, 0 or more, not {text!r}")
    share = megabytes * 1e6 / sum(pages)
    return tuple(int(group.num_blocks * share) for group in storage)
