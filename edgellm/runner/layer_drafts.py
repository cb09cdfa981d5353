"""Drafts by the model itself without some sub-layers, in place in the cache that verification rewrites."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from edgellm.contracts import PlannedSequence, StepPlan
from edgellm.runner.batch_builder import build_batch
from edgellm.runner.kv_state import KVState
from edgellm.runner.lone_row import LoneRow, lone_row
from edgellm.runner.sampler import Sampler
from edgellm.runner.step_program import StepProgram
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Drafted:
    """A plan's sequences with what was drafted for them, and what that took."""

    sequences: tuple[PlannedSequence, ...]
    seconds: float = 0.0
    passes: int = 0


class RunnerDrafter(Protocol):
    """What drafts inside of the runner: it sees the KV, and its passes are forward passes."""

    @property
    def sees_every_step(self) -> bool:
        """Whether ``add`` must be called for steps in which nothing is drafted by the runner too."""
        ...

    def add(self, plan: StepPlan, kv: KVState, sampler: Sampler, block_size: int) -> Drafted:
        """The plan's sequences, those with ``draft_by_runner`` with the tokens drafted for them."""
        ...


class LayerDrafts:
    """The same weights and the same pages: a drafting pass writes the K and V of the sub-layers that it runs
    into the slots behind the committed ones, quantized as any row is; verification writes those of all layers
    there before it reads them. Of a draft that is not kept nothing has to be taken back.
    """

    sees_every_step = False

    def __init__(
        self,
        program: Decoder | StepProgram,
        skipped: SkippedSubLayers,
        device: str = "cpu",
        *,
        stop_below: float = 0.0,
    ) -> None:
        """``stop_below``: a draft ends behind a token of which the passes are less sure than this."""
        decoder = program.decoder if isinstance(program, StepProgram) else program
        skipped.check(decoder.spec.num_layers)
        self._program = program
        self._skipped = skipped
        self._device = device
        self._stop_below = stop_below
        self._lone: tuple[KVState, LoneRow | None] | None = None
        """How a sequence that drafts alone runs its passes in these pages."""

    def add(self, plan: StepPlan, kv: KVState, sampler: Sampler, block_size: int) -> Drafted:
        """See RunnerDrafter.

        Nothing is drafted over int4 pages, whose unquantized rows a drafting pass would displace.
        """
        drafts: dict[int, list[int]] = {s.sequence_id: [] for s in plan.sequences if s.draft_by_runner}
        if not drafts:
            return Drafted(plan.sequences)
        open_ = [s for s in plan.sequences if s.draft_by_runner and s.draft_limit > 0 and not kv.has_tail]
        begin, passes = time.perf_counter(), 0
        row = self._row(kv) if len(open_) == 1 and len(open_[0].token_ids) == 1 else None
        while open_ and row is not None:
            [sequence] = open_
            draft = drafts[sequence.sequence_id]
            token_ids = draft[-1:] or sequence.token_ids
            row.run(token_ids, sequence.start_position + len(draft), sequence.block_tables)
            passes += 1
            open_ = extend_drafts(open_, drafts, sampler, row.logits, self._stop_below)
        while open_:
            rows = [next_row(s, drafts[s.sequence_id]) for s in open_]
            batch = build_batch(rows, block_size, self._device)
            logits = self._program.logits(self._program.run(batch, kv.storages, self._skipped))
            passes += 1
            open_ = extend_drafts(open_, drafts, sampler, logits, self._stop_below)
        return Drafted(with_drafts(plan.sequences, drafts), time.perf_counter() - begin, passes)

    def _row(self, kv: KVState) -> LoneRow | None:
        if self._lone is None or self._lone[0] is not kv:
            self._lone = kv, lone_row(self._program, kv.storages, self._skipped)
        return self._lone[1]


def extend_drafts(
    sequences: Sequence[PlannedSequence],
    drafts: dict[int, list[int]],
    sampler: Sampler,
    logits: torch.Tensor,
    stop_below: float,
) -> list[PlannedSequence]:
    """Adds to each draft the token that its row of ``logits`` [sequences, vocab] says; those that go on."""
    ids = [s.sequence_id for s in sequences]
    places = [s.start_position + len(drafts[s.sequence_id]) + 1 for s in sequences]
    guessed = sampler.guess(logits, ids, places)
    sure = [1.0] * len(ids) if stop_below <= 0 else sampler.confidences(logits, ids, guessed)
    going_on = []
    for sequence, token, confidence in zip(sequences, guessed, sure, strict=True):
        draft = drafts[sequence.sequence_id]
        if token is None:
            continue
        draft.append(token)
        if len(draft) < sequence.draft_limit and confidence >= stop_below:
            going_on.append(sequence)
    return going_on


def with_drafts(
    sequences: Sequence[PlannedSequence], drafts: dict[int, list[int]]
) -> tuple[PlannedSequence, ...]:
    """The sequences, those in ``drafts`` with their tokens."""
    return tuple(
        replace(s, draft_token_ids=tuple(drafts[s.sequence_id])) if s.sequence_id in drafts else s
        for s in sequences
    )


def next_row(sequence: PlannedSequence, draft: Sequence[int]) -> PlannedSequence:
    """The last token of a sequence or of its draft as a step of its own."""
    return replace(
        sequence,
        token_ids=(draft[-1],) if draft else sequence.token_ids,
        start_position=sequence.start_position + len(draft),
        total_length=sequence.total_length + len(draft),
        needs_logits=True,
        prompt_logits=False,
    )
