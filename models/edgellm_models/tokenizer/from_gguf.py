"""A tokenizer from the tokenizer.ggml.* fields of a GGUF file.

Field names and defaults: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.base import TokenKind
from edgellm_models.tokenizer.bpe_tokenizer import BpeTokenizer
from edgellm_models.tokenizer.byte_level import spelled_bytes
from edgellm_models.tokenizer.pre_tokenizers import PreTokenizer, build_pre_tokenizer, pre_tokenizer
from edgellm_models.tokenizer.sentencepiece_tokenizer import (
    KIND_OF_TYPE,
    SentencePieceTokenizer,
    check_byte_tokens,
    library_pieces,
    sentencepiece_vocabulary,
)
from edgellm_models.tokenizer.shared import SharedTokenizer, checked_id
from edgellm_models.tokenizer.vocabulary import MAX_VOCABULARY, SpecialIds, Vocabulary

_PREFIX = "tokenizer.ggml."
MAX_MERGES = 8_000_000


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> SharedTokenizer:
    """The tokenizer that a GGUF file's metadata describes. BadInputError names the field that is wrong or
    missing."""
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        return _bpe(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    if model is None:
        raise BadInputError("the file has no tokenizer (tokenizer.ggml.model is missing)")
    raise BadInputError(
        f"the tokenizer model {model!r} (tokenizer.ggml.model) is not supported; supported are gpt2"
        f" (byte-level BPE) and"
        " llama (SentencePiece)"
    )


def _column(
    metadata: Mapping[str, Any], name: str, item: type, limit: int, size: int | None = None
) -> list[Any]:
    """An array field as a list of native values, checked; BadInputError says what was found."""
    key = _PREFIX + name
    value = metadata.get(key)
    if value is None:
        raise BadInputError(f"{key} is missing")
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        raise BadInputError(f"{key} must be an array, not {type(value).__name__}")
    if len(value) > limit:
        raise BadInputError(f"{key} has {len(value)} entries; at most {limit} are read")
    if size is not None and len(value) != size:
        raise BadInputError(f"{key} has {len(value)} entries for {size} tokens")
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    allowed = (int, float) if item is float else item
    if set(map(type, items)) <= {item, int if item is float else item}:
        return items  # at once: a large vocabulary has a quarter of a million entries
    for index, entry in enumerate(items):
        if not isinstance(entry, allowed) or isinstance(entry, bool):
            raise BadInputError(f"{key}[{index}] must be {item.__name__}, not {type(entry).__name__}")
    return items


def _types(metadata: Mapping[str, Any], size: int) -> list[int]:
    """The type of every token, NORMAL where it is unknown."""
    if _PREFIX + "token_type" not in metadata:
        return [_NORMAL] * size
    types = _column(metadata, "token_type", int, MAX_VOCABULARY, size)
    if KIND_OF_TYPE.keys() >= set(types):
        return types
    return [value if value in KIND_OF_TYPE else _NORMAL for value in types]


def _kinds(metadata: Mapping[str, Any], size: int) -> list[TokenKind]:
    return [KIND_OF_TYPE[value] for value in _types(metadata, size)]


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool | int):
        raise BadInputError(f"{_PREFIX}{name} must be true or false, not {value!r}")
    return bool(value)


def _special_ids(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, add_bos: bool, defaults: Mapping[str, int]
) -> SpecialIds:
    """Ids by field, else by the vocabulary type's defaults where those ids are no ordinary tokens."""

    def stated(name: str) -> int | None:
        key = f"{_PREFIX}{name}_token_id"
        if metadata.get(key) is not None:
            value = metadata[key]
            # Converters write 2**32 - 1 (or -1) for "none".
            return None if value in (-1, 0xFFFFFFFF) else checked_id(key, value, len(vocabulary))
        default = defaults.get(name)
        if default is None or default >= len(vocabulary):
            return None
        return default if vocabulary.kind(default) in (TokenKind.CONTROL, TokenKind.UNKNOWN) else None

    notices: list[Notice] = []
    bos, eos = stated("bos"), stated("eos")
    add_bos = _flag(metadata, "add_bos_token", add_bos)
    add_eos = _flag(metadata, "add_eos_token", False)
    if add_bos and bos is None:
        add_bos = False
        notices.append(Notice("no_bos", "the file asks for a BOS token but names none, so none is added"))
    if add_eos and eos is None:
        add_eos = False
        notices.append(Notice("no_eos", "the file asks for an EOS token but names none, so none is added"))
    ends = [i for i in (eos, stated("eot"), stated("eom")) if i is not None]
    extra = metadata.get(_PREFIX + "eos_token_ids")
    if extra is not None:
        ends += [
            checked_id(_PREFIX + "eos_token_ids", i, len(vocabulary)) or 0
            for i in _column(metadata, "eos_token_ids", int, 1000)
        ]
    unk = stated("unknown")
    return SpecialIds(
        bos_id=bos,
        eos_ids=vocabulary.end_ids(ends),
        pad_id=stated("padding"),
        unk_id=unk,
        add_bos=add_bos,
        add_eos=add_eos,
        eos_id=eos,
        notices=tuple(notices),
    )


def _bpe(metadata: Mapping[str, Any]) -> BpeTokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    texts: list[str] = _column(metadata, "tokens", str, MAX_VOCABULARY)
    kinds = _kinds(metadata, len(texts))
    check_byte_tokens(texts, kinds)
    if not metadata.get(_PREFIX + "merges") and len(texts) > 256:
        raise BadInputError(
            "the BPE vocabulary comes without merges (tokenizer.ggml.merges), so text cannot be encoded"
        )
    merges = _column(metadata, "merges", str, MAX_MERGES) if _PREFIX + "merges" in metadata else []
    vocabulary = Vocabulary(texts, kinds, spelled_bytes)
    name = metadata.get(_PREFIX + "pre")
    if name is not None and not isinstance(name, str):
        raise BadInputError(f"tokenizer.ggml.pre must be a name, not {name!r}")
    definition = pre_tokenizer(name or "default")
    special = _special_ids(metadata, vocabulary, definition.add_bos, {})
    if not name:
        missing = Notice(
            "pre_tokenizer_missing",
            "the file does not say how text is cut into words (tokenizer.ggml.pre), so llama.cpp's default"
            " is used;"
            " answers may suffer",
        )
        special = SpecialIds(**{**special.__dict__, "notices": (*special.notices, missing)})
    model = _bpe_model(vocabulary, merges, definition, models)
    pipeline = Tokenizer(model)
    if definition.nfc:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = build_pre_tokenizer(definition)
    pipeline.decoder = decoders.ByteLevel()
    _add_special_tokens(pipeline, vocabulary)
    return BpeTokenizer(vocabulary, special, pipeline, strips_leading_space=False)


def _bpe_model(vocabulary: Vocabulary, merges: Sequence[str], definition: PreTokenizer, models: Any) -> Any:
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(merges):
        # The first part is not empty but may itself begin with a space in vocabularies that spell it so.
        cut = merge.find(" ", 1)
        if cut < 0 or cut + 1 == len(merge):
            raise BadInputError(
                f"tokenizer.ggml.merges[{index}] is {merge!r}, not two parts with a space between"
            )
        left, right = merge[:cut], merge[cut + 1 :]
        for part in (left, right, left + right):
            if part not in vocabulary.ids:
                raise BadInputError(
                    f"tokenizer.ggml.merges[{index}] ({merge!r}) needs {part!r}, which is not in the"
                    f" vocabulary"
                )
        pairs.append((left, right))
    try:
        return models.BPE(vocabulary.ids, pairs, ignore_merges=definition.ignore_merges)
    except Exception as error:
        raise BadInputError(f"the BPE vocabulary cannot be used: {error}") from error


def _add_special_tokens(pipeline: Any, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    hidden = (TokenKind.CONTROL, TokenKind.UNKNOWN)
    special, user = [], []
    for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True):
        if text and kind in hidden:
            special.append(AddedToken(text, normalized=False, special=True))
        elif text and kind is TokenKind.USER_DEFINED:
            user.append(AddedToken(text, normalized=False, special=False))
    pipeline.add_special_tokens(special)
    pipeline.add_tokens(user)


def _sentencepiece(metadata: Mapping[str, Any]) -> SentencePieceTokenizer:
    texts: list[str] = _column(metadata, "tokens", str, MAX_VOCABULARY)
    scores: list[float] = _column(metadata, "scores", float, MAX_VOCABULARY, len(texts))
    bad = next((i for i, score in enumerate(scores) if not -3e38 < score < 3e38), None)
    if bad is not None:
        raise BadInputError(f"tokenizer.ggml.scores[{bad}] is {scores[bad]!r}, not a finite number")
    types = _types(metadata, len(texts))
    kinds = [KIND_OF_TYPE[value] for value in types]
    check_byte_tokens(texts, kinds)
    vocabulary = sentencepiece_vocabulary(texts, kinds)
    special = _special_ids(metadata, vocabulary, True, {"bos": 1, "eos": 2, "unknown": 0})
    unk_id = special.unk_id
    if unk_id is None:
        unk_id = next((i for i, kind in enumerate(kinds) if kind is TokenKind.UNKNOWN), None)
    if unk_id is None:
        raise BadInputError(
            "the SentencePiece vocabulary has no unknown token (tokenizer.ggml.unknown_token_id or a token"
            " of type 2)"
        )
    model = library_pieces(texts, scores, types, unk_id)
    return SentencePieceTokenizer(
        vocabulary,
        special,
        model,
        num_pieces=len(texts),
        add_space_prefix=_flag(metadata, "add_space_prefix", True),
        prefix_after_special=True,
        rstrip_ids=_phi3_rstrip(metadata, vocabulary),
    )


_NORMAL = next(number for number, kind in KIND_OF_TYPE.items() if kind is TokenKind.NORMAL)


def _phi3_rstrip(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Phi-3's special tokens swallow white space after them; GGUF cannot say so, hence llama.cpp knows it by
    name."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return []
    keeping = {"<unk>", "<s>", "<|endoftext|>"}
    return [
        token_id
        for token_id, kind in enumerate(vocabulary.kinds)
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED) and vocabulary.texts[token_id] not in keeping
    ]
