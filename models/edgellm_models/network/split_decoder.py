"""A model whose first layers run on one device and the others on another: one hidden state crosses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm_kernels.batch import ForwardBatch, KVStorage, SplitKVStorage
from edgellm_models.errors import Notice
from edgellm_models.network.decoder import Decoder, LastRows
from edgellm_models.network.sub_layers import SkippedSubLayers


class SplitDecoder:
    """Two parts of a model, one behind the other, as one decoder. KV lies with its layers: ``kv`` are
    SplitKVStorages.

    Attributes are those of Decoder; ``kernels`` are the last part's.
    """

    def __init__(self, first: Decoder, last: Decoder) -> None:
        assert first.first_layer == 0 and last.first_layer == len(first.weights.layers)
        assert last.first_layer + len(last.weights.layers) == last.spec.num_layers
        self.parts = (first, last)
        self.spec = last.spec
        self.kernels = last.kernels
        self.notices: tuple[Notice, ...] = (*first.notices, *last.notices)
        self.weight_bytes = first.weight_bytes + last.weight_bytes

    def run(
        self, batch: ForwardBatch, kv: Sequence[KVStorage], skipped: SkippedSubLayers | None = None
    ) -> LastRows:
        """See Decoder.run; no sub-layer can be left out."""
        if skipped is not None and len(skipped):
            raise ValueError("a model on two devices runs all of its sub-layers")
        first, last = self.parts
        pages = [group.parts for group in kv if isinstance(group, SplitKVStorage)]
        assert len(pages) == len(kv) == len(self.spec.kv_groups)
        stream = first.stream_behind(batch.to(first.kernels.device), [parts[0] for parts in pages])
        there = last.kernels.device
        return last.run_from(batch.to(there), [parts[1] for parts in pages], stream.to(there))

    def run_to_states(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> LastRows:
        """See Decoder.run_to_states."""
        return self.run(batch, kv)

    def hidden_states(self, rows: LastRows) -> torch.Tensor:
        """See Decoder.hidden_states."""
        return self.parts[1].hidden_states(rows)

    def logits(self, rows: LastRows) -> torch.Tensor:
        """See Decoder.logits."""
        return self.parts[1].logits(rows)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """See Decoder.forward."""
        return self.logits(self.run(batch, kv))
