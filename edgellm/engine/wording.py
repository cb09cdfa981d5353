"""The engine's notices as sentences, with the numbers in them."""

from __future__ import annotations

from bisect import bisect_right

from edgellm.cache.conversation import Divergence
from edgellm.contracts import GenerationRequest, Notice
from edgellm_models.tokenizer.base import Tokenizer


def deadline() -> Notice:
    return Notice("deadline", "the time allowed for this request is over; it was cancelled")


def context_full(context_length: int, prompt_tokens: int, answer_tokens: int) -> Notice:
    return Notice(
        "context_full",
        f"the context of {context_length} tokens is full: {prompt_tokens} of the prompt and {answer_tokens} "
        "of the answer; a larger --ctx makes room",
    )


def prefix_lost(found: Divergence, request: GenerationRequest, tokenizer: Tokenizer) -> Notice:
    """A request reuses less than its conversation shares with the cache."""
    again = f"{found.recomputed} tokens are computed again ({found.reused} are reused)"
    if found.previous_token is None:
        return Notice(
            "prefix_lost", f"{again}: the KV of this conversation had to make room for other requests"
        )
    place = f"token {found.position}"
    if request.turn_starts:  # the first message's start is not among them
        place += f" in message {1 + bisect_right(request.turn_starts, found.position)}"
    before = tokenizer.token_text(found.previous_token)
    now = "the end" if found.token is None else repr(tokenizer.token_text(found.token))
    gone = f"; {found.evicted} unchanged ones are no longer in the cache" if found.evicted else ""
    return Notice(
        "prefix_lost", f"{again}: the conversation differs from {place} on, {now} instead of {before!r}{gone}"
    )


def spec_disarmed(why: str) -> Notice:
    """Drafting was turned off for an answer."""
    return Notice("spec_disarmed", f"nothing is drafted for now: {why}; the text is the same either way")
