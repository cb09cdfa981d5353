"""The tensors of one forward pass, without policy: which tokens run, where KV goes, which KV each sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class KVStorage:
    """The pages of one LayerGroup. ``keys[layer]`` is indexed by the layer's index within its group."""

    keys: torch.Tensor
    """[layers, blocks, block_size, kv_heads, k_dim]"""
    values: torch.Tensor
    """[layers, blocks, block_size, kv_heads, v_dim]"""

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
