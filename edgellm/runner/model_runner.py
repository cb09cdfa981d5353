"""Executes step plans: batch, forward pass, sampling. The only part of the runtime that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from edgellm.contracts import PlannedSequence, SequenceResult, StepPlan, StepResult, TokenLogprob
from edgellm.runner.batch_builder import build_batch, num_logit_rows
from edgellm.runner.kv_state import KVState
from edgellm.runner.sampler import Draw, Sampler
from edgellm_kernels.batch import ForwardBatch, KVStorage
from edgellm_kernels.ops import block_scores


class ForwardModel(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Logits [logit rows, vocab] f32."""
        ...


RowSink = Callable[[int, int, torch.Tensor], None]
"""Called with a sequence's id, the position of the token of the first row, and its logits [rows, vocab] f32,
which it must not keep beyond the step: row i is about the token that follows position + i."""


class ModelRunner:
    """A decoder, the KV pages that it writes, and the sampler."""

    def __init__(
        self,
        decoder: ForwardModel,
        kv: Sequence[KVStorage],
        *,
        vocab_size: int,
        block_size: int,
        device: str = "cpu",
        host_kv: Sequence[KVStorage] = (),
    ) -> None:
        self._decoder = decoder
        self._kv = KVState(kv, host_kv)
        self._block_size = block_size
        self._device = device
        f16_kv = any(torch.float16 in (pages.keys.dtype, pages.values.dtype) for pages in kv)
        self._sampler = Sampler(vocab_size, f16_kv=f16_kv)
        self.row_sink: RowSink | None = None
        """Where there is one it is given every row of logits, and prompts are not scored here."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan. Unusable logits are an error of their sequence; a failing kernel raises."""
        for sequence_id in plan.ended:
            self._sampler.end(sequence_id)
        for start in plan.started:
            self._sampler.start(start)
        with torch.inference_mode():
            tail = self._kv.prepare(plan)
        if not plan.sequences:
            return StepResult(plan.step, ())
        with torch.inference_mode():
            batch = build_batch(plan.sequences, self._block_size, self._device, tail)
            logits = self._decoder.forward(batch, self._kv.storages)
            if self.row_sink is None:
                scores = self._score_prompts(plan.sequences, logits)
            else:
                scores = {}
                for sequence, rows in _rows_of(plan.sequences):
                    if rows.stop > rows.start:
                        end = sequence.start_position + len(sequence.token_ids)
                        self.row_sink(sequence.sequence_id, end - (rows.stop - rows.start), logits[rows])
            draws = self._draw(plan.sequences, logits)
            results = [
                self._with_block_scores(s, _result(s.sequence_id, draws.get(s.sequence_id), scores))
                for s in plan.sequences
            ]
        return StepResult(plan.step, tuple(results))

    def _score_prompts(
        self, sequences: Sequence[PlannedSequence], logits: torch.Tensor
    ) -> dict[int, tuple[tuple[TokenLogprob, ...], str | None]]:
        """By sequence id, logprobs of its prompt's tokens, or why there are none."""
        scores = {}
        for sequence, rows in _rows_of(sequences):
            if sequence.prompt_logits:
                sequence_id, start = sequence.sequence_id, sequence.start_position
                scores[sequence_id] = self._sampler.score_prompt(logits[rows], sequence_id, start)
        return scores

    def _with_block_scores(self, sequence: PlannedSequence, result: SequenceResult) -> SequenceResult:
        if not sequence.score_blocks or result.error is not None:
            return result
        groups = zip(self._kv.storages, sequence.score_blocks, strict=True)
        scores = tuple(tuple(block_scores(pages, blocks)) for pages, blocks in groups)
        return replace(result, block_scores=scores)

    def _draw(self, sequences: Sequence[PlannedSequence], logits: torch.Tensor) -> dict[int, Draw]:
        """By sequence id, the draw from its last row, for those that want one."""
        wanted = [(s, rows.stop - 1) for s, rows in _rows_of(sequences) if s.needs_logits]
        if not wanted:
            return {}
        ids = [s.sequence_id for s, _ in wanted]
        positions = [s.start_position + len(s.token_ids) for s, _ in wanted]
        masks = [s.token_masks[0] if s.token_masks else None for s, _ in wanted]
        rows = [row for _, row in wanted]
        if len(rows) < logits.shape[0]:  # else they are all rows, in order
            logits = logits[rows]
        return dict(zip(ids, self._sampler.sample(logits, ids, positions, masks), strict=True))


def _rows_of(sequences: Sequence[PlannedSequence]) -> Iterator[tuple[PlannedSequence, slice]]:
    """Each sequence with its rows of the logits."""
    start = 0
    for sequence in sequences:
        end = start + num_logit_rows(sequence)
        yield sequence, slice(start, end)
        start = end


def _result(
    sequence_id: int,
    draw: Draw | None,
    scores: Mapping[int, tuple[tuple[TokenLogprob, ...], str | None]],
) -> SequenceResult:
    prompt_logprobs, error = scores.get(sequence_id, ((), None))
    if draw is not None and draw.error is not None:
        error = error or draw.error
    if error is not None:
        return SequenceResult(sequence_id, (), error=error)
    if draw is None:
        return SequenceResult(sequence_id, (), prompt_logprobs=prompt_logprobs)
    logprobs = () if draw.logprob is None else (draw.logprob,)
    return SequenceResult(sequence_id, (draw.token_id,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)
