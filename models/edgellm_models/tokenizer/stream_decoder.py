"""Turns ids into text as they come: append-only, never half a character, equal to the decode of the whole."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from edgellm_models.tokenizer.base import Tokenizer
from edgellm_models.tokenizer.shared import HIDDEN_KINDS


class StreamDecoder:
    """Incremental ``Tokenizer.decode`` of one answer.

    The strings of all ``push`` calls and of ``finish``, joined, are ``tokenizer.decode`` of all ids, whatever
    the split. A character leaves in the push that completes it; only an incomplete UTF-8 tail is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        show_special: bool = False,
        *,
        continues_text: bool = False,
        shown_ids: Iterable[int] = (),
    ) -> None:
        """``continues_text``: the ids go on where a prompt's text ends (raw completion), so that the first
        space is a real one and stays. ``shown_ids``: special tokens that are shown all the same."""
        self._tokenizer = tokenizer
        self._shown_ids = frozenset(shown_ids)
        self._show_special = show_special
        self._at_start = tokenizer.strips_leading_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these ids make certain; may be empty."""
        found = b""
        for token_id in token_ids:
            if (
                self._show_special
                or token_id in self._shown_ids
                or self._tokenizer.token_kind(token_id) not in HIDDEN_KINDS
            ):
                found += self._tokenizer.token_bytes(token_id)
        if self._at_start and found:
            found = found.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(found)

    def finish(self) -> str:
        """What is left: one U+FFFD where the ids end inside a character."""
        return self._utf8.decode(b"", final=True)
