"""The vocabulary as every tokenizer here shares it: spellings, kinds, bytes, and the ids with a meaning."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.base import TokenKind

MAX_VOCABULARY = 4_000_000
"""Entries. The largest published vocabularies have about 300,000."""
MAX_TOKEN_CHARS = 65_536
"""Characters of one entry."""
MAX_SPECIAL_CHARS = 512
"""Characters of one token that is looked for in text. The longest published ones have about 100."""
MAX_ALL_SPECIAL_CHARS = 1_000_000
"""Characters of all such tokens of a vocabulary; Gemma 3 has 100,000."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "</s>",
        "<eos>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end an answer whatever the metadata says, as llama.cpp finds them (llama-vocab.cpp)."""


def parse_byte_token(text: str) -> int | None:
    """The value of a byte token spelled ``<0xXX>`` with exactly two hex digits; None for every other
    spelling."""
    match = _BYTE_TOKEN.match(text)
    return int(match.group(1), 16) if match else None


def clean_text(text: str) -> str:
    """Text without lone surrogates: pairs are joined, a half becomes U+FFFD, since UTF-8 cannot hold it."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclass(frozen=True)
class SpecialToken:
    """A token that is found in text before anything else is split."""

    token_id: int
    text: str
    """As it appears in a text, which may differ from the vocabulary's spelling (spaces)."""
    kind: TokenKind
    rstrip: bool = False
    """Swallows the white space after it."""


@dataclass(frozen=True)
class SpecialIds:
    """The ids with a meaning, checked against the vocabulary."""

    bos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    eos_id: int | None = None
    """The one that ``add_eos`` appends and templates know as eos_token."""
    notices: tuple[Notice, ...] = field(default=())


class Vocabulary:
    """Spellings, kinds and bytes of every id. Immutable after construction."""

    def __init__(
        self,
        texts: Sequence[str],
        kinds: Sequence[TokenKind],
        ordinary_bytes: Callable[[str], bytes],
        text_bytes: Callable[[str], bytes] = lambda text: text.encode("utf-8", "replace"),
    ) -> None:
        """``ordinary_bytes`` turns the spelling of a normal entry into bytes, ``text_bytes`` that of a
        special one."""
        if not texts:
            raise BadInputError("the tokenizer has no vocabulary entries")
        if len(texts) > MAX_VOCABULARY:
            raise BadInputError(f"the tokenizer has {len(texts)} entries; at most {MAX_VOCABULARY} are read")
        self.texts = tuple(texts)
        self.kinds = tuple(kinds)
        self.unusual = tuple(i for i, kind in enumerate(self.kinds) if kind is not TokenKind.NORMAL)
        """Ids of another kind than NORMAL: few of many."""
        self._ordinary_bytes = ordinary_bytes
        self._text_bytes = text_bytes
        self.ids: dict[str, int] = dict(zip(self.texts, range(len(self.texts)), strict=True))
        plain = len(self.ids) == len(self.texts) and "" not in self.ids
        if not plain or max(map(len, self.texts)) > MAX_TOKEN_CHARS:
            self._number_one_by_one()
        # Every id without a token costs memory, and one in the second pipeline of literal text.
        if len(self.texts) > 2 * len(self.ids) + 1000:
            raise BadInputError(
                f"the tokenizer's largest id is {len(self.texts) - 1}, but it has only {len(self.ids)} tokens"
            )

    def _number_one_by_one(self) -> None:
        """Leaves out ids without a spelling, and says which entry is too long or comes twice."""
        self.ids = {}
        for token_id, text in enumerate(self.texts):
            if len(text) > MAX_TOKEN_CHARS:
                raise BadInputError(
                    f"token {token_id} has {len(text)} characters; at most {MAX_TOKEN_CHARS} are read"
                )
            if not text:
                continue
            first = self.ids.setdefault(text, token_id)
            if first != token_id:
                raise BadInputError(
                    f"the token {text!r} is in the vocabulary twice, as id {first} and id {token_id}"
                )

    def __len__(self) -> int:
        return len(self.texts)

    def kind(self, token_id: int) -> TokenKind:
        return self.kinds[token_id] if 0 <= token_id < len(self.kinds) else TokenKind.UNUSED

    def text(self, token_id: int) -> str:
        return self.texts[token_id] if 0 <= token_id < len(self.texts) else ""

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of an id; empty for ids that models have as padding beyond the vocabulary."""
        if not 0 <= token_id < len(self.texts):
            return b""
        kind = self.kinds[token_id]
        text = self.texts[token_id]
        if kind is TokenKind.BYTE:
            value = parse_byte_token(text)
            assert value is not None  # checked where kinds are made
            return bytes([value])
        if kind in (TokenKind.NORMAL, TokenKind.UNUSED):
            return self._ordinary_bytes(text)
        return self._text_bytes(text)

    def end_ids(self, stated: Iterable[int]) -> frozenset[int]:
        """The stated end ids plus the control tokens whose text says that they end a turn or document."""
        ids = {i for i in stated if 0 <= i < len(self.texts)}
        found = {
            self.ids[text]
            for text in _END_TEXTS
            if text in self.ids and self.kinds[self.ids[text]] is TokenKind.CONTROL
        }
        if self.ids.get("<|return|>") in found and self.ids.get("<|call|>") in found:
            # In the harmony format <|end|> closes one message of an answer, not the answer.
            found.discard(self.ids.get("<|end|>", -1))
        return frozenset(ids | found)


class SpecialFinder:
    """Cuts a text at special tokens, the leftmost longest first, in one walk along a tree of their spellings.

    BadInputError for spellings too long to walk along at every character.
    """

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        for token in self._tokens.values():
            if len(token.text) > MAX_SPECIAL_CHARS:
                raise BadInputError(
                    f"the special token {token.token_id} has {len(token.text)} characters; at most"
                    f" {MAX_SPECIAL_CHARS} are read"
                )
        size = sum(map(len, self._tokens))
        if size > MAX_ALL_SPECIAL_CHARS:
            raise BadInputError(
                f"the special tokens have {size} characters together; at most {MAX_ALL_SPECIAL_CHARS} are"
                " read"
            )
        self._lock = threading.Lock()
        self._trees: dict[frozenset[TokenKind], tuple[re.Pattern[str], dict[str, Any]] | None] = {}

    def _tree(self, kinds: frozenset[TokenKind]) -> tuple[re.Pattern[str], dict[str, Any]] | None:
        """First characters, and the tree of the spellings of ``kinds``: a node by character, the token that
        ends there under the empty string."""
        with self._lock:
            if kinds not in self._trees:
                root: dict[str, Any] = {}
                for text, token in self._tokens.items():
                    if token.kind in kinds:
                        node = root
                        for char in text:
                            node = node.setdefault(char, {})
                        node[""] = token
                chars = "".join(map(re.escape, root))
                self._trees[kinds] = (re.compile(f"[{chars}]"), root) if root else None
            return self._trees[kinds]

    def split(self, text: str, kinds: frozenset[TokenKind]) -> list[str | SpecialToken]:
        """Ordinary stretches (never empty) and the special tokens of ``kinds`` between them, in order."""
        found = self._tree(kinds)
        if found is None:
            return [text] if text else []
        first, root = found
        parts: list[str | SpecialToken] = []
        done = position = 0
        while match := first.search(text, position):
            position = end = match.start()
            longest: SpecialToken | None = None
            node = root
            while end < len(text) and text[end] in node:
                node = node[text[end]]
                end += 1
                longest = node.get("", longest)
            if longest is None:
                position += 1
                continue
            if position > done:
                parts.append(text[done:position])
            parts.append(longest)
            position += len(longest.text)
            if longest.rstrip:
                while position < len(text) and text[position].isspace():
                    position += 1
            done = position
        if done < len(text):
            parts.append(text[done:])
        return parts
