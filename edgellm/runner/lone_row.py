"""A few rows of one sequence through a native step program, whole or without some sub-layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from edgellm.contracts import PlannedSequence
from edgellm.runner.step_program import StepProgram
from edgellm_kernels.batch import KVStorage
from edgellm_kernels.ops import NativeRow
from edgellm_models.network.sub_layers import SkippedSubLayers


class LoneRow:
    """The Python around a foreign call that has just streamed all weights through the caches runs three times
    as slowly as in a loop of its own, so what counts is how much code and data a step touches.
    """

    def __init__(
        self,
        program: StepProgram,
        kv: Sequence[KVStorage],
        skipped: SkippedSubLayers | None = None,
        max_rows: int = 1,
    ) -> None:
        """``skipped``: the sub-layers that every row leaves out."""
        self._row = NativeRow(program.native, kv, max_rows)
        self._max_rows = max_rows
        self._decoder = program.decoder
        self._embeds = program.native.embeds
        """Whether the program looks token ids up itself."""
        self._softcap = program.decoder.spec.final_softcap
        left_out = program.bits(skipped) if skipped is not None and len(skipped) else None
        self._skipped = None if left_out is None else ctypes.create_string_buffer(left_out, len(left_out))

    @property
    def logits(self) -> torch.Tensor:
        """[rows, vocab] f32: those of the last call, until the next one."""
        return self._row.logits

    def fits(self, sequence: PlannedSequence) -> bool:
        """Whether a sequence's token and its draft are no more than the rows of one call."""
        return len(sequence.token_ids) == 1 and len(sequence.draft_token_ids) < self._max_rows

    def run(self, token_ids: Sequence[int], position: int, tables: tuple[tuple[int, ...], ...]) -> None:
        """The tokens from ``position`` on of a sequence in these blocks; K and V go into the storage."""
        self._row.run(token_ids, position, tables, self._embedded(token_ids), self._skipped)
        if self._softcap is not None:
            with torch.inference_mode():
                self._row.logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def largest(self, row: int = 0) -> tuple[float, int]:
        """The largest logit of a row and its first place; NaN and its place where there is one."""
        return self._row.largest(row)

    def _embedded(self, token_ids: Sequence[int]) -> torch.Tensor | None:
        if self._embeds:
            return None
        ids, decoder = torch.tensor(token_ids, dtype=torch.int64), self._decoder
        return decoder.kernels.embed(ids, decoder.weights.embedding, decoder.spec.embedding_scale)


def lone_row(
    program: object,
    kv: Sequence[KVStorage],
    skipped: SkippedSubLayers | None = None,
    max_rows: int = 1,
) -> LoneRow | None:
    """None for programs that need more than ids, positions and blocks."""
    if isinstance(program, StepProgram) and not program.turns_by_length:
        return LoneRow(program, kv, skipped, max_rows)
    return None
