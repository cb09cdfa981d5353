"""The step that most steps are: one token of one sequence, with or without a draft behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from edgellm.contracts import PlannedSequence, StepPlan
from edgellm.runner.lone_row import LoneRow, lone_row
from edgellm.runner.sampler import Draw, Sampler
from edgellm.speculative.acceptance import verified_run
from edgellm_kernels.batch import KVStorage

MAX_ROWS = 17
"""Of such a step: a token, and as long a draft as there is."""


class LoneDecode:
    """Runs such steps on a native step program; they bring what ``ModelRunner`` finds for any plan."""

    def __init__(self, row: LoneRow) -> None:
        self._row = row

    def sequence(self, plan: StepPlan) -> PlannedSequence | None:
        """The plan's only sequence, where there is nothing else to the plan than its next tokens."""
        if len(plan.sequences) != 1 or plan.started or plan.ended or plan.forked or plan.preempted:
            return None
        [sequence] = plan.sequences
        if plan.block_copies or plan.host_copies or not sequence.needs_logits or sequence.token_masks:
            return None
        if not self._row.fits(sequence) or sequence.draft_limit >= MAX_ROWS:
            return None
        return None if sequence.prompt_logits or sequence.score_blocks else sequence

    def draw(self, sequence: PlannedSequence, sampler: Sampler) -> Sequence[Draw]:
        """Runs the sequence's token and its draft, and draws what follows: see Sampler.verify."""
        draft = sequence.draft_token_ids
        self._row.run(sequence.rows, sequence.start_position, sequence.block_tables)
        if sampler.takes_largest(sequence.sequence_id):
            tokens = verified_run(draft, self._largest)
            if tokens:
                return [Draw(token) for token in tokens]
        position = sequence.start_position + 1
        with torch.inference_mode():
            [draws] = sampler.verify(self._row.logits, [sequence.sequence_id], [position], [draft])
        return draws

    def _largest(self, row: int) -> int | None:
        value, token_id = self._row.largest(row)
        return token_id if math.isfinite(value) else None


def lone_decode(program: object, kv: Sequence[KVStorage]) -> LoneDecode | None:
    """None for programs that need more than ids, positions and blocks."""
    row = lone_row(program, kv, max_rows=MAX_ROWS)
    return None if row is None else LoneDecode(row)
