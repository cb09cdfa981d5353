"""One answer's way through its constraint: which ids may come next, forward and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.constraint.grammar import one_line
from edgellm_models.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from edgellm.constraint.vocabulary import GrammarVocabulary


class Constraint:
    """The state after the tokens so far; a function of them alone, however it was reached.

    A mask is packed: bit ``id % 8`` of byte ``id // 8`` says whether that id may come next. It never lets
    everything through for want of an answer: where llguidance gives up (a grammar that has become too
    complex, a vocabulary that cannot spell what must come), EngineError says why.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._mask: bytes | None = None
        self._stopped_by_end = False
        self.num_tokens = 0

    def fork(self) -> Constraint:
        """A constraint of its own in the same state."""
        copy = Constraint(self._matcher.deep_copy(), self._vocabulary)
        copy._mask, copy.num_tokens = self._mask, self.num_tokens
        copy._stopped_by_end = self._stopped_by_end
        return copy

    def mask(self, *, may_end: bool = True) -> bytes:
        """Ids that may come next. The ids that end an answer are among them where the text may end here,
        unless ``may_end`` is False. Empty, all zero, only once ``is_finished``."""
        if self._mask is None:
            mask = self._vocabulary.clip(self._matcher.compute_bitmask())
            # In its error state llguidance allows the end ids, wherever the text stands.
            if self._matcher.is_error():
                raise EngineError(f"the constraint cannot go on: {one_line(self._matcher.get_error())}")
            if not self.is_complete and not any(self._vocabulary.without_end(mask)):
                raise EngineError(
                    "the constraint cannot go on: no token of this vocabulary spells what follows"
                )
            self._mask = mask
        return self._mask if may_end else self._vocabulary.without_end(self._mask)

    @property
    def is_complete(self) -> bool:
        """The text so far meets the constraint; more may or may not follow."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """The text meets the constraint and nothing more may follow, so the answer ends here."""
        if self._stopped_by_end:
            return True
        return self.is_complete and not any(self.mask(may_end=False))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Adds tokens. EngineError, and no change, when one of them is not allowed in its place."""
        count = self.accepts(token_ids)
        if count < len(token_ids):
            raise EngineError(
                f"token {token_ids[count]} at place {self.num_tokens + count} of the answer breaks the "
                "constraint"
            )
        if token_ids:
            if not self._matcher.consume_tokens(list(token_ids)):
                raise EngineError(f"the constraint cannot go on: {one_line(self._matcher.get_error())}")
            self.num_tokens += len(token_ids)
            self._mask = None
            self._stopped_by_end = token_ids[-1] in self._vocabulary.end_ids and self._matcher.is_stopped()

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens, such as a draft's, may follow one after another."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def masks(self, draft: Sequence[int], *, may_end: bool = True) -> list[bytes]:
        """The mask here and behind each leading token of ``draft`` that is allowed; the state stays."""
        found = [self.mask(may_end=may_end)]
        here = self._mask
        for token_id in draft:
            if self.is_finished or not self.accepts([token_id]):
                break
            self.advance([token_id])
            found.append(self.mask(may_end=may_end))
        self.rollback(len(found) - 1)
        self._mask = here
        return found

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} of {self.num_tokens} tokens taken back"
        if num_tokens:
            if not self._matcher.rollback(num_tokens):
                raise EngineError(f"the constraint cannot go back: {one_line(self._matcher.get_error())}")
            self.num_tokens -= num_tokens
            self._mask = None
            self._stopped_by_end = False
