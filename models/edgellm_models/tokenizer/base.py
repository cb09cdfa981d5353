"""What every tokenizer offers, whatever library does the work."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm_models.errors import Notice


class TokenKind(enum.Enum):
    """What a vocabulary entry is; control tokens are never made from a user's text."""

    NORMAL = "normal"
    UNKNOWN = "unknown"
    CONTROL = "control"
    USER_DEFINED = "user_defined"
    UNUSED = "unused"
    BYTE = "byte"


@dataclass(frozen=True)
class LiteralText:
    """A stretch of a prompt in which no special token is recognized, whatever it spells."""

    text: str


@dataclass(frozen=True)
class KnownIds:
    """A stretch of a prompt whose ids are known already, such as an earlier answer of the model."""

    token_ids: tuple[int, ...]


PromptPart = str | LiteralText | KnownIds
"""A plain string is a stretch in which every special token is recognized."""


class Tokenizer(Protocol):
    """Text to ids and ids to bytes. Immutable and safe to share between threads."""

    vocab_size: int
    """Ids of the tokenizer. A model may have more rows; those have no bytes and the kind UNUSED."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every id that ends an answer: eos, eot, eom and what generation_config names."""
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    strips_leading_space: bool
    """A text begins with a dummy space among its tokens, which decoding removes once."""
    notices: tuple[Notice, ...]
    """What was read differently from what the files say."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``.

        ``add_special`` adds BOS/EOS as the model wants them, never a second BOS when the text already
        starts with it as a parsed special token. ``parse_special`` false keeps control and user-defined
        tokens as ordinary text. Half a surrogate pair becomes U+FFFD.
        """
        ...

    def encode_parts(self, parts: Sequence[PromptPart], *, add_bos: bool = True) -> list[int]:
        """Ids of one prompt made of parts: as ``encode`` of the joined text where all parts are plain
        strings.

        Literal text merges with its neighbours as ordinary text does. ``add_bos`` puts BOS first where the
        model wants it and the prompt does not begin with it.
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
        """The text of a whole sequence; invalid UTF-8 becomes U+FFFD as Python's ``errors="replace"`` does.

        Control and unknown tokens are left out unless ``show_special``; user-defined tokens are text.
        """
        ...
