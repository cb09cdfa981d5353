"""The step that most steps are: one token of one sequence, without a draft. No batch is built for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from edgellm.contracts import PlannedSequence, StepPlan
from edgellm.runner.sampler import Draw, Sampler
from edgellm.runner.step_program import StepProgram
from edgellm_kernels.batch import KVStorage
from edgellm_kernels.ops import NativeRow


class LoneDecode:
    """Runs such steps on a native step program; what they bring is what ``ModelRunner`` finds for any plan.

    The Python around a foreign call that has just streamed all weights through the caches runs three times as
    slowly as in a loop of its own, so what counts is how much code and data a step touches.
    """

    def __init__(self, program: StepProgram, kv: Sequence[KVStorage]) -> None:
        self._row = NativeRow(program.native, kv)
        self._decoder = program.decoder
        self._token_ids = None if program.native.embeds else torch.zeros(1, dtype=torch.int64)
        """[1]: to be embedded here, where the program does not do it."""
        self._softcap = program.decoder.spec.final_softcap

    def sequence(self, plan: StepPlan) -> PlannedSequence | None:
        """The plan's only sequence, where there is nothing else to the plan than its next token."""
        if len(plan.sequences) != 1 or plan.started or plan.ended or plan.forked or plan.preempted:
            return None
        [sequence] = plan.sequences
        if plan.block_copies or plan.host_copies or not sequence.needs_logits or sequence.draft_by_runner:
            return None
        if len(sequence.token_ids) != 1 or sequence.draft_token_ids or sequence.token_masks:
            return None
        return None if sequence.prompt_logits or sequence.score_blocks else sequence

    def draw(self, sequence: PlannedSequence, sampler: Sampler) -> Draw:
        """Runs the sequence's token and draws the one behind it."""
        [token_id], position = sequence.token_ids, sequence.start_position
        self._row.run(token_id, position, sequence.block_tables, self._embedded(token_id))
        if self._softcap is not None:
            with torch.inference_mode():
                self._row.logits.div_(self._softcap).tanh_().mul_(self._softcap)
        if sampler.takes_largest(sequence.sequence_id):
            value, largest = self._row.largest()
            if math.isfinite(value):
                return Draw(largest)
        with torch.inference_mode():
            [[draw]] = sampler.verify(self._row.logits, [sequence.sequence_id], [position + 1], [()])
        return draw

    def _embedded(self, token_id: int) -> torch.Tensor | None:
        if self._token_ids is None:
            return None
        self._token_ids[0] = token_id
        decoder = self._decoder
        return decoder.kernels.embed(self._token_ids, decoder.weights.embedding, decoder.spec.embedding_scale)


def lone_decode(program: object, kv: Sequence[KVStorage]) -> LoneDecode | None:
    """None for programs that need more than ids, positions and blocks."""
    if isinstance(program, StepProgram) and not program.turns_by_length:
        return LoneDecode(program, kv)
    return None
