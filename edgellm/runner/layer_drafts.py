"""Drafts by the model itself without some sub-layers, in place in the cache that verification rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.contracts import PlannedSequence
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.kv_state import KVState
from edgellm.runner.sampler import Sampler
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers


class LayerDrafts:
    """The same weights and the same pages: a drafting pass writes the K and V of the sub-layers that it runs
    into the slots behind the committed ones, quantized as any row is; verification writes those of all layers
    there before it reads them. Of a draft that is not kept nothing has to be taken back.
    """

    def __init__(self, decoder: Decoder, skipped: SkippedSubLayers, device: str = "cpu") -> None:
        skipped.check(decoder.spec.num_layers)
        self._decoder = decoder
        self._skipped = skipped
        self._device = device

    def add(
        self, sequences: Sequence[PlannedSequence], kv: KVState, sampler: Sampler, block_size: int
    ) -> list[PlannedSequence]:
        """The sequences, those with ``draft_by_layers`` with the tokens that were drafted for them.

        Nothing is drafted over int4 pages, whose unquantized rows a drafting pass would displace.
        """
        drafts: dict[int, list[int]] = {s.sequence_id: [] for s in sequences if s.draft_by_layers}
        open_ = [s for s in sequences if s.draft_by_layers and s.draft_limit > 0 and not kv.has_tail]
        while open_:
            rows = [_next_row(s, drafts[s.sequence_id]) for s in open_]
            batch = build_batch(rows, block_size, self._device)
            logits = self._decoder.logits(self._decoder.run(batch, kv.storages, self._skipped))
            ids = [row.sequence_id for row in rows]
            guessed = sampler.guess(logits, ids, [row.start_position + 1 for row in rows])
            still = []
            for sequence, token in zip(open_, guessed, strict=True):
                draft = drafts[sequence.sequence_id]
                if token is not None:
                    draft.append(token)
                    if len(draft) < sequence.draft_limit:
                        still.append(sequence)
            open_ = still
        return [
            replace(s, draft_token_ids=tuple(drafts.get(s.sequence_id, s.draft_token_ids))) for s in sequences
        ]


def _next_row(sequence: PlannedSequence, draft: Sequence[int]) -> PlannedSequence:
    """The last token of a sequence or of its draft as a step of its own."""
    return replace(
        sequence,
        token_ids=(draft[-1],) if draft else sequence.token_ids,
        start_position=sequence.start_position + len(draft),
        total_length=sequence.total_length + len(draft),
        needs_logits=True,
        prompt_logits=False,
    )
