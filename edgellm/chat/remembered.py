"""The answers of one conversation as the ids that the model generated, so that its history keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_models.tokenizer.base import Tokenizer, TokenKind
from edgellm_models.tokenizer.chat_encoding import RememberedAnswer

MAX_ANSWERS = 1000
"""Oldest ones are forgotten first; their text is then tokenized anew."""
MAX_UNSHOWN = 256
"""Ids at an answer's end that may belong to what was cut away; an answer with more is tokenized anew."""


def remember(
    answers: Sequence[RememberedAnswer], text: str, token_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[RememberedAnswer, ...]:
    """``answers`` and one more: ``text`` is what was shown for it and goes into the next request's messages.

    Why: re-tokenizing an answer's text may give other ids than were generated, and every cached key and value
    behind the first difference would be lost. Ids that were
    generated but not shown (the end token, a stop string) are left out; an answer that no number of its ids
    spells is not remembered.
    """
    ids = shown_ids(text, token_ids, tokenizer)
    if not ids:
        return tuple(answers)
    return (*answers, RememberedAnswer(text, ids))[-MAX_ANSWERS:]


def shown_ids(text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The leading ids that are exactly ``text``, without control tokens at their end; none where no number of
    them is."""
    ids = list(token_ids)
    visible = sum(map(len, (_shown_bytes(token_id, tokenizer) for token_id in ids)))
    # Decoding removes one dummy space and never makes text shorter otherwise.
    longest = len(text.encode("utf-8", "replace")) + 1
    dropped = 0
    while ids:
        last = _shown_bytes(ids[-1], tokenizer)
        if last:
            if visible <= longest:
                decoded = tokenizer.decode(ids)
                if decoded == text:
                    return tuple(ids)
                if len(decoded) < len(text):
                    return ()
            dropped += 1
            if dropped > MAX_UNSHOWN:
                return ()
        ids.pop()
        visible -= len(last)
    return ()


def _shown_bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    hidden = token_id in tokenizer.eos_ids or tokenizer.token_kind(token_id) is TokenKind.CONTROL
    return b"" if hidden else tokenizer.token_bytes(token_id)
