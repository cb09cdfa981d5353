"""The answers of one conversation as the ids that the model generated, so that its history keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_models.tokenizer.chat_encoding import RememberedAnswer

MAX_ANSWERS = 1000
"""Oldest ones are forgotten first; their text is then tokenized anew."""


def remember(
    answers: Sequence[RememberedAnswer], text: str, token_ids: Sequence[int]
) -> tuple[RememberedAnswer, ...]:
    """``answers`` and one more: ``text`` is what was shown for it and goes into the next request's messages.

    Why: re-tokenizing an answer's text may give other ids than were generated, and every cached key and value
    behind the first difference would be lost.
    """
    if not token_ids:
        return tuple(answers)
    return (*answers, RememberedAnswer(text, tuple(token_ids)))[-MAX_ANSWERS:]
