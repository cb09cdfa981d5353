"""What drafts tokens: the protocol that every drafter meets, whatever it drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 16
"""Drafted tokens of one sequence and step at most."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    token_ids: tuple[int, ...]
    match: int = 1
    """How many of the last tokens led to it: the more, the likelier it is right; 0 is a hope."""
    agreed: bool | None = None
    """Whether all other places that the last tokens lead to begin as it does, or none does; None where there
    are none, or both."""


class Drafter(Protocol):
    """Proposes continuations. Sequences are named by the ids that the scheduler knows them by."""

    name: str

    def begin(
        self, sequence_id: int, prompt: Sequence[int], *, prediction: Sequence[int] = (), salt: str = ""
    ) -> None:
        """Takes up a sequence. ``prediction`` is what its caller expects it to say; what others said is
        proposed only to sequences of the same ``salt``."""
        ...

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Tokens of the answer that are final."""
        ...

    def propose(self, sequence_id: int, most: int) -> Draft | None:
        """1 to ``most`` tokens that may come next; None where it knows nothing."""
        ...

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence; unknown ids are ignored."""
        ...
