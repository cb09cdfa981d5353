"""What of a step is drafted: who may draft how much, and what the step's plan says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgellm.contracts import GenerationRequest, PlannedSequence, StepPlan, StepResult, TokenEvent
from edgellm.engine import wording
from edgellm.engine.sequence import Sample
from edgellm.speculative.speculator import Room, Speculator

Samples = Mapping[int, Sample]
"""What has not ended, by sequence id."""


class Drafting:
    """Stands between an engine's samples and the speculator, which knows token ids only."""

    def __init__(self, speculator: Speculator | None, lookahead: int) -> None:
        """``speculator``: None leaves drafts to the runner. ``lookahead``: tokens that may be drafted per
        sequence and step."""
        self.speculator = speculator
        self._lookahead = lookahead

    def most(self, request: GenerationRequest) -> int:
        """Tokens per step that may be drafted for a request."""
        most = self._lookahead
        return most if request.max_draft is None else min(most, request.max_draft)

    def by_runner(self, request: GenerationRequest) -> int:
        """Tokens per step that a runner which drafts itself may draft."""
        if self.speculator is not None or not request.speculate or request.constraint is not None:
            return 0
        return self.most(request)

    def begin(self, sequence_id: int, request: GenerationRequest) -> None:
        """A sample of the request is there."""
        if self.speculator is not None and request.speculate:
            self.speculator.begin(
                sequence_id,
                request.prompt_token_ids,
                prediction=request.prediction_token_ids,
                salt=request.cache_salt,
            )

    def end(self, sequence_id: int) -> None:
        """A sample has ended."""
        if self.speculator is not None:
            self.speculator.end(sequence_id)

    def propose(self, samples: Samples) -> dict[int, tuple[int, ...]]:
        """Drafts for the next step by sequence id; the scheduler gives them room where there is any."""
        if self.speculator is None:
            return {}
        decoding = [sample for sample in samples.values() if sample.is_decoding]
        rooms = []
        for sample in decoding:
            sequence = sample.sequence
            sequence.draft_limit = 0
            left = sequence.max_new_tokens - sequence.num_answered - 1
            most = min(self.most(sample.request), left)
            if most > 0:
                # Masks of drafted rows are made before the step; a draft model must see all of a text.
                free = not sample.token_masks and not (
                    self.speculator.runner_follows and sequence.eviction is not None
                )
                rooms.append(Room(sample.sequence_id, most, sample.answer.draftable, free))
        mixed = any(sample.is_prefilling for sample in samples.values())
        drafts = self.speculator.propose(rooms, len(decoding), mixed=mixed)
        for sequence_id, draft in drafts.items():
            samples[sequence_id].sequence.draft_limit = len(draft)
        for sequence_id, count in self.speculator.runner_counts.items():
            samples[sequence_id].sequence.draft_limit = count
        return drafts

    def planned(self, plan: StepPlan, drafts: Mapping[int, tuple[int, ...]], samples: Samples) -> StepPlan:
        """The plan with the drafts that found room and the masks of the constraints that its rows are drawn
        under."""
        changed: dict[int, PlannedSequence] = {}
        for index, planned in enumerate(plan.sequences):
            sample = samples[planned.sequence_id]
            if planned.is_prefill and self._runner_follows(sample):
                planned = changed[index] = replace(planned, draft_by_runner=True)
            if not planned.needs_logits:
                continue
            draft, masks = drafts.get(planned.sequence_id, ())[: planned.draft_limit], sample.token_masks
            if draft and masks:
                masks = sample.answer.drafted_masks(draft)
                draft = draft[: len(masks) - 1]
            by_runner = planned.sequence_id not in drafts and planned.draft_limit > 0
            if draft or masks or (by_runner and self.speculator is not None):
                by_runner = by_runner or planned.draft_by_runner
                changed[index] = replace(
                    planned, draft_token_ids=draft, token_masks=masks, draft_by_runner=by_runner
                )
        if not changed:
            return plan
        return replace(plan, sequences=tuple(changed.get(i, s) for i, s in enumerate(plan.sequences)))

    def settle(
        self, plan: StepPlan, result: StepResult, seconds: float, samples: Samples
    ) -> list[TokenEvent]:
        """Learns from a step, which took ``seconds``; what there is to tell of drafts that no longer pay."""
        if self.speculator is None:
            return []
        brought = {one.sequence_id: one.token_ids for one in result.results}
        drafted = {one.sequence_id: (one.draft_proposed, one.draft_accepted) for one in result.results}
        self.speculator.settle(
            plan.sequences,
            brought,
            seconds,
            drafted,
            pass_seconds=result.draft_seconds,
            passes=result.draft_passes,
        )
        return [
            samples[sequence_id].event(notice=wording.spec_disarmed(why))
            for sequence_id, why in self.speculator.disarmed()
        ]

    def _runner_follows(self, sample: Sample) -> bool:
        """Whether a draft model runs along with the prompt."""
        return (
            self.speculator is not None
            and self.speculator.runner_follows
            and sample.request.speculate
            and sample.sequence.eviction is None
        )
