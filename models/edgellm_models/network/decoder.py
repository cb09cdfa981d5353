"""The one decoder of all families: they differ by flags of the spec and by which weights are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm_kernels.batch import ForwardBatch, KVStorage
from edgellm_kernels.ops import Kernels
from edgellm_kernels.weights import BlockQuantWeight, DenseWeight, LinearWeight, NativeWeight, PlaneWeight
from edgellm_models.errors import Notice
from edgellm_models.network.layers import GroupState, LayerWeights, attention, feed_forward
from edgellm_models.network.rope import Rope
from edgellm_models.network.spec import ModelSpec
from edgellm_models.network.sub_layers import SkippedSubLayers


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a model, ready for the kernels."""

    embedding: DenseWeight | BlockQuantWeight | NativeWeight | PlaneWeight
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    output_norm: torch.Tensor
    head: LinearWeight
    """[vocab, hidden]; shares the embedding's memory where they are tied."""


@dataclass(frozen=True)
class LastRows:
    """The rows whose logits are wanted, before the output norm."""

    x: torch.Tensor
    """[rows, hidden]: the last sub-layer's output, not yet added."""
    residual: torch.Tensor

    def __len__(self) -> int:
        return self.x.shape[0]

    def part(self, start: int, end: int) -> LastRows:
        return LastRows(self.x[start:end], self.residual[start:end])


class Decoder:
    """Runs batches of tokens against paged KV storage. Holds no state between calls.

    Attributes:
        spec: the model's shape.
        weight_bytes: memory of the weights as they are held, a tied head counted once.
        notices: what was changed or chosen while loading.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        notices: Sequence[Notice] = (),
        first_layer: int = 0,
    ) -> None:
        """``first_layer``: which one the weights begin with, of a part of a model (split_decoder.py)."""
        self.spec = spec
        self.first_layer = first_layer
        self.weights = weights
        self.kernels = kernels
        self.notices = tuple(notices)
        self.weight_bytes = _weight_bytes(weights)
        self.ropes = tuple(Rope(rope, kernels.device) for rope in spec.ropes)
        own = range(first_layer, first_layer + len(weights.layers))
        # layer -> (its KV group, its index within the group's layers that are here)
        self._places = {
            layer: (group, index)
            for group, members in enumerate(spec.kv_groups)
            for index, layer in enumerate(layer for layer in members.layers if layer in own)
        }

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Logits f32 [len(batch.logit_rows), vocab]; K and V of every token are written into ``kv``.

        ``kv`` and ``batch.groups`` follow ``spec.kv_groups``. The result for a token depends on its
        sequence's stored KV only: on no other sequence, block id or chunk border (up to f32 rounding with the
        torch kernels).
        """
        return self.logits(self.run(batch, kv))

    def run(
        self, batch: ForwardBatch, kv: Sequence[KVStorage], skipped: SkippedSubLayers | None = None
    ) -> LastRows:
        """``forward`` without the head, for who wants the logits in parts: those of 512 rows of a large
        vocabulary take 512 MiB.

        ``skipped`` sub-layers are left out, and of a skipped attention no K and V are written: for drafts
        only. ValueError where the first or the last layer would not be whole.
        """
        if not len(kv) == len(batch.groups) == len(self.spec.kv_groups):
            raise ValueError(
                f"{len(self.spec.kv_groups)} KV groups need as many storages and tables, "
                f"not {len(kv)} and {len(batch.groups)}"
            )
        skipped = skipped or SkippedSubLayers()
        skipped.check(self.spec.num_layers)
        with torch.no_grad():
            return self._run(batch, kv, skipped)

    def run_to_states(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> LastRows:
        """``run`` for rows whose hidden states are wanted: what replaces ``run`` by something that ends with
        logits must not replace this."""
        return Decoder.run(self, batch.to(self.kernels.device), kv)

    def sub_layer_changes(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> dict[tuple[str, int], float]:
        """By ("attention" or "feed_forward", layer) the mean over the batch's tokens of
        |h_l - h_(l-1)| / |h_(l-1)|, h being the residual stream; the last feed-forward is left out."""
        changes: list[float] = []
        with torch.no_grad():
            self._run(batch, kv, SkippedSubLayers(), changes)
        kinds = ("attention", "feed_forward")
        return {(kinds[index % 2], index // 2): value for index, value in enumerate(changes)}

    def logits(self, rows: LastRows) -> torch.Tensor:
        """Logits f32 [rows, vocab]."""
        spec, kernels = self.spec, self.kernels
        with torch.no_grad():
            prepared, _ = kernels.add_rms_norm(
                rows.x,
                rows.residual,
                self.weights.output_norm,
                spec.rms_eps,
                self.weights.layers[-1].post_ffn_norm,
            )
            return kernels.lm_head(prepared, self.weights.head, spec.final_softcap)

    def hidden_states(self, rows: LastRows) -> torch.Tensor:
        """The states f32 [rows, hidden] that the head reads: behind the output norm."""
        with torch.no_grad():
            prepared, _ = self.kernels.add_rms_norm(
                rows.x,
                rows.residual,
                self.weights.output_norm,
                self.spec.rms_eps,
                self.weights.layers[-1].post_ffn_norm,
            )
            return prepared.values.float()

    def _run(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        skipped: SkippedSubLayers,
        changes: list[float] | None = None,
    ) -> LastRows:
        """``changes`` takes what each sub-layer changes of the residual stream, in order, but the last."""
        stream = self.kernels.embed(batch.token_ids, self.weights.embedding, self.spec.embedding_scale)
        x, residual, _ = self._layers(batch, kv, stream, skipped, changes)
        return LastRows(x[batch.logit_rows], residual[batch.logit_rows])

    def stream_behind(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Of a model's first layers: the residual stream behind them, f32 [tokens, hidden]."""
        with torch.no_grad():
            embedded = self.kernels.embed(batch.token_ids, self.weights.embedding, self.spec.embedding_scale)
            x, residual, post_norm = self._layers(batch, kv, embedded, SkippedSubLayers())
            last = self.weights.layers[-1]  # any gain serves: only the sum is wanted
            return self.kernels.add_rms_norm(x, residual, last.ffn_norm, self.spec.rms_eps, post_norm)[1]

    def run_from(self, batch: ForwardBatch, kv: Sequence[KVStorage], stream: torch.Tensor) -> LastRows:
        """Of a model's last layers: ``run`` with the residual stream in front of them."""
        with torch.no_grad():
            x, residual, _ = self._layers(batch, kv, stream, SkippedSubLayers())
            return LastRows(x[batch.logit_rows], residual[batch.logit_rows])

    def _layers(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        residual: torch.Tensor,
        skipped: SkippedSubLayers,
        changes: list[float] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The last sub-layer's output, not yet added, the residual stream, and the gain of the norm that the
        output still needs."""
        spec, kernels = self.spec, self.kernels
        groups = tuple(
            GroupState(
                tables, storage, members.window, kernels.plan_attention(batch, tables, storage.block_size)
            )
            for tables, storage, members in zip(batch.groups, kv, spec.kv_groups, strict=True)
        )
        counts = batch.query_starts.diff().long()
        lengths = batch.groups[0].key_lengths if batch.rope_lengths is None else batch.rope_lengths
        angles = tuple(
            rope.cos_sin(batch.positions, lengths, counts, kernels.rope_angles) for rope in self.ropes
        )

        x: torch.Tensor | None = None  # the last sub-layer's output, not yet added
        post_norm: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers, self.first_layer):
            group, index_in_group = self._places[index]
            if index not in skipped.attention:
                before = None if changes is None or x is None else residual.clone()
                prepared, residual = kernels.add_rms_norm(
                    x, residual, layer.attn_norm, spec.rms_eps, post_norm
                )
                if changes is not None and before is not None:
                    changes.append(_relative_change(before, residual))
                x = attention(
                    prepared,
                    layer,
                    spec,
                    kernels,
                    batch,
                    groups[group],
                    index_in_group,
                    angles[spec.layers[index].rope],
                )
                post_norm = layer.post_attention_norm
            if index not in skipped.feed_forward:
                before = None if changes is None or x is None else residual.clone()
                prepared, residual = kernels.add_rms_norm(
                    x, residual, layer.ffn_norm, spec.rms_eps, post_norm
                )
                if changes is not None and before is not None:
                    changes.append(_relative_change(before, residual))
                x = feed_forward(prepared, layer, spec, kernels)
                post_norm = layer.post_ffn_norm
        assert x is not None
        return x, residual, post_norm


def _relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """Mean over rows [tokens, hidden] of |after - before| / |before|."""
    return float(((after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-30)).mean())


def _weight_bytes(weights: DecoderWeights) -> int:
    total = weights.embedding.nbytes + weights.output_norm.nbytes
    floats_or_blocks = DenseWeight | BlockQuantWeight | NativeWeight
    shared = weights.head is weights.embedding or (
        isinstance(weights.head, floats_or_blocks)
        and isinstance(weights.embedding, floats_or_blocks)
        and weights.head.data.data_ptr() == weights.embedding.data.data_ptr()
    )
    total += 0 if shared else weights.head.nbytes
    for layer in weights.layers:
        total += sum(w.nbytes for w in (layer.qkv, layer.attn_output, layer.gate_up, layer.down))
        gains = (
            layer.attn_norm,
            layer.ffn_norm,
            layer.q_norm,
            layer.k_norm,
            layer.post_attention_norm,
            layer.post_ffn_norm,
        )
        total += sum(gain.nbytes for gain in gains if gain is not None)
    return total
