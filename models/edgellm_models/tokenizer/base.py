"""What every tokenizer offers, whatever library does the work."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class TokenKind(enum.Enum):
    """What a vocabulary entry is; control tokens are never made from a user's text."""

    NORMAL = "normal"
    UNKNOWN = "unknown"
    CONTROL = "control"
    USER_DEFINED = "user_defined"
    UNUSED = "unused"
    BYTE = "byte"


class Tokenizer(Protocol):
    """Text to ids and ids to bytes. Immutable and safe to share between threads."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every id that ends an answer: eos, eot, eom and what generation_config names."""
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``.

        ``add_special`` adds BOS/EOS as the model wants them, never a second BOS when the text already starts with it
        as a parsed special token. ``parse_special`` false keeps control and user-defined tokens as ordinary text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for, control tokens included, leading space kept."""
        ...

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id (for ``tokenize --json`` pieces)."""
        ...

    def token_kind(self, token_id: int) -> TokenKind: ...

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry spelled exactly so."""
        ...

    def decode(self, token_ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of a whole sequence; invalid UTF-8 becomes U+FFFD as Python's ``errors="replace"`` does."""
        ...
