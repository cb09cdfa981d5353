"""Chooses at load what runs a pass: a compiled step program, or the decoder's single ops, its twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm_kernels.batch import ForwardBatch, KVStorage
from edgellm_kernels.ops import (
    SKIPS_ATTENTION,
    SKIPS_FEED_FORWARD,
    Kernels,
    NativeStep,
    StepSpec,
    can_compile_step,
    native_serves,
)
from edgellm_models.errors import Notice
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


def choose_program(decoder: Decoder, kv: Sequence[KVStorage]) -> Decoder | StepProgram:
    """The step program where every op, every weight and the form of the KV pages are native; on a GPU with
    Triton kernels a decoder with captured steps, unless int4 pages or a rope that turns by length need the
    host."""
    if decoder.kernels.device.type == "cuda" and decoder.kernels.chosen["linear"] == "triton":
        by_length = any(rope.spec.switch_length is not None for rope in decoder.ropes)
        if by_length or any(pages.has_int4 for pages in kv):
            return decoder
        from edgellm.runner.decode_graphs import DecodeGraphs

        return DecodeGraphs(decoder, kv, max_blocks=max(pages.num_blocks for pages in kv))
    native = all(backend == "native" for backend in decoder.kernels.chosen.values())
    if not native or not all(map(native_serves, kv)):
        return decoder
    if not can_compile_step(decoder.weights.layers, decoder.weights.head):
        return decoder
    return StepProgram(decoder)


def kv_left_to_torch(parts: Sequence[Kernels], kv: Sequence[KVStorage], name: str) -> Notice | None:
    """What to say where a part of the model chose kernels for attention that have none for the form of these
    pages, whose type is called ``name``: torch then serves in their place."""
    lacking = {"native": not all(map(native_serves, kv)), "triton": any(pages.has_int4 for pages in kv)}
    backends = [part.chosen["paged_attention"] for part in parts]
    backend = next((backend for backend in backends if lacking.get(backend)), None)
    if backend is None:
        return None
    detail = (
        f"attention over {name} KV is computed by torch, more slowly: the {backend} kernels have none for it"
    )
    if name == "fp8":
        detail += "; --kv-dtype int8 takes the same bytes, rounds less, and is computed by them"
    return Notice("kv_on_torch", detail)
