"""Carries out a plan's block and host copies on the pages of the KV cache, in any form, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from edgellm.contracts import BlockCopy, HostCopy
from edgellm_kernels.batch import KVStorage, movable
from edgellm_models.errors import ResourceError


def allocate_host_storage(storages: Sequence[KVStorage], num_blocks: Sequence[int]) -> tuple[KVStorage, ...]:
    """Host memory for ``num_blocks`` blocks of each group, in the form of ``storages``; pinned beside a GPU.

    The rows of an unquantized tail are not offloaded: a restored sequence reads its pages.
    """
    made = []
    for storage, count in zip(storages, num_blocks, strict=True):
        pinned = storage.keys.device.type == "cuda"

        def like(
            pages: torch.Tensor | None, count: int = count, pinned: bool = pinned
        ) -> torch.Tensor | None:
            if pages is None:
                return None
            shape = (pages.shape[0], count, *pages.shape[2:])
            return torch.zeros(shape, dtype=pages.dtype, device="cpu", pin_memory=pinned)

        try:
            keys, values = like(storage.keys), like(storage.values)
            scales = like(storage.key_scales), like(storage.value_scales)
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(f"no host memory for {count} blocks of offloaded KV") from error
        assert keys is not None and values is not None
        made.append(
            replace(
                storage, keys=keys, values=values, key_scales=scales[0], value_scales=scales[1], tail=None
            )
        )
    return tuple(made)


def apply_copies(
    storages: Sequence[KVStorage],
    host_storages: Sequence[KVStorage],
    block_copies: Iterable[BlockCopy],
    host_copies: Iterable[HostCopy] = (),
) -> None:
    """Every copy in ascending ``order``, both kinds together: a later one may overwrite what one read."""
    copies: list[BlockCopy | HostCopy] = [*block_copies, *host_copies]
    copies.sort(key=lambda copy: copy.order)
    pending: list[tuple[int, int]] = []  # (source, target) that are done at once
    kind: tuple[int, str] | None = None

    def flush() -> None:
        if pending and kind is not None:
            group, direction = kind
            device, host = storages[group], None if direction == "block" else host_storages[group]
            source = host if direction == "restore" else device
            target = host if direction == "offload" else device
            assert source is not None and target is not None
            copy_blocks(source, target, [s for s, _ in pending], [t for _, t in pending])
        pending.clear()

    for copy in copies:
        if isinstance(copy, BlockCopy):
            this, pair = (copy.group, "block"), (copy.source, copy.target)
        elif copy.to_host:
            this, pair = (copy.group, "offload"), (copy.block, copy.host_block)
        else:
            this, pair = (copy.group, "restore"), (copy.host_block, copy.block)
        targets = {target for _, target in pending}
        # Copies at once read everything first, so one that reads or replaces what another wrote waits.
        reads_written = this[1] == "block" and pair[0] in targets
        if this != kind or reads_written or pair[1] in targets:
            flush()
            kind = this
        pending.append(pair)
    flush()


def copy_blocks(source: KVStorage, target: KVStorage, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Blocks of all layers with their scales; the sources are read before a target is written."""
    for from_pages, to_pages in zip(source.pages(), target.pages(), strict=True):
        from_pages, to_pages = movable(from_pages), movable(to_pages)
        blocks = from_pages.index_select(1, torch.tensor(sources, device=from_pages.device))
        to_pages.index_copy_(1, torch.tensor(targets, device=to_pages.device), blocks.to(to_pages.device))


def copy_ring(storages: Sequence[KVStorage], source: int, target: int) -> None:
    """The unquantized tail of a forked sequence, in every group."""
    for storage in storages:
        if storage.tail is not None:
            for rings in (storage.tail.keys, storage.tail.values):
                rings[:, target].copy_(rings[:, source])
