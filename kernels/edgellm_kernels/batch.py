"""The tensors of one forward pass, without policy: which tokens run, where KV goes, which KV each sees.

Forms of stored KV, told by the pages' element type, for K and V each:

    f32, f16, bf16   [.., kv_heads, dim]
    int8             [.., kv_heads, dim] int8, a scale per position and head:  x = q * scale
                     keys of 2^n elements:                                     H x = q * scale
    fp8              [.., kv_heads, dim] e4m3, a scale per position and head:  x = f * scale
    int4             [.., kv_heads, dim / 2] uint8, a scale per 32 elements:   H x = (q - 8) * scale
                     byte i holds element i (low nibble) and element i + dim / 2 (high nibble)

Scales are f16 [.., kv_heads, scales] and lie at the same layer, block and slot as their data, so whatever
moves a block moves both. int4, and the keys of int8, are stored rotated: H is the orthonormal Hadamard
matrix, which spreads outliers over the head, so that no element of it makes the steps of all others coarse.
Queries are rotated alike, which leaves the scores as they are, and what was weighted from rotated values is
rotated back (H is its own inverse). int8 values are as good without: their error is a tenth of the keys'.
fp8 is not rotated: a float's step follows each element, so an outlier coarsens no other, and measured on two
models rotation halves the error of one and nearly doubles that of the other.

The tail of int4. A query at position p reads the first ``head`` positions of its sequence and the positions
above p - 128 in bf16 (rotated), everything else from the pages: a rule of positions only, so neither the cut
into chunks nor drafted rows change what a query reads. Every position is also written to the pages at once,
quantized from the same row: nothing is ever quantized again later, a block that leaves the tail, is shared
or is copied already holds its final bytes, and a rollback has nothing to undo.

The unquantized rows cannot lie in the blocks, which would then cost what they save, so each running sequence
owns one ring of slots outside of them (TailStorage): ``head`` slots for the first positions, then ``recent``
slots that later positions take in turn. What a step needs of older rows is staged together with its own rows
before they overwrite the ring, so the ring need not hold a chunk; ``recent`` above 128 is room for rejected
drafts. A ring holds only what its sequence computed since it began or resumed: positions taken from the
prefix cache, or restored after a preemption, are read from the pages, whichever ring might still know them.
So a result depends on the sequence's own positions and on how many of them it reused, never on what other
sequences did. Without tail tables everything is read from the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

TAIL_POSITIONS = 128
"""Positions before and with a query that it reads unquantized from an int4 cache."""
INT4_GROUP = 32
"""Elements that share a scale in int4 pages."""


@dataclass(frozen=True)
class TailTables:
    """Which unquantized rows a step reads and keeps; the same for all layer groups. Slots count within a
    layer, over all rings.
    """

    read_slots: torch.Tensor
    """[held] int64: slots of earlier positions, sequence by sequence, ascending by position."""
    read_positions: torch.Tensor
    """[held] int64"""
    read_starts: torch.Tensor
    """[sequences + 1] int32: what is held of sequence s is read_starts[s] .. read_starts[s + 1]."""
    write_rows: torch.Tensor
    """[kept] int64: the token rows of this step that later steps may need."""
    write_slots: torch.Tensor
    """[kept] int64: where they go; no slot twice."""
    spans: torch.Tensor
    """[sequences, 2] int64: unquantized are positions from the first on that lie below ``head``, and
    positions from the second on."""
    head: int
    """Positions below this lie in a ring's first slots for as long as their sequence runs."""


@dataclass(frozen=True)
class GroupTables:
    """Where one LayerGroup's KV lies for every sequence of a batch.

    Windows, kept sinks and evicted blocks are facts of the table: a block that is not in it is not read, so
    the cost of attention falls with the number of live blocks.
    """

    block_table: torch.Tensor
    """[sequences, max_blocks] int32: ids of the live blocks in order of position; -1 pads."""
    block_positions: torch.Tensor
    """[sequences, max_blocks] int32: position of each block's first slot (0 where padded)."""
    slot_mapping: torch.Tensor
    """[tokens] int64: block id * block_size + offset, where each new token's K and V are stored."""
    key_lengths: torch.Tensor
    """[sequences] int32: committed plus new tokens; keys at positions below this exist."""
    tail: TailTables | None = None
    """For int4 storage only."""


@dataclass(frozen=True)
class ForwardBatch:
    """Ragged queries of several sequences, flattened into one row per token."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64: absolute position of each token in its sequence."""
    query_starts: torch.Tensor
    """[sequences + 1] int32: rows of sequence s are query_starts[s] .. query_starts[s + 1]."""
    logit_rows: torch.Tensor
    """[rows] int64: the token rows whose logits are wanted."""
    max_query: int
    """Largest number of query rows of one sequence, as a (bucketed) host integer."""
    max_key: int
    """Largest number of keys of one sequence, as a (bucketed) host integer."""
    groups: tuple[GroupTables, ...]
    """One per LayerGroup, in the order of the spec's groups."""
    rope_lengths: torch.Tensor | None = None
    """[sequences] int64: the length by which dynamic and longrope scaling choose their angles; other scalings
    ignore it. None takes the keys that exist after this pass. A prompt that runs in chunks passes its whole
    length with each, so that the cut changes nothing."""
    pending: torch.Tensor | None = None
    """[tokens] int64 where some ids are not known yet: per row the place of its id among those that the step
    before drew, or -1 where ``token_ids`` has it. Whoever runs the batch puts them in, see ``with_drawn``."""

    def with_drawn(self, drawn: torch.Tensor) -> ForwardBatch:
        """The batch with its pending ids: those at their places in ``drawn`` [n] int64, on its device."""
        if self.pending is None:
            return self
        return replace(self, token_ids=filled_ids(self.token_ids, self.pending, drawn), pending=None)

    def to(self, device: torch.device) -> ForwardBatch:
        """The batch on a device; itself where it lies there already. Not with an unquantized tail."""
        if self.token_ids.device.type == device.type:
            return self
        assert all(group.tail is None for group in self.groups)

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return sent(tensor, device)

        return replace(
            self,
            token_ids=there(self.token_ids),
            positions=there(self.positions),
            query_starts=there(self.query_starts),
            logit_rows=there(self.logit_rows),
            rope_lengths=None if self.rope_lengths is None else there(self.rope_lengths),
            pending=None if self.pending is None else there(self.pending),
            groups=tuple(
                GroupTables(
                    there(group.block_table),
                    there(group.block_positions),
                    there(group.slot_mapping),
                    there(group.key_lengths),
                )
                for group in self.groups
            ),
        )


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device, without a wait for what the device does by now: a copy from memory that is
    not pinned would wait for all of it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def filled_ids(token_ids: torch.Tensor, pending: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Token ids [tokens] int64, those with a place in ``pending`` from ``drawn``."""
    return torch.where(pending < 0, token_ids, drawn[pending.clamp_min(0)])


@dataclass
class TailStorage:
    """Rings of unquantized rows of one LayerGroup, and what the layer that runs has staged from them."""

    keys: torch.Tensor
    """[layers, rings, head + recent, kv_heads, k_dim]"""
    values: torch.Tensor
    """[layers, rings, head + recent, kv_heads, v_dim]"""
    head: int
    """Slots of the first positions of a sequence."""
    staged: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)
    """K and V [held + tokens, kv_heads, dim], written by the store of a layer, read by its attention."""

    @property
    def recent(self) -> int:
        """Slots of the positions behind ``head``, taken in turn."""
        return self.keys.shape[2] - self.head

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def slot(self, ring: int, position: int) -> int:
        """The slot of a position within a layer."""
        within = position if position < self.head else self.head + (position - self.head) % self.recent
        return ring * self.keys.shape[2] + within


@dataclass(frozen=True)
class KVStorage:
    """The pages of one LayerGroup. ``keys[layer]`` is indexed by the layer's index within its group."""

    keys: torch.Tensor
    """[layers, blocks, block_size, kv_heads, k_dim or bytes of it]"""
    values: torch.Tensor
    """[layers, blocks, block_size, kv_heads, v_dim or bytes of it]"""
    key_scales: torch.Tensor | None = None
    """[layers, blocks, block_size, kv_heads, scales] f16, of int8, fp8 and int4 keys"""
    value_scales: torch.Tensor | None = None
    tail: TailStorage | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def v_dim(self) -> int:
        """Elements of a value head."""
        return self.values.shape[4] * (2 if self.rotates_values else 1)

    @property
    def rotates_keys(self) -> bool:
        """Keys are stored, and queries compared with them, in Hadamard space."""
        dim = self.keys.shape[4]
        return self.keys.dtype == torch.uint8 or (self.keys.dtype == torch.int8 and dim & (dim - 1) == 0)

    @property
    def rotates_values(self) -> bool:
        return self.values.dtype == torch.uint8

    @property
    def has_int4(self) -> bool:
        """Keys or values lie two to a byte."""
        return torch.uint8 in (self.keys.dtype, self.values.dtype)

    def pages(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that is indexed by [layer, block]: what a copy of a block has to copy."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, scales included, and of the unquantized tail."""
        return sum(part.nbytes for part in self.pages()) + (0 if self.tail is None else self.tail.nbytes)


def movable(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in a type whose elements torch can place by index: eight-bit floats it cannot."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


@dataclass(frozen=True)
class SplitKVStorage(KVStorage):
    """The pages of one LayerGroup whose layers lie on several devices. Its own fields are those of the first
    part; there is no unquantized tail.
    """

    parts: tuple[KVStorage, ...] = ()
    """By device, the pages of the layers there (none or more), with the same blocks."""

    def pages(self) -> tuple[torch.Tensor, ...]:
        return tuple(page for part in self.parts for page in part.pages())


def split_storage(parts: tuple[KVStorage, ...]) -> SplitKVStorage:
    """One storage over the parts of a group."""
    first = parts[0]
    return SplitKVStorage(first.keys, first.values, first.key_scales, first.value_scales, parts=parts)
