"""One answer as it grows: which tokens are kept, what text is certain, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm.contracts import FinishReason, SamplingParams
from edgellm.engine.stop_strings import StopStrings
from edgellm_models.errors import EngineError


class TextDecoder(Protocol):
    """Ids to text, append-only, whole characters only (tokenizer/stream_decoder.py)."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class AnswerConstraint(Protocol):
    """What an answer must be (constraint/matcher.py)."""

    @property
    def is_finished(self) -> bool: ...

    def advance(self, token_ids: Sequence[int]) -> None: ...

    def mask(self, *, may_end: bool = True) -> bytes: ...

    def masks(self, draft: Sequence[int], *, may_end: bool = True) -> list[bytes]: ...

    def accepts(self, token_ids: Sequence[int]) -> int: ...

    def fork(self) -> AnswerConstraint: ...


@dataclass(frozen=True)
class AnswerStep:
    """What the tokens of one step brought."""

    token_ids: tuple[int, ...]
    """Those that belong to the answer: none after the one that ended it."""
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    """Why its constraint cannot go on; the reason is then ERROR."""


class Answer:
    """Applies end ids, stop strings, a constraint and the token limit one token at a time.

    So a step that brings several tokens ends exactly where one by one would have ended. The token that ends
    the answer (an end id, or the one that completes a stop string or all that the constraint allows) is kept
    and counted; an end id gives no text. ``limit`` is the number of tokens at which the answer ends with
    LENGTH.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        limit: int,
        vocab_size: int,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._may_end = not sampling.ignore_eos
        self._decoder = decoder
        self._stops = StopStrings(sampling.stop)
        ends = frozenset(sampling.stop_token_ids)
        self._end_ids = ends if sampling.ignore_eos else ends | end_ids
        self._limit = limit
        self._vocab_size = vocab_size
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        """The limit is reached, as it is from the start when no token was asked for."""
        return self.num_tokens >= self._limit

    @property
    def is_finished(self) -> bool:
        """The constraint is met and allows nothing more, as it may from the start."""
        return self._constraint is not None and self._constraint.is_finished

    def token_masks(self) -> tuple[bytes, ...]:
        """The mask of the next token, as ``PlannedSequence.token_masks`` holds it."""
        return () if self._constraint is None else (self._constraint.mask(may_end=self._may_end),)

    def draftable(self, draft: Sequence[int]) -> tuple[int, ...]:
        """The leading tokens of a draft that can all be followed by another one: it ends before one that ends
        the answer, and before one that the constraint forbids."""
        end = next((i for i, token_id in enumerate(draft) if token_id in self._end_ids), len(draft))
        found = tuple(draft[:end])
        return found if self._constraint is None else found[: self._constraint.accepts(found)]

    def drafted_masks(self, draft: Sequence[int]) -> tuple[bytes, ...]:
        """The masks of the next token and of those behind the drafted ones, as many as there are: fewer than
        one per drafted token where the constraint ends or cannot say on the way."""
        if self._constraint is None:
            return ()
        try:
            # A walk that fails leaves a matcher that cannot go back, so it is a copy that walks.
            masks = self._constraint.fork().masks(draft, may_end=self._may_end)
        except EngineError:  # met again, and told, if the answer comes there
            return self.token_masks()
        # Behind its end nothing may be drawn.
        return tuple(masks if any(masks[-1]) else masks[:-1])

    def push(self, token_ids: Sequence[int]) -> AnswerStep:
        """Adds the tokens of one step, up to the one that ends the answer."""
        if len(token_ids) == 1 and self._constraint is None and self._is_plain(token_ids[0]):
            self.num_tokens += 1
            return AnswerStep(tuple(token_ids), self._decoder.push(token_ids), None)
        kept: list[int] = []
        text: list[str] = []
        reason: FinishReason | None = None
        for token_id in token_ids:
            kept.append(token_id)
            self.num_tokens += 1
            finished, error = self._advance(token_id)
            if error is not None:
                text.append(self.finish())
                return AnswerStep(tuple(kept), "".join(text), FinishReason.ERROR, error)
            if token_id in self._end_ids:
                reason = FinishReason.STOP
            elif token_id < self._vocab_size:  # rows that pad the embedding stand for no text
                text.append(self._stops.push(self._decoder.push([token_id])))
                if self._stops.matched is not None:
                    reason = FinishReason.STOP
            if reason is None and finished:
                reason = FinishReason.STOP
            if reason is None and self.is_full:
                reason = FinishReason.LENGTH
            if reason is not None:
                text.append(self.finish())
                if self._stops.matched is not None:
                    reason = FinishReason.STOP
                break
        return AnswerStep(tuple(kept), "".join(text), reason)

    def _is_plain(self, token_id: int) -> bool:
        """Neither this token nor its text can end the answer."""
        return (
            self.num_tokens + 1 < self._limit
            and token_id < self._vocab_size
            and token_id not in self._end_ids
            and not self._stops.watches
        )

    def _advance(self, token_id: int) -> tuple[bool, str | None]:
        """Whether the constraint is finished with this token, or why it cannot go on."""
        if self._constraint is None:
            return False, None
        try:
            self._constraint.advance((token_id,))
            return self._constraint.is_finished, None
        except EngineError as error:
            return False, str(error)

    def finish(self) -> str:
        """The text that was held: an incomplete character as U+FFFD, the start of a stop string that never
        came.
        """
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
