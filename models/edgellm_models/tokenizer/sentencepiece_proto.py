"""The little of Protocol Buffers that a SentencePiece model file needs: read pieces, write pieces.

Field numbers are those of sentencepiece_model.proto (https://github.com/google/sentencepiece). Wire format:
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from edgellm_models.errors import BadInputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""ModelProto.SentencePiece.Type; GGUF's tokenizer.ggml.token_type uses the same numbers."""

_BPE = 2  # TrainerSpec.ModelType


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """What a tokenizer.model holds, as far as it is used here."""

    pieces: tuple[Piece, ...]
    trainer_spec: bytes
    normalizer_spec: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    special_ids: dict[str, int]
    """unk, bos, eos, pad; -1 is none."""


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def write_model(
    texts: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    trainer_spec: bytes,
    normalizer_spec: bytes,
    *,
    keep_normalizer: bool = False,
) -> bytes:
    """A ModelProto. Unless ``keep_normalizer``, the dummy prefix is switched off: the caller adds it
    himself."""
    # SentencePiece {piece = 1: string, score = 2: float, type = 3: enum}; the last two take 7 bytes. A large
    # vocabulary has a quarter of a million, so each column is made at once.
    raw = [text.encode("utf-8", "replace") for text in texts]
    heads = {size: _piece_head(size) for size in set(map(len, raw))}
    tails = map(struct.Struct("<BfBB").pack, repeat(0x15), scores, repeat(0x18), types)
    pieces = zip(map(heads.__getitem__, map(len, raw)), raw, tails, strict=True)
    out = bytearray(b"".join(chain.from_iterable(pieces)))
    out += _field(2, trainer_spec) + _field(3, normalizer_spec)
    if not keep_normalizer:
        # An embedded message that comes twice is merged, the later field winning.
        out += _field(3, _field(3, 0))
    return bytes(out)


def _piece_head(size: int) -> bytes:
    """What stands before the text of a piece, which takes so many bytes."""
    text = b"\x0a" + _varint(size)
    return b"\x0a" + _varint(len(text) + size + 7) + text


def bpe_specs(unk_id: int, byte_fallback: bool) -> tuple[bytes, bytes]:
    """Trainer and normalizer specs of a BPE model that changes nothing in a text but space to U+2581."""
    trainer = _field(3, _BPE) + _field(35, int(byte_fallback)) + _field(40, unk_id)
    trainer += b"".join(_field(number, -1) for number in (41, 42, 43))
    normalizer = _field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1)
    return trainer, normalizer


def _fields(data: bytes, what: str) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of one message; fixed-width values come as bytes."""
    position, end = 0, len(data)

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            if position >= end or shift > 63:
                raise BadInputError(f"{what} is damaged: it ends inside a number at byte {position}")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < end:
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) if wire != 2 else varint()
        if size is None or size > end - position:
            raise BadInputError(f"{what} is damaged or no SentencePiece model (byte {position} of {end})")
        yield number, data[position : position + size]
        position += size


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def read_model(data: bytes, what: str, max_pieces: int) -> SentencePieceModel:
    """The pieces and specs of a tokenizer.model. BadInputError names ``what`` and the place of a damage."""
    pieces: list[Piece] = []
    trainer = normalizer = b""
    for number, value in _fields(data, what):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            if len(pieces) >= max_pieces:
                raise BadInputError(f"{what} has more than {max_pieces} pieces")
            text, score, kind = "", 0.0, NORMAL
            for inner, item in _fields(value, what):
                if inner == 1 and isinstance(item, bytes):
                    text = item.decode("utf-8", "replace")
                elif inner == 2 and isinstance(item, bytes) and len(item) == 4:
                    score = struct.unpack("<f", item)[0]
                elif inner == 3 and isinstance(item, int):
                    kind = item
            if not NORMAL <= kind <= BYTE:
                raise BadInputError(f"{what}: piece {len(pieces)} has the unknown type {kind}")
            pieces.append(Piece(text, score, kind))
        elif number == 2:
            trainer += value
        elif number == 3:
            normalizer += value
    special = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
    for number, value in _fields(trainer, what):
        name = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}.get(number)
        if name is not None and isinstance(value, int):
            special[name] = _signed(value)
    flags = {3: True, 4: True}
    for number, value in _fields(normalizer, what):
        if number in flags and isinstance(value, int):
            flags[number] = bool(value)
    return SentencePieceModel(tuple(pieces), trainer, normalizer, flags[3], flags[4], special)
