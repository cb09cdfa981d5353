"""Executes step plans: batch, forward pass, sampling. The only part of the runtime that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from edgellm.contracts import SequenceResult, StepPlan, StepResult
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.sampler import Draw, Sampler
from edgellm_kernels.batch import ForwardBatch, KVStorage


class ForwardModel(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, batch: ForwardBatch, kv: Sequence[KVStorage]) -> torch.Tensor:
        """Logits [logit rows, vocab] f32."""
        ...


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
    ) -> None:
        self._decoder = decoder
        self._kv = tuple(kv)
        self._block_size = block_size
        self._device = device
        f16_kv = any(torch.float16 in (pages.keys.dtype, pages.values.dtype) for pages in kv)
        self._sampler = Sampler(vocab_size, f16_kv=f16_kv)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan. Unusable logits are an error of their sequence; a failing kernel raises."""
        for sequence_id in plan.ended:
            self._sampler.end(sequence_id)
        for start in plan.started:
            self._sampler.start(start)
        if not plan.sequences:
            return StepResult(plan.step, ())
        wanted = [s for s in plan.sequences if s.needs_logits]
        with torch.inference_mode():
            batch = build_batch(plan.sequences, self._block_size, self._device)
            logits = self._decoder.forward(batch, self._kv)
            draws: dict[int, Draw] = {}
            if wanted:
                ids = [s.sequence_id for s in wanted]
                positions = [s.start_position + len(s.token_ids) for s in wanted]
                draws = dict(zip(ids, self._sampler.sample(logits, ids, positions), strict=True))
        return StepResult(
            plan.step, tuple(_result(s.sequence_id, draws.get(s.sequence_id)) for s in plan.sequences)
        )


def _result(sequence_id: int, draw: Draw | None) -> SequenceResult:
    if draw is None:
        return SequenceResult(sequence_id, ())
    if draw.error is not None:
        return SequenceResult(sequence_id, (), error=draw.error)
    return SequenceResult(
        sequence_id, (draw.token_id,), logprobs=() if draw.logprob is None else (draw.logprob,)
    )
