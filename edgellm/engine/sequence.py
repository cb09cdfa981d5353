"""The state of one sample of a request while it waits and runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.cache.block_pool import BlockTable
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


@dataclass
class Sample:
    """One answer in the making. Times are monotonic seconds."""

    sequence_id: int
    request: GenerationRequest
    index: int
    seed: int
    answer: Answer
    tables: list[BlockTable]
    arrived: float
    token_ids: list[int]
    """Prompt and answer; the newest has not been run yet."""
    fills_context: bool
    """Its limit is the context's, not the request's: reaching it deserves a notice."""
    computed: int = 0
    """Leading tokens whose KV is committed."""
    prefilled: int = 0
    """Prompt tokens that were computed, for the timings: again after a restart does not count."""
    restarted: bool = False
    """The KV of everything so far is being computed again; no more than once."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    queue_position: int | None = None
    draft: DraftCounts = field(default_factory=DraftCounts)
    ended: bool = False

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
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return RequestTimings(
            queued_s=max(0.0, started - self.arrived),
            prefill_s=first - started,
            decode_s=last - first,
            prefill_tokens=self.prefilled,
            completion_tokens=self.answer.num_tokens,
        )

    def last_event(self, reason: FinishReason, now: float, **fields: Any) -> TokenEvent:
        """The event that closes the sample, with usage, timings and seed beside what the step brought."""
        return TokenEvent(
            self.request.request_id,
            self.index,
            finish_reason=reason,
            usage=Usage(len(self.request.prompt_token_ids), 0, self.answer.num_tokens),
            timings=self.timings(now),
            draft=self.draft,
            seed=self.seed,
            **fields,
        )
