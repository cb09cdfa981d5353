"""The state of one sample of a request while it waits and runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.contracts import (
    DraftCounts,
    FinishReason,
    GenerationRequest,
    RequestTimings,
    SequenceResult,
    TokenEvent,
    Usage,
)
from edgellm.engine.answer import Answer
from edgellm.scheduler.sequence import Outcome, Sequence


@dataclass(eq=False)
class Sample:
    """One answer in the making. Times are monotonic seconds."""

    request: GenerationRequest
    index: int
    answer: Answer
    sequence: Sequence
    """What the scheduler knows of it: tokens, what is computed, what was reused."""
    fills_context: bool
    """Its limit is the context's, not the request's: reaching it deserves a notice."""
    token_masks: tuple[bytes, ...] = ()
    """What its constraint allows next, for ``PlannedSequence.token_masks``."""
    prefilled: int = 0
    """Prompt tokens that were computed, for the timings: again after a preemption does not count."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    queue_position: int | None = None
    draft: DraftCounts = field(default_factory=DraftCounts)

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed and its next step runs one token."""
        return self.sequence.has_kv and self.answer.num_tokens > 0 and self.sequence.remaining == 1

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens of it run in the next step."""
        return self.sequence.has_kv and self.sequence.remaining > 1

    @property
    def is_midway(self) -> bool:
        """Its answer has begun, and no constraint has a say in it."""
        return self.first_token_at is not None and self.request.constraint is None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    def event(self, **fields: Any) -> TokenEvent:
        """An event of this sample."""
        return TokenEvent(self.request.request_id, self.index, **fields)

    def prompt_progress(self, outcome: Outcome) -> int | None:
        """Prompt tokens whose KV exists after a step; None when the step was not one of the prompt."""
        if not outcome.is_prompt:
            return None
        done = min(outcome.computed, self.prompt_length)
        self.prefilled = max(self.prefilled, done - self.sequence.cached_tokens)
        return done

    def add_draft(self, result: SequenceResult, kept: int) -> None:
        """Counts drafted tokens; those behind the token that ended the answer were not accepted."""
        if result.draft_proposed:
            accepted = min(result.draft_accepted, kept)
            self.draft = replace(
                self.draft,
                proposed=self.draft.proposed + result.draft_proposed,
                accepted=self.draft.accepted + accepted,
                steps=self.draft.steps + 1,
            )

    def timings(self, now: float) -> RequestTimings:
        """Queue until its first step, prefill until the first token, decode until the last."""
        arrived = self.sequence.arrival
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return RequestTimings(
            queued_s=max(0.0, started - arrived),
            prefill_s=first - started,
            decode_s=last - first,
            prefill_tokens=self.prefilled,
            completion_tokens=self.answer.num_tokens,
        )

    def last_event(self, reason: FinishReason, now: float, **fields: Any) -> TokenEvent:
        """The event that closes the sample, with usage, timings and seed beside what the step brought."""
        return self.event(
            finish_reason=reason,
            usage=Usage(self.prompt_length, self.sequence.cached_tokens, self.answer.num_tokens),
            timings=self.timings(now),
            draft=self.draft,
            seed=self.sequence.start.seed,
            **fields,
        )
