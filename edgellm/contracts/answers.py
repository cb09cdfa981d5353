"""What comes back from a request: tokens, chat events, counts and times."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_models.errors import Notice


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was reused rather than computed."""
    completion_tokens: int


@dataclass(frozen=True)
class RequestTimings:
    """Seconds spent in each phase. The first answer token belongs to the prefill."""

    queued_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens: int = 0
    """Prompt tokens computed (without cached ones)."""
    completion_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.queued_s + self.prefill_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """(n - 1) / decode_s: the first token is the prefill's."""
        if self.decode_s <= 0 or self.completion_tokens < 2:
            return 0.0
        return (self.completion_tokens - 1) / self.decode_s


@dataclass(frozen=True)
class DraftCounts:
    """Speculative decoding of one request or of an engine since its start."""

    proposed: int = 0
    accepted: int = 0
    steps: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability (natural, of the raw softmax) of one token and its best alternatives, sorted."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """What one step brought for one request. The last event of a sample carries its finish_reason."""

    request_id: str
    sample: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text that became certain in this step; never half a character, never part of a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the prompt's tokens from the second on, in order, over the events of the prefill."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    draft: DraftCounts | None = None
    seed: int | None = None
    """The seed that was used, in the last event."""
    queue_position: int | None = None
    """Place in the queue, in events of the waiting phase: 1 is next."""
    embedding: tuple[float, ...] | None = None
    """In the last event of a request that embeds."""
    prefill_done: int | None = None
    """Prompt tokens whose KV exists by now, in events of the prefill phase."""
    notice: Notice | None = None
    error: str | None = None


@dataclass(frozen=True)
class Queued:
    position: int


@dataclass(frozen=True)
class Prefill:
    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Delta:
    text: str = ""
    reasoning: str = ""
    tool_call: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class NoticeEvent:
    notice: Notice


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: RequestTimings
    draft: DraftCounts
    seed: int
    error: str | None = None


ChatEvent = Queued | Prefill | Delta | NoticeEvent | Finished
