"""One decoder layer over whole sequences at once, in steps that show the input of every linear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from edgellm_kernels.batch import GroupTables, KVStorage
from edgellm_kernels.ops import HeadShape, Kernels, Prepared
from edgellm_models.network.layers import LayerWeights
from edgellm_models.network.rope import Rope
from edgellm_models.network.spec import ModelSpec

_SCORE_ELEMENTS = 1 << 24
"""Attention scores that are held at once: 64 MiB as f32."""


@dataclass(frozen=True)
class PlainBatch:
    """Sequences padded on the right to one length; rows of all tensors are [sequences * length]."""

    lengths: tuple[int, ...]
    """Real tokens of each sequence."""
    length: int
    """Rows of each sequence."""

    @property
    def num_rows(self) -> int:
        return len(self.lengths) * self.length

    def real_rows(self) -> torch.Tensor:
        """int64: the rows that are no padding. Padding is behind all real tokens, so it changes none."""
        parts = [
            torch.arange(i * self.length, i * self.length + count) for i, count in enumerate(self.lengths)
        ]
        return torch.cat(parts)


class PlainBlocks:
    """Runs single layers of a model on [rows, hidden] with plain causal attention, without a paged cache.

    The steps of a layer are apart: ``attention_input``, ``attend``, ``after_attention``, ``ffn_input``,
    ``activate`` and ``after_ffn``. All arithmetic but attention itself is the decoder's own ops.
    """

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        self.spec = spec
        self.kernels = kernels
        self._ropes = tuple(Rope(rope, kernels.device) for rope in spec.ropes)

    def attention_input(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The input of q, k and v: [rows, hidden]."""
        return self._norm(hidden, layer.attn_norm)

    def attend(self, x: torch.Tensor, layer: LayerWeights, index: int, batch: PlainBatch) -> torch.Tensor:
        """Attention up to the input of the output projection: [rows, heads * head_dim]."""
        spec = self.spec
        shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        qkv = self.kernels.linear(Prepared(x), layer.qkv)
        storage, tables = self._pages(batch)
        positions = torch.arange(batch.length).repeat(len(batch.lengths))
        counts = torch.full((len(batch.lengths),), batch.length)
        cos_sin = self._ropes[spec.layers[index].rope].cos_sin(positions, torch.tensor(batch.lengths), counts)
        q = self.kernels.qk_norm_rope_store(
            qkv, shape, layer.q_norm, layer.k_norm, spec.rms_eps, *cos_sin, storage, 0, tables
        )
        q = q.view(len(batch.lengths), batch.length, spec.num_heads, spec.head_dim)
        window = spec.layers[index].window
        mask = _causal_mask(batch.length, window)
        per_pass = max(1, _SCORE_ELEMENTS // (spec.num_heads * batch.length**2))
        out = torch.empty_like(q)
        for start in range(0, len(q), per_pass):
            part = slice(start, start + per_pass)
            out[part] = self._attention(q[part], storage.keys[0, part], storage.values[0, part], mask)
        return out.view(batch.num_rows, -1)

    def after_attention(
        self, attended: torch.Tensor, hidden: torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """The residual stream behind attention: [rows, hidden]."""
        x = self.kernels.linear(Prepared(attended), layer.attn_output)
        return self._add(x, hidden, layer.post_attention_norm)

    def ffn_input(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The input of gate and up: [rows, hidden]."""
        return self._norm(hidden, layer.ffn_norm)

    def activate(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The input of down: [rows, ffn]."""
        return self.kernels.gate_up(Prepared(x), layer.gate_up, self.spec.activation).values

    def after_ffn(self, activated: torch.Tensor, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The residual stream behind the layer: [rows, hidden]."""
        x = self.kernels.linear(Prepared(activated), layer.down)
        return self._add(x, hidden, layer.post_ffn_norm)

    def forward(
        self, hidden: torch.Tensor, layer: LayerWeights, index: int, batch: PlainBatch
    ) -> torch.Tensor:
        """The whole layer: [rows, hidden] -> [rows, hidden]."""
        attended = self.attend(self.attention_input(hidden, layer), layer, index, batch)
        hidden = self.after_attention(attended, hidden, layer)
        return self.after_ffn(self.activate(self.ffn_input(hidden, layer), layer), hidden, layer)

    def _norm(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        prepared, _ = self.kernels.add_rms_norm(None, hidden, gain, self.spec.rms_eps)
        return prepared.values

    def _add(self, x: torch.Tensor, hidden: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        if post_norm is None:
            return hidden + x
        return hidden + self.kernels.add_rms_norm(None, x, post_norm, self.spec.rms_eps)[0].values.float()

    def _pages(self, batch: PlainBatch) -> tuple[KVStorage, GroupTables]:
        """One page per sequence, in order: what is stored is then a plain tensor."""
        spec, sequences = self.spec, len(batch.lengths)
        shape = (1, sequences, batch.length, spec.num_kv_heads, spec.head_dim)
        storage = KVStorage(torch.empty(shape), torch.empty(shape))
        tables = GroupTables(
            block_table=torch.arange(sequences, dtype=torch.int32)[:, None],
            block_positions=torch.zeros((sequences, 1), dtype=torch.int32),
            slot_mapping=torch.arange(batch.num_rows),
            key_lengths=torch.full((sequences,), batch.length, dtype=torch.int32),
        )
        return storage, tables

    def _attention(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """q [sequences, length, heads, dim], keys and values with kv_heads -> as q."""
        spec = self.spec
        repeat = spec.num_heads // spec.num_kv_heads
        q = q.transpose(1, 2)
        keys = keys.transpose(1, 2).repeat_interleave(repeat, dim=1)
        values = values.transpose(1, 2).repeat_interleave(repeat, dim=1)
        if spec.attention_softcap is None:
            out = functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, scale=spec.query_scale
            )
        else:
            scores = q @ keys.transpose(2, 3) * spec.query_scale
            scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
            out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
        return out.transpose(1, 2)


def _causal_mask(length: int, window: int | None) -> torch.Tensor:
    """bool [length, length]: whether the query (row) sees the key (column)."""
    behind = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)
