"""What each conversation last held in the cache, to say where a request parts from it. Integers only."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CONVERSATIONS = 64


@dataclass(frozen=True)
class Divergence:
    """A request reuses less than its conversation had in the cache."""

    position: int
    """The first token that differs; ``previous_length`` when all of the earlier ones are still there."""
    previous_length: int
    """Tokens of the conversation's last committed state."""
    reused: int
    """Tokens that the request reuses."""
    recomputed: int
    """Tokens of the last state that are computed again: shared ones that were given away, or changed ones."""
    evicted: int
    """Of those, tokens that are unchanged but are no longer in the cache."""
    previous_token: int | None
    """What stood at ``position`` before; None when nothing differs."""
    token: int | None
    """What stands there now; None when the request ends there."""


class ConversationMemory:
    """The committed tokens of the conversations used last, by (salt, conversation id)."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._tokens: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def remember(self, conversation: tuple[str, str], token_ids: Sequence[int]) -> None:
        """Takes the place of what was known of the conversation."""
        self._tokens[conversation] = array("q", token_ids)
        self._tokens.move_to_end(conversation)
        while len(self._tokens) > self._max:
            self._tokens.popitem(last=False)

    def latest(self, conversations: Sequence[tuple[str, str]]) -> tuple[str, tuple[int, ...]] | None:
        """Salt and tokens of that one of these conversations that was remembered last."""
        for (salt, name), tokens in reversed(self._tokens.items()):
            if (salt, name) in conversations:
                return salt, tuple(tokens)
        return None

    def compare(
        self, conversation: tuple[str, str], token_ids: Sequence[int], reused: int, block_size: int
    ) -> Divergence | None:
        """How a request continues its conversation; None when it is new or reuses all that can be."""
        previous = self._tokens.get(conversation)
        if previous is None:
            return None
        limit = min(len(previous), len(token_ids))
        position = _first_difference(previous, array("q", token_ids), limit)
        # One token must run, and only whole blocks are shared.
        if reused >= min(len(previous), len(token_ids) - 1) // block_size * block_size:
            return None
        differs = position < len(previous)
        return Divergence(
            position=position,
            previous_length=len(previous),
            reused=reused,
            recomputed=limit - reused,
            evicted=max(0, min(position, len(token_ids) - 1) // block_size * block_size - reused),
            previous_token=previous[position] if differs else None,
            token=token_ids[position] if differs and position < len(token_ids) else None,
        )


def _first_difference(a: array[int], b: array[int], limit: int) -> int:
    """The first index below ``limit`` at which they differ, or ``limit``; by halves, compared at C speed."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
