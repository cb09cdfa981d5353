"""A model's vocabulary as llguidance reads it: the bytes of every id, which ids are special, which end an
answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm_models.tokenizer.base import KnownIds, LiteralText, TokenKind

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from edgellm_models.tokenizer.base import Tokenizer

_SPECIAL = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})
"""No part of an answer's text: only a grammar that names one, as ``<name>``, lets it through."""


class GrammarVocabulary:
    """The ids of one model, shared by all of its constraints. Immutable.

    ``vocab_size`` is the model's number of logits. Rows beyond the tokenizer's ids and unused entries stand
    for no bytes and are never allowed. A byte token is its byte, so a character may come in one token or in
    several; user-defined tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self.vocab_size = vocab_size
        self.num_mask_bytes = -(-vocab_size // 8)
        self.end_ids = tuple(sorted(i for i in tokenizer.eos_ids if i < vocab_size))
        special = set(self.end_ids)
        tokens: list[bytes] = []
        for token_id in range(vocab_size):
            kind = TokenKind.UNUSED if token_id >= tokenizer.vocab_size else tokenizer.token_kind(token_id)
            if kind in _SPECIAL:
                special.add(token_id)
            unused = kind is TokenKind.UNUSED and token_id not in special
            tokens.append(b"" if unused else tokenizer.token_bytes(token_id))
        # llguidance wants an end id. Where the model has none, one behind its last row stands in, and no mask
        # that leaves here has it.
        stands_in = not self.end_ids
        if stands_in:
            tokens.append(b"<end>")
            special.add(vocab_size)
        ends = [vocab_size] if stands_in else list(self.end_ids)
        self.ll_tokenizer: LLTokenizer = LLTokenizer(
            _Spelling(tokenizer, tokens, sorted(special), ends[0]),  # type: ignore[arg-type]
            n_vocab=len(tokens),
            eos_token=ends,
            slices=[],
        )
        keep = bytearray(b"\xff" * self.num_mask_bytes)
        if vocab_size % 8:
            keep[-1] = (1 << vocab_size % 8) - 1
        self._all = int.from_bytes(keep, "little")
        for token_id in self.end_ids:
            keep[token_id // 8] &= ~(1 << token_id % 8)
        self._no_end = int.from_bytes(keep, "little")

    def clip(self, mask: bytes) -> bytes:
        """llguidance's mask, which ends with a whole word, as one of ``num_mask_bytes``."""
        return self._and(mask, self._all)

    def without_end(self, mask: bytes) -> bytes:
        """The mask without the ids that end an answer."""
        return self._and(mask, self._no_end)

    def _and(self, mask: bytes, keep: int) -> bytes:
        return (int.from_bytes(mask, "little") & keep).to_bytes(self.num_mask_bytes, "little")


class _Spelling:
    """What ``LLTokenizer`` asks of a tokenizer (llguidance's TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[bytes], special_ids: Sequence[int], end_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id
        self._tokenizer = tokenizer
        special = frozenset(special_ids)
        # Of equal spellings (a character and its byte token) the first.
        self._ids = {
            token: index
            for index, token in reversed(list(enumerate(tokens)))
            if token and index not in special
        }
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Ids of a text that the grammar leaves no choice about, as the model would write it."""
        # The empty part of known ids says that the text continues one: no dummy space goes before it.
        ids = self._tokenizer.encode_parts((KnownIds(()), LiteralText(text)), add_bos=False)
        data = text.encode("utf-8")
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        """Ids whose bytes are exactly these, for texts that the tokenizer would change (a normalizer)."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                token_id = self._ids.get(data[start:end])
                if token_id is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                break  # no token spells this byte: the mask will show that nothing can follow
        return ids
