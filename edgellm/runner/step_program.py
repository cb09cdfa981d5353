"""A pass as one compiled program of native kernels, the twin of the decoder's single ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm_kernels.batch import ForwardBatch, KVStorage
from edgellm_kernels.ops import (
    SKIPS_ATTENTION,
    SKIPS_FEED_FORWARD,
    NativeStep,
    StepSpec,
)
from edgellm_models.network.decoder import Decoder, LastRows
from edgellm_models.network.sub_layers import SkippedSubLayers

_MAX_READY_ROWS = 32
"""Rows whose logits are made in the same call as the layers."""


@dataclass(frozen=True)
class ReadyRows(LastRows):
    """Rows whose logits exist already; x and residual are empty."""

    ready: torch.Tensor
    """[rows, vocab]"""

    def __len__(self) -> int:
        return self.ready.shape[0]

    def part(self, start: int, end: int) -> LastRows:
        return ReadyRows(self.x, self.residual, self.ready[start:end])


class StepProgram:
    """A decoder whose passes run in one foreign call each; the results are those of its single ops, bit for
    bit.
    """

    def __init__(self, decoder: Decoder) -> None:
        spec, weights = decoder.spec, decoder.weights
        places = {
            layer: (group, index)
            for group, members in enumerate(spec.kv_groups)
            for index, layer in enumerate(members.layers)
        }
        none = torch.zeros(0, dtype=torch.int64)
        self.decoder = decoder
        self.native = NativeStep(
            StepSpec(
                hidden=spec.hidden_size,
                heads=spec.num_heads,
                ffn=spec.ffn_size,
                activation=spec.activation,
                exact=decoder.kernels.activations == "exact",
                eps=spec.rms_eps,
                query_scale=spec.query_scale,
                softcap=spec.attention_softcap,
                embedding_scale=spec.embedding_scale,
                ropes=tuple(
                    (rope.frequencies(0, None, none).contiguous(), rope.factor) for rope in decoder.ropes
                ),
                places=tuple(
                    (*places[index], layer.rope, layer.window) for index, layer in enumerate(spec.layers)
                ),
            ),
            weights.layers,
            weights.output_norm,
            weights.head,
            weights.embedding,
        )
        self._empty = torch.empty(0)
        self._left_out: dict[SkippedSubLayers, bytes] = {}
        self.turns_by_length = any(rope.spec.switch_length is not None for rope in decoder.ropes)
        """Whether a rope's angles depend on the length of a sequence."""

    def run(
        self, batch: ForwardBatch, kv: Sequence[KVStorage], skipped: SkippedSubLayers | None = None
    ) -> LastRows:
        """See Decoder.run."""
        left_out = self.bits(skipped) if skipped is not None and len(skipped) else None
        return self._run(batch, kv, left_out, with_logits=batch.logit_rows.shape[0] <= _MAX_READY_ROWS)

    def run_to_states(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> LastRows:
        """See Decoder.run_to_states."""
        return self._run(batch, kv, None, with_logits=False)

    def hidden_states(self, rows: LastRows) -> torch.Tensor:
        """See Decoder.hidden_states."""
        return self.decoder.hidden_states(rows)

    def _run(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        left_out: bytes | None,
        *,
        with_logits: bool,
    ) -> LastRows:
        decoder = self.decoder
        embedded = None
        if not self.native.embeds:
            embedded = decoder.kernels.embed(
                batch.token_ids, decoder.weights.embedding, decoder.spec.embedding_scale
            )
        angles = self._own_angles(batch) if self.turns_by_length else ()
        out = self.native.run(batch, kv, embedded, angles, with_logits=with_logits, skipped=left_out)
        if not with_logits:
            return LastRows(*out)
        logits, cap = out[0], decoder.spec.final_softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)  # as lm_head does
        return ReadyRows(self._empty, self._empty, logits)

    def logits(self, rows: LastRows) -> torch.Tensor:
        """See Decoder.logits."""
        return rows.ready if isinstance(rows, ReadyRows) else self.decoder.logits(rows)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """See Decoder.forward."""
        return self.logits(self.run(batch, kv))

    def bits(self, skipped: SkippedSubLayers) -> bytes:
        """By layer what is left out, as the native program reads it."""
        known = self._left_out.get(skipped)
        if known is None:
            layers = range(self.decoder.spec.num_layers)
            skipped.check(len(layers))
            known = self._left_out[skipped] = bytes(
                SKIPS_ATTENTION * (i in skipped.attention) | SKIPS_FEED_FORWARD * (i in skipped.feed_forward)
                for i in layers
            )
        return known

    def _own_angles(self, batch: ForwardBatch) -> tuple[torch.Tensor | None, ...]:
        """By rope, the frequencies of every token where a sequence is past the rope's switch length."""
        counts = batch.query_starts.diff().long()
        lengths = batch.groups[0].key_lengths if batch.rope_lengths is None else batch.rope_lengths
        by_rope = (rope.frequencies(len(batch.positions), lengths, counts) for rope in self.decoder.ropes)
        return tuple(own.contiguous() if own.ndim == 2 else None for own in by_rope)
