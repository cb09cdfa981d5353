"""SentencePiece vocabularies through the ``sentencepiece`` library: from tokenizer.model or rebuilt from GGUF
fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import sentencepiece_proto as proto
from edgellm_models.tokenizer.base import LiteralText, TokenKind
from edgellm_models.tokenizer.shared import SPECIAL_KINDS, SharedTokenizer
from edgellm_models.tokenizer.vocabulary import (
    SpecialFinder,
    SpecialIds,
    SpecialToken,
    Vocabulary,
    parse_byte_token,
)

SPACE = "\u2581"
"""The vocabulary's spelling of a space."""

KIND_OF_TYPE = {
    proto.NORMAL: TokenKind.NORMAL,
    proto.UNKNOWN: TokenKind.UNKNOWN,
    proto.CONTROL: TokenKind.CONTROL,
    proto.USER_DEFINED: TokenKind.USER_DEFINED,
    proto.UNUSED: TokenKind.UNUSED,
    proto.BYTE: TokenKind.BYTE,
}


def piece_bytes(text: str) -> bytes:
    """The bytes of an ordinary piece."""
    return text.replace(SPACE, " ").encode("utf-8", "replace")


def sentencepiece_vocabulary(texts: Sequence[str], kinds: Sequence[TokenKind]) -> Vocabulary:
    """A vocabulary whose special tokens may also be spelled with U+2581 for a space."""
    return Vocabulary(texts, kinds, piece_bytes, piece_bytes)


def special_tokens(vocabulary: Vocabulary, rstrip: Iterable[int] = ()) -> list[SpecialToken]:
    """The tokens to find in a text first."""
    stripping = frozenset(rstrip)
    return [
        SpecialToken(
            token_id,
            vocabulary.texts[token_id].replace(SPACE, " "),
            vocabulary.kinds[token_id],
            token_id in stripping,
        )
        for token_id in vocabulary.unusual
        if vocabulary.kinds[token_id] in SPECIAL_KINDS
    ]


class SentencePieceTokenizer(SharedTokenizer):
    """Cuts out special tokens itself and gives the library the text between them.

    In the library's model user-defined pieces are of type UNUSED, so that they are never made from ordinary
    text; the dummy space is added here, since only here is known what precedes a stretch of text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialIds,
        model: bytes,
        *,
        num_pieces: int,
        add_space_prefix: bool,
        prefix_after_special: bool,
        rstrip_ids: Iterable[int] = (),
    ) -> None:
        """``num_pieces`` ids are the library's; those above it are added tokens of the folder."""
        import sentencepiece

        super().__init__(vocabulary, special, strips_leading_space=add_space_prefix)
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError) as error:
            raise BadInputError(
                f"the SentencePiece vocabulary of {num_pieces} pieces cannot be used:"
                f" {str(error).splitlines()[-1]}"
            ) from error
        if self._processor.vocab_size() != num_pieces:
            raise BadInputError(
                f"the SentencePiece model has {self._processor.vocab_size()} pieces, not {num_pieces}"
            )
        self._finder = SpecialFinder(special_tokens(vocabulary, rstrip_ids))
        self._add_space_prefix = add_space_prefix
        self._prefix_after_special = prefix_after_special

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        return self._encode_run([text if parse_special else LiteralText(text)], True)

    def _encode_run(self, parts: Sequence[str | LiteralText], first: bool) -> list[int]:
        pieces: list[str | SpecialToken] = []
        for part in parts:
            found = [part.text] if isinstance(part, LiteralText) else self._finder.split(part, SPECIAL_KINDS)
            for item in found:
                if isinstance(item, str) and pieces and isinstance(pieces[-1], str):
                    pieces[-1] += item
                else:
                    pieces.append(item)
        ids: list[int] = []
        wants_prefix = first
        for piece in pieces:
            if isinstance(piece, SpecialToken):
                ids.append(piece.token_id)
                wants_prefix = self._prefix_after_special
            elif piece:
                prefix = " " if wants_prefix and self._add_space_prefix else ""
                ids.extend(self._processor.encode(prefix + piece))
                wants_prefix = False
        return ids


def library_pieces(texts: Sequence[str], scores: Sequence[float], types: Sequence[int], unk_id: int) -> bytes:
    """A BPE model for the library from a vocabulary's columns."""
    byte_fallback = types.count(proto.BYTE) == 256
    translated = {
        proto.UNKNOWN: proto.CONTROL,  # the library knows one unknown piece only
        proto.USER_DEFINED: proto.UNUSED,
        proto.BYTE: proto.BYTE if byte_fallback else proto.UNUSED,  # it wants all byte pieces or none
    }
    kinds = [translated.get(kind, kind) for kind in types]
    kinds[unk_id] = proto.UNKNOWN
    named = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)]
    trainer, normalizer = proto.bpe_specs(unk_id, byte_fallback)
    return proto.write_model(named, scores, kinds, trainer, normalizer)


def check_byte_tokens(texts: Sequence[str], kinds: Sequence[TokenKind]) -> None:
    """BadInputError for a byte token that is not spelled ``<0xXX>``, or for a byte that has two."""
    owners: dict[int, int] = {}
    for token_id in [i for i, kind in enumerate(kinds) if kind is TokenKind.BYTE]:
        value = parse_byte_token(texts[token_id])
        if value is None:
            raise BadInputError(
                f"token {token_id} is of type BYTE but is spelled {texts[token_id]!r}; a byte token is"
                f" spelled <0xXX>"
                " with two hexadecimal digits"
            )
        if owners.setdefault(value, token_id) != token_id:
            raise BadInputError(f"byte {value} has two tokens, {owners[value]} and {token_id}")
