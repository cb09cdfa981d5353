"""Which messages of a conversation that is too long stay: the system prompt and the newest whole turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgellm.contracts import ChatMessage, Notice
from edgellm_models.tokenizer.chat_encoding import EncodedChat

KEPT_SHARE = 0.6
"""Of the context, what stays when it must be trimmed: the turns after that go on behind one prefix."""
ANSWER_SHARE = 8
"""An eighth of the context is kept free for the answer."""

Encode = Callable[[Sequence[ChatMessage]], EncodedChat]


@dataclass(frozen=True)
class Trimmed:
    """A conversation that fits, or the last turn alone where even that does not."""

    chat: EncodedChat
    notices: tuple[Notice, ...] = ()


def trim(
    messages: Sequence[ChatMessage], encode: Encode, context_length: int, max_new_tokens: int | None
) -> Trimmed:
    """Leaves out whole oldest turns (a user's message and all up to the next one) until the rest fits.

    What is left out depends only on the conversation so far, and stays the same for many turns: at each turn
    that had no room, turns went until ``KEPT_SHARE`` of the context was left. So the next requests begin with
    the same tokens, whose KV is in the cache. Every drop is a Notice.
    """
    whole = encode(messages)
    room = context_length // ANSWER_SHARE
    limit = context_length - max(1, room if max_new_tokens is None else min(room, max_new_tokens))
    total = len(whole.token_ids)
    if total <= limit:
        return Trimmed(whole)
    system = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    starts = [i for i in range(system, len(messages)) if messages[i].role == "user"]
    if len(starts) < 2:
        return Trimmed(whole)
    first = _first_kept(starts, _positions(messages, whole, system, encode), total, limit, context_length)
    chat = whole
    while first < len(starts):
        chat = encode([*messages[:system], *messages[starts[first] :]])
        if len(chat.token_ids) <= limit or first == len(starts) - 1:
            break
        first += 1
    dropped = starts[first] - system
    notice = Notice(
        "trimmed",
        f"{dropped} of {len(messages)} messages, the oldest, are left out: the conversation has {total} "
        f"tokens, the context holds {context_length}; {len(chat.token_ids)} stay, with the system prompt; a "
        "larger --ctx keeps more",
    )
    return Trimmed(chat, (notice,))


def _positions(messages: Sequence[ChatMessage], whole: EncodedChat, system: int, encode: Encode) -> list[int]:
    """The position at which each message begins. Templates that hide it cost an encoding per message."""
    if len(whole.turn_starts) == len(messages) - 1:
        return [0, *whole.turn_starts]
    return [len(encode(messages[:i]).token_ids) if i > system else 0 for i in range(len(messages))]


def _first_kept(
    starts: Sequence[int], positions: Sequence[int], total: int, limit: int, context_length: int
) -> int:
    """Index in ``starts`` of the oldest turn that stays, turn by turn as the conversation grew."""
    begins = [positions[start] for start in starts]
    ends = [*begins[1:], total]
    first = 0
    for turn, end in enumerate(ends):
        if begins[0] + end - begins[first] <= limit:
            continue
        while first < turn and begins[0] + end - begins[first] > KEPT_SHARE * context_length:
            first += 1
    return first
