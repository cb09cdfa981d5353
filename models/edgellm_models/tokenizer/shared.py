"""What the tokenizers have in common: BOS and EOS, bytes of ids, decoding."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeGuard

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.base import KnownIds, LiteralText, PromptPart, TokenKind
from edgellm_models.tokenizer.vocabulary import SpecialIds, Vocabulary, clean_text

HIDDEN_KINDS = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})
"""Kinds that are no part of an answer's text."""
SPECIAL_KINDS = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED})
"""Kinds that are found in a text before it is cut into words."""
MAX_TEXT_CHARS = 8_000_000
"""Characters that are tokenized at once; the libraries need a few hundred bytes for each."""
MAX_RUN_CHARS = 4_000_000
"""Characters without a change between white space and others. The patterns that cut text into words go back
over such a run, and the library gives up at ten million steps."""


class SharedTokenizer(ABC):
    """Implements ``base.Tokenizer`` on top of two methods that a library's adapter gives."""

    def __init__(self, vocabulary: Vocabulary, special: SpecialIds, *, strips_leading_space: bool) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.bos_id = special.bos_id
        self.eos_ids = special.eos_ids
        self.eos_id = special.eos_id
        self.pad_id = special.pad_id
        self.unk_id = special.unk_id
        self.add_bos = special.add_bos
        self.add_eos = special.add_eos
        self.notices = special.notices
        self.strips_leading_space = strips_leading_space

    @abstractmethod
    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a text without BOS and EOS."""

    @abstractmethod
    def _encode_run(self, parts: Sequence[str | LiteralText], first: bool) -> list[int]:
        """Ids of parts that follow one another; ``first`` says that they begin the prompt."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        check_text_length([text])
        ids = self._encode_text(clean_text(text), parse_special)
        if not add_special:
            return ids
        ids = self._with_bos(ids, parse_special)
        if self.add_eos and self.eos_id is not None and not (parse_special and ids[-1:] == [self.eos_id]):
            ids.append(self.eos_id)
        return ids

    def _with_bos(self, ids: list[int], parsed: bool) -> list[int]:
        if not self.add_bos or self.bos_id is None or (parsed and ids[:1] == [self.bos_id]):
            return ids
        return [self.bos_id, *ids]

    def encode_parts(self, parts: Sequence[PromptPart], *, add_bos: bool = True) -> list[int]:
        check_text_length(
            [part.text if isinstance(part, LiteralText) else part for part in parts if _is_text(part)]
        )
        ids: list[int] = []
        run: list[str | LiteralText] = []
        first = True
        for part in (*parts, None):
            if isinstance(part, str):
                run.append(clean_text(part))
            elif isinstance(part, LiteralText):
                run.append(LiteralText(clean_text(part.text)))
            else:
                if run:
                    ids.extend(self._encode_run(run, first))
                    run, first = [], False
                if isinstance(part, KnownIds):
                    ids.extend(part.token_ids)
                    first = False
        return self._with_bos(ids, True) if add_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        return self.vocabulary.text(token_id)

    def token_kind(self, token_id: int) -> TokenKind:
        return self.vocabulary.kind(token_id)

    def token_id(self, text: str) -> int | None:
        return self.vocabulary.ids.get(text)

    def decode(self, token_ids: Sequence[int], *, show_special: bool = False) -> str:
        whole = b"".join(
            self.vocabulary.bytes_of(token_id)
            for token_id in token_ids
            if show_special or self.vocabulary.kind(token_id) not in HIDDEN_KINDS
        )
        if self.strips_leading_space:
            whole = whole.removeprefix(b" ")
        return whole.decode("utf-8", "replace")


def _is_text(part: PromptPart) -> TypeGuard[str | LiteralText]:
    return not isinstance(part, KnownIds)


def check_text_length(texts: Sequence[str]) -> None:
    """BadInputError for a text, made of these, that is too long to be tokenized at once."""
    size = sum(map(len, texts))
    if size > MAX_TEXT_CHARS:
        raise BadInputError(f"the text has {size} characters; at most {MAX_TEXT_CHARS} are tokenized at once")
    if size > MAX_RUN_CHARS:
        for match in re.finditer(r"\s+|\S+", "".join(texts)):
            run = match.end() - match.start()
            if run > MAX_RUN_CHARS:
                what = "white space" if match.group()[0].isspace() else "text without white space"
                raise BadInputError(
                    f"the text has {run} characters of {what} in a row; at most {MAX_RUN_CHARS} are tokenized"
                )


def checked_id(name: str, value: object, size: int) -> int | None:
    """A token id as a file states it, or None where it states none; BadInputError outside the vocabulary."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{name} must be a token id, not {value!r}")
    if not 0 <= value < size:
        raise BadInputError(f"{name} is {value}, outside the vocabulary of {size} tokens")
    return value
