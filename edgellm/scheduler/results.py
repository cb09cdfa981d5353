"""What a step brought for one sequence: checked against its plan, and in the form that the sequence keeps."""

from __future__ import annotations

from dataclasses import replace

from edgellm.contracts import PlannedSequence, SequenceResult
from edgellm.scheduler.sequence import Sequence
from edgellm_models.errors import EngineError


def check_tokens(planned: PlannedSequence, brought: SequenceResult) -> None:
    """EngineError unless there are as many tokens as the plan allows."""
    if planned.needs_logits and not brought.token_ids:
        raise EngineError(f"sequence {planned.sequence_id} needed a token and its step brought none")
    if len(brought.token_ids) > (planned.draft_limit + 1 if planned.needs_logits else 0):
        raise EngineError(
            f"sequence {planned.sequence_id} was given {len(brought.token_ids)} tokens for a draft of "
            f"{planned.draft_limit}"
        )


def drop_scored(sequence: Sequence, planned: PlannedSequence, brought: SequenceResult) -> SequenceResult:
    """Prompt logprobs that an earlier run has delivered already are not delivered again."""
    if not brought.prompt_logprobs:
        return brought
    first = planned.start_position + 1
    fresh = brought.prompt_logprobs[max(0, sequence.scored - first) :]
    sequence.scored = max(sequence.scored, first + len(brought.prompt_logprobs))
    return replace(brought, prompt_logprobs=fresh)


def scores_by_block(planned: PlannedSequence, brought: SequenceResult) -> list[tuple[float, ...]]:
    """A step's block scores as ``Sequence.block_scores`` has them; EngineError where they are others."""
    wanted = [len(blocks) for blocks in planned.score_blocks]
    if wanted != [len(scores) for scores in brought.block_scores]:
        raise EngineError(f"sequence {planned.sequence_id} needed other block scores than it got")
    return [tuple(s[i] if s else 0.0 for s in brought.block_scores) for i in range(max(wanted, default=0))]
