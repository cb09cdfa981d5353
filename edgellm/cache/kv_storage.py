"""Sizes and allocates the pages of the KV cache, one storage per layer group of the model.

Which type of pages ``--kv-dtype auto`` takes is decided here too, by what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm.cache import kv_sizes
from edgellm.cache.kv_sizes import SCALED_KV, auto_kv_types, head_bytes
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm_kernels.batch import INT4_GROUP, TAIL_POSITIONS, KVStorage, TailStorage
from edgellm_models.errors import BadInputError, Notice, ResourceError
from edgellm_models.network.spec import ModelSpec

_TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,  # two elements per byte
}
KV_BITS = {name: kv_sizes.KV_BITS[name] for name in _TORCH_DTYPES}
INT4_HEAD_DIMS = (64, 128, 256)
"""Head sizes that the Hadamard rotation of int4 supports."""

BLOCK_SIZE = 16
"""Positions per block."""
DRAFT_SLACK = 32
"""Rejected positions that an int4 sequence may take back without losing its unquantized tail."""


@dataclass(frozen=True)
class KVType:
    """What the pages hold, by the names of ``--kv-dtype``; K never has fewer bits than V."""

    keys: str
    values: str
    measured_apart: bool = False
    """For measurements of what either costs alone: keys of fewer bits than the values are allowed."""

    def __post_init__(self) -> None:
        if not self.measured_apart and KV_BITS[self.keys] < KV_BITS[self.values]:
            raise BadInputError(
                f"keys of type {self.keys} beside values of type {self.values} are refused: errors in keys "
                "cost more, so they never have fewer bits"
            )

    @property
    def name(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def has_tail(self) -> bool:
        """Recent positions are kept unquantized besides the pages."""
        return "int4" in (self.keys, self.values)

    def check(self, spec: ModelSpec) -> None:
        """BadInputError for a model whose heads the type cannot hold."""
        if self.has_tail and spec.head_dim not in INT4_HEAD_DIMS:
            raise BadInputError(
                f"a KV cache of type int4 needs attention heads of {', '.join(map(str, INT4_HEAD_DIMS))} "
                f"elements; this model's have {spec.head_dim}: use int8"
            )


def kv_type(name: str) -> KVType:
    """The type of a ``--kv-dtype`` other than auto. BadInputError names what is not available."""
    if name not in KV_BITS:
        raise BadInputError(
            f"a KV cache of type {name!r} is not available; choose one of auto, {', '.join(KV_BITS)}"
        )
    return KVType(name, name)


def choose_kv_type(
    name: str,
    spec: ModelSpec,
    asked_context: int | None,
    chunk: int,
    free_bytes: int | None,
    device: str,
    kept: int | None = None,
    *,
    exact: bool = True,
) -> tuple[KVType, Notice | None]:
    """The type in force for a ``--kv-dtype``, and the notice where auto had to step down.

    auto takes the first of ``auto_kv_types`` (``exact``: see there), whichever context it leaves room for,
    unless a context was asked for: then the first whose cache takes at most half of the free memory, and
    int8 where none does. int4 and fp8 are never taken unasked.
    """
    if name != "auto":
        chosen = kv_type(name)
        chosen.check(spec)
        return chosen, None
    candidates = [kv_type(n) for n in auto_kv_types(device, exact=exact)]
    if asked_context is None or free_bytes is None:
        return candidates[0], None
    context = min(asked_context, spec.context_length)
    sizes = [kv_bytes(spec, context, candidate, chunk, kept=kept) for candidate in candidates]
    fitting = [i for i, size in enumerate(sizes) if 2 * size <= free_bytes]
    index = fitting[0] if fitting else len(candidates) - 1
    if index == 0:
        return candidates[0], None
    too_large = " and ".join(
        f"{candidate.name} {size / 1e6:.0f} MB"
        for candidate, size in zip(candidates[:index], sizes[:index], strict=True)
    )
    chosen = candidates[index]
    return chosen, Notice(
        "kv_dtype",
        f"the KV cache is {chosen.name} ({sizes[index] / 1e6:.0f} MB): for {context} tokens {too_large} "
        f"would be over half of the {free_bytes / 1e6:.0f} MB of free memory; a smaller --ctx or --kv-dtype "
        f"{candidates[0].name} keeps it closer",
    )


def kv_bytes_per_position(spec: ModelSpec, num_layers: int, kv: KVType) -> int:
    """Bytes of K and V of one position in the pages of ``num_layers`` layers."""
    per_head = head_bytes(kv.keys, spec.head_dim) + head_bytes(kv.values, spec.head_dim)
    return num_layers * spec.num_kv_heads * per_head


def tail_bytes(spec: ModelSpec, kv: KVType, num_rings: int = 1, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of the unquantized tails of ``num_rings`` running sequences; 0 for types without one."""
    if not kv.has_tail:
        return 0
    slots = block_size + TAIL_POSITIONS + DRAFT_SLACK
    return num_rings * slots * kv_bytes_per_position(spec, spec.num_layers, kv_type("bf16"))


def kv_bytes(
    spec: ModelSpec,
    context: int,
    kv: KVType,
    chunk: int,
    block_size: int = BLOCK_SIZE,
    kept: int | None = None,
    num_sequences: int = 1,
) -> int:
    """Bytes of the whole cache for one context of ``context`` tokens, in whole blocks, with the windows and
    the unquantized tails of ``num_sequences`` that run at once.

    ``kept``: positions that lossy eviction leaves at most in layers without a window.
    """
    layouts = group_layouts(spec, context, chunk, block_size, kept, num_sequences)
    pages = sum(
        layout.num_blocks * block_size * kv_bytes_per_position(spec, len(group.layers), kv)
        for layout, group in zip(layouts, spec.kv_groups, strict=True)
    )
    return pages + tail_bytes(spec, kv, num_sequences, block_size)


def largest_context(
    spec: ModelSpec,
    budget_bytes: int,
    kv: KVType,
    chunk: int,
    kept: int | None = None,
    num_sequences: int = 1,
) -> int:
    """The longest context, at most the trained one, whose cache fits in ``budget_bytes``; 0 is none."""
    low, high = 0, spec.context_length
    while low < high:
        middle = (low + high + 1) // 2
        if kv_bytes(spec, middle, kv, chunk, kept=kept, num_sequences=num_sequences) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def most_sequences(
    spec: ModelSpec,
    context: int,
    kv: KVType,
    chunk: int,
    budget_bytes: int,
    most: int,
    kept: int | None = None,
) -> int:
    """The number of sequences, from 1 to ``most``, whose windows and tails fit beside a context."""
    for count in range(most, 1, -1):
        if kv_bytes(spec, context, kv, chunk, kept=kept, num_sequences=count) <= budget_bytes:
            return count
    return 1


def group_layouts(
    spec: ModelSpec,
    context: int,
    chunk: int,
    block_size: int = BLOCK_SIZE,
    kept: int | None = None,
    num_sequences: int = 1,
    lookahead: int = 0,
    num_contexts: int = 1,
) -> tuple[GroupLayout, ...]:
    """What the KV manager is told of each layer group: blocks for ``num_contexts`` times ``context`` tokens,
    and the windows of ``num_sequences`` (kv_sizes.pool_blocks). ``kept``
    as in ``kv_bytes``.
    """
    windows = [group.window for group in spec.kv_groups]
    blocks = kv_sizes.pool_blocks(
        windows,
        context,
        chunk,
        block_size,
        kept=kept,
        num_sequences=num_sequences,
        lookahead=lookahead,
        num_contexts=num_contexts,
    )
    return tuple(GroupLayout(window, count) for window, count in zip(windows, blocks, strict=True))


def allocate_storage(
    spec: ModelSpec,
    num_blocks: Sequence[int],
    kv: KVType,
    device: str = "cpu",
    *,
    block_size: int = BLOCK_SIZE,
    num_rings: int = 1,
    layers: range | None = None,
) -> tuple[KVStorage, ...]:
    """The pages of ``num_blocks`` blocks for every group of the spec, in order, and for int4 the tails of
    ``num_rings`` running sequences. ``layers``: only of these, where the model lies on two devices.

    Not zeroed: memory that is never written is never paid for, and attention reads no slot that was not
    written. BadInputError when the type cannot hold the model's heads, ResourceError says what was asked
    for when it cannot be had.
    """
    kv.check(spec)
    storages = []
    for group, count in zip(spec.kv_groups, num_blocks, strict=True):
        # [layers, blocks, block_size, kv_heads, ..]
        own = [layer for layer in group.layers if layers is None or layer in layers]
        shape = (len(own), count, block_size, spec.num_kv_heads)
        try:
            keys, key_scales = _pages(kv.keys, shape, spec.head_dim, device)
            values, value_scales = _pages(kv.values, shape, spec.head_dim, device)
            tail = None
            if kv.has_tail:
                slots = block_size + TAIL_POSITIONS + DRAFT_SLACK
                ring_shape = (len(own), num_rings, slots, spec.num_kv_heads, spec.head_dim)
                tail = TailStorage(
                    torch.empty(ring_shape, dtype=torch.bfloat16, device=device),
                    torch.empty(ring_shape, dtype=torch.bfloat16, device=device),
                    head=block_size,
                )
        except (RuntimeError, MemoryError) as error:
            nbytes = count * block_size * kv_bytes_per_position(spec, len(group.layers), kv)
            smaller = "int8" if KV_BITS[kv.values] > 8 else "int4"
            raise ResourceError(
                f"no memory for a KV cache of {nbytes / 2**20:.0f} MiB; lower --ctx or use --kv-dtype "
                f"{smaller}"
            ) from error
        storages.append(KVStorage(keys, values, key_scales, value_scales, tail))
    return tuple(storages)


def _pages(
    name: str, shape: tuple[int, ...], dim: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data and scales."""
    width = dim // 2 if name == "int4" else dim
    data = torch.empty((*shape, width), dtype=_TORCH_DTYPES[name], device=device)
    if name not in SCALED_KV:
        return data, None
    num_scales = dim // INT4_GROUP if name == "int4" else 1
    return data, torch.empty((*shape, num_scales), dtype=torch.float16, device=device)
