"""A tokenizer from a Hugging Face folder: tokenizer.json as it is, else the SentencePiece tokenizer.model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer import sentencepiece_proto as proto
from edgellm_models.tokenizer.base import TokenKind
from edgellm_models.tokenizer.bpe_tokenizer import BpeTokenizer, pipeline_ids
from edgellm_models.tokenizer.byte_level import spelled_bytes
from edgellm_models.tokenizer.hf_files import (
    MAX_TOKENIZER_BYTES,
    check_json_size,
    read_bytes,
    read_json_object,
    special_token_strings,
    token_string,
)
from edgellm_models.tokenizer.sentencepiece_tokenizer import (
    KIND_OF_TYPE,
    SPACE,
    SentencePieceTokenizer,
    check_byte_tokens,
    piece_bytes,
    sentencepiece_vocabulary,
)
from edgellm_models.tokenizer.shared import SharedTokenizer
from edgellm_models.tokenizer.vocabulary import MAX_VOCABULARY, SpecialIds, Vocabulary, parse_byte_token


def tokenizer_from_hf(folder: Path, config: Mapping[str, Any]) -> SharedTokenizer:
    """The tokenizer of a folder; ``config`` is its parsed config.json. BadInputError names the file that is
    wrong."""
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder, config)
    if (folder / "tokenizer.model").is_file():
        return _from_tokenizer_model(folder, config)
    there = sorted(
        p.name for p in folder.iterdir() if "token" in p.name or p.name in ("vocab.json", "merges.txt")
    )
    raise BadInputError(
        f"{folder} has no tokenizer that is read (tokenizer.json or a SentencePiece tokenizer.model)"
        + (f"; it has {', '.join(there)}" if there else "")
    )


# --- ids with a meaning -------------------------------------------------------------------------------------


def _listed_ids(config: Mapping[str, Any], key: str) -> list[int]:
    """Ids under ``key`` as configs write them: a number, a list, or inside text_config."""
    found: list[int] = []
    for place in (config, config.get("text_config")):
        value = place.get(key) if isinstance(place, Mapping) else None
        values = value if isinstance(value, list) else [value]
        found += [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    return found


def _special_ids(
    folder: Path,
    config: Mapping[str, Any],
    vocabulary: Vocabulary,
    by_default: tuple[bool, bool],
) -> SpecialIds:
    strings = special_token_strings(folder)
    settings = read_json_object(folder / "tokenizer_config.json")
    generation = read_json_object(folder / "generation_config.json")

    def one(name: str) -> int | None:
        text = strings.get(f"{name}_token")
        if text is not None and text in vocabulary.ids:
            return vocabulary.ids[text]
        if text is not None:
            raise BadInputError(f"{folder}: {name}_token is {text!r}, which is not in the vocabulary")
        listed = [i for i in _listed_ids(config, f"{name}_token_id") if i < len(vocabulary)]
        return listed[0] if listed else None

    bos, eos = one("bos"), one("eos")
    add_bos, add_eos = (
        bool(settings[key]) if isinstance(settings.get(key), bool) else default
        for key, default in zip(("add_bos_token", "add_eos_token"), by_default, strict=True)
    )
    ends = _listed_ids(config, "eos_token_id") + _listed_ids(generation, "eos_token_id")
    return SpecialIds(
        bos_id=bos,
        eos_ids=vocabulary.end_ids([*ends, *([eos] if eos is not None else [])]),
        pad_id=one("pad"),
        unk_id=one("unk"),
        add_bos=add_bos and bos is not None,
        add_eos=add_eos and eos is not None,
        eos_id=eos,
    )


def _added_tokens(folder: Path) -> dict[int, tuple[str, bool, bool]]:
    """Tokens added beside the model's own: id -> (text, special, rstrip)."""
    added: dict[int, tuple[str, bool, bool]] = {}
    for text, token_id in read_json_object(folder / "added_tokens.json").items():
        if isinstance(token_id, int) and not isinstance(token_id, bool):
            added[token_id] = (text, False, False)
    declared = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for key, value in declared.items() if isinstance(declared, dict) else ():
        content = token_string(value)
        if content is not None and str(key).isdecimal() and isinstance(value, dict):
            added[int(key)] = (content, value.get("special") is True, value.get("rstrip") is True)
    for token_id in added:
        if not 0 <= token_id < MAX_VOCABULARY:
            raise BadInputError(f"{folder}: the added token {added[token_id][0]!r} has the id {token_id}")
    return added


# --- tokenizer.json -----------------------------------------------------------------------------------------


def _from_tokenizer_json(folder: Path, config: Mapping[str, Any]) -> BpeTokenizer:
    path = folder / "tokenizer.json"
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    check_json_size(data, path)
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
        raise BadInputError(f"{path} has no tokenizer model in it")
    model = described["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise BadInputError(
            f"{path}: the model type {model.get('type')!r} is not supported (BPE and Unigram are)"
        )
    _check_model(path, model)
    if model.get("type", "BPE") == "BPE" and not model.get("merges") and len(model["vocab"]) > 256:
        raise BadInputError(f"{path}: the BPE vocabulary comes without merges, so text cannot be encoded")
    pipeline = _load_pipeline(path, data)
    growth = _growth(path, described)
    _add_missing_tokens(folder, pipeline)
    byte_level, strips = _decoding(path, described)
    vocabulary = _pipeline_vocabulary(folder, pipeline, model, byte_level)
    special = _special_ids(folder, config, vocabulary, _ends_added(pipeline))
    return BpeTokenizer(vocabulary, special, pipeline, strips_leading_space=strips, growth=growth)


def _check_model(path: Path, model: dict[str, Any]) -> None:
    """The flat parts, before the library builds tables from them. BadInputError names the first bad entry."""
    vocab = model.get("vocab")
    kind = dict if model.get("type", "BPE") == "BPE" else list
    if not isinstance(vocab, kind):
        raise BadInputError(
            f"{path}: model.vocab must be {'an object' if kind is dict else 'a list'}, not"
            f" {type(vocab).__name__}"
        )
    if len(vocab) > MAX_VOCABULARY:
        raise BadInputError(
            f"{path}: model.vocab has {len(vocab)} entries; at most {MAX_VOCABULARY} are read"
        )
    if isinstance(vocab, dict):
        for text, token_id in vocab.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise BadInputError(f"{path}: the id of {text!r} must be a number, not {token_id!r}")
            if not 0 <= token_id <= 2 * len(vocab) + 1000:
                raise BadInputError(
                    f"{path}: {text!r} has the id {token_id} in a vocabulary of {len(vocab)} tokens"
                )
    merges = model.get("merges", [])
    if not isinstance(merges, list):
        raise BadInputError(f"{path}: model.merges must be a list, not {type(merges).__name__}")
    for index, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise BadInputError(f"{path}: model.merges[{index}] must be two texts, not {str(merge)[:80]!r}")


MAX_ADDED_CHARS = 1024
"""Characters that one step of a normalizer may put into a text, and how many times longer all together may
make it."""


def _growth(path: Path, described: dict[str, Any]) -> int:
    """How many times longer the normalizer may make a text; BadInputError beyond a limit."""
    growth = 1
    for part in ("normalizer", "pre_tokenizer"):
        for step in _steps(described.get(part)):
            for key in ("content", "prepend", "replacement", "prefix", "suffix"):
                added = step.get(key)
                if isinstance(added, str) and len(added) > MAX_ADDED_CHARS:
                    raise BadInputError(
                        f"{path}: {part}.{key} has {len(added)} characters; at most {MAX_ADDED_CHARS} are put"
                        " into a text"
                    )
            content, pattern = step.get("content"), step.get("pattern")
            if step.get("type") == "Replace" and isinstance(content, str):
                # A regular expression may also match between two characters.
                plain = isinstance(pattern, dict) and bool(pattern.get("String"))
                growth *= max(1, len(content) + (not plain and content != ""))
            if growth > MAX_ADDED_CHARS:
                raise BadInputError(
                    f"{path}: the normalizer may make a text more than {MAX_ADDED_CHARS} times longer"
                )
    return growth


def _load_pipeline(path: Path, data: bytes) -> Any:
    from tokenizers import Tokenizer

    try:
        pipeline = Tokenizer.from_buffer(data)
    except BaseException as error:  # the library's panics are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise BadInputError(f"{path} cannot be used: {str(error).splitlines()[0]}") from error
    # A saved training setting would cut or pad prompts silently.
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline


def _add_missing_tokens(folder: Path, pipeline: Any) -> None:
    """Tokens that only tokenizer_config.json or added_tokens.json know, with the ids they state there."""
    from tokenizers import AddedToken

    known = pipeline.get_added_tokens_decoder()
    for token_id, (text, special, rstrip) in sorted(_added_tokens(folder).items()):
        if token_id in known and known[token_id].content == text:
            continue
        token = AddedToken(text, rstrip=rstrip, normalized=False, special=special)
        (pipeline.add_special_tokens if special else pipeline.add_tokens)([token])
        if pipeline.token_to_id(text) != token_id:
            raise BadInputError(
                f"{folder}: the added token {text!r} should have the id {token_id} but tokenizer.json gives"
                f" it"
                f" {pipeline.token_to_id(text)}"
            )


def _steps(node: Any) -> list[dict[str, Any]]:
    """A decoder, pre-tokenizer or normalizer and everything inside its sequences."""
    if not isinstance(node, dict):
        return []
    inner = [node.get(key) for key in ("decoders", "pretokenizers", "normalizers")]
    return [
        node,
        *(step for group in inner if isinstance(group, list) for item in group for step in _steps(item)),
    ]


def _decoding(path: Path, described: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the vocabulary spells bytes, and whether decoding removes a dummy space."""
    decoders = _steps(described.get("decoder"))
    types = {step.get("type") for step in decoders}
    if "ByteLevel" in types or (
        not decoders and any(s.get("type") == "ByteLevel" for s in _steps(described.get("pre_tokenizer")))
    ):
        return True, False
    for step in decoders:
        if step.get("type") == "Metaspace":
            return False, step.get("prepend_scheme", "always") != "never"
    if "Replace" in types or "ByteFallback" in types:
        return False, any(step.get("type") == "Strip" and step.get("start") for step in decoders)
    raise BadInputError(
        f"{path}: the decoder {sorted(str(t) for t in types) or 'none'} is not supported; supported are"
        f" byte-level BPE"
        " and SentencePiece style"
    )


def _pipeline_vocabulary(folder: Path, pipeline: Any, model: dict[str, Any], byte_level: bool) -> Vocabulary:
    entries: dict[str, int] = pipeline.get_vocab(with_added_tokens=True)
    size = max(entries.values(), default=-1) + 1
    if size > MAX_VOCABULARY:
        raise BadInputError(f"{folder}: a token has the id {size - 1}; at most {MAX_VOCABULARY} are read")
    texts, kinds = [""] * size, [TokenKind.UNUSED] * size
    for text, token_id in entries.items():
        if texts[token_id]:
            raise BadInputError(f"{folder}: {texts[token_id]!r} and {text!r} both have the id {token_id}")
        texts[token_id] = text
        is_byte = model.get("byte_fallback") is True and parse_byte_token(text) is not None
        kinds[token_id] = TokenKind.BYTE if is_byte else TokenKind.NORMAL
    unk = special_token_strings(folder).get("unk_token")
    for token_id, token in pipeline.get_added_tokens_decoder().items():
        kinds[token_id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
        if token.special and token.content == unk and token_id == entries.get(str(model.get("unk_token"))):
            kinds[token_id] = TokenKind.UNKNOWN
    return Vocabulary(texts, kinds, spelled_bytes if byte_level else piece_bytes)


def _ends_added(pipeline: Any) -> tuple[bool, bool]:
    """Whether the file's own post-processor puts something before and after a text."""
    if pipeline.post_processor is None:
        return False, False
    plain = pipeline_ids(pipeline, "a")
    whole = pipeline_ids(pipeline, "a", add_special_tokens=True)
    if len(whole) == len(plain):
        return False, False
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return start > 0, len(whole) > start + len(plain)


# --- tokenizer.model ----------------------------------------------------------------------------------------


def _from_tokenizer_model(folder: Path, config: Mapping[str, Any]) -> SentencePieceTokenizer:
    path = folder / "tokenizer.model"
    model = proto.read_model(read_bytes(path, MAX_TOKENIZER_BYTES), str(path), MAX_VOCABULARY)
    if not model.pieces:
        raise BadInputError(f"{path} holds no pieces; it is no SentencePiece model")
    texts = [piece.text for piece in model.pieces]
    kinds = [KIND_OF_TYPE[piece.type] for piece in model.pieces]
    rstrip: list[int] = []
    added = sorted(_added_tokens(folder).items())
    if added and added[-1][0] > 2 * (len(texts) + len(added)) + 1000:
        raise BadInputError(
            f"{folder}: an added token has the id {added[-1][0]} beside a vocabulary of {len(texts)} pieces"
        )
    for token_id, (text, special, strips) in added:
        kind = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
        texts += [""] * (token_id + 1 - len(texts))
        kinds += [TokenKind.UNUSED] * (token_id + 1 - len(kinds))
        if texts[token_id] and texts[token_id].replace(SPACE, " ") != text.replace(SPACE, " "):
            raise BadInputError(f"{folder}: id {token_id} is {texts[token_id]!r} and is added as {text!r}")
        texts[token_id] = texts[token_id] or text
        if kinds[token_id] is not TokenKind.UNKNOWN:
            kinds[token_id] = kind
        if strips:
            rstrip.append(token_id)
    check_byte_tokens(texts, kinds)
    vocabulary = sentencepiece_vocabulary(texts, kinds)
    types = [proto.UNUSED if piece.type == proto.USER_DEFINED else piece.type for piece in model.pieces]
    # Where the model removes extra spaces, its dummy space must stay its own: an added one would be removed.
    keep = model.remove_extra_whitespaces
    settings = read_json_object(folder / "tokenizer_config.json")
    prefix = settings.get("add_prefix_space")
    return SentencePieceTokenizer(
        vocabulary,
        _special_ids(folder, config, vocabulary, (True, False)),
        proto.write_model(
            [piece.text for piece in model.pieces],
            [piece.score for piece in model.pieces],
            types,
            model.trainer_spec,
            model.normalizer_spec,
            keep_normalizer=keep,
        ),
        num_pieces=len(types),
        add_space_prefix=not keep and (prefix if isinstance(prefix, bool) else model.add_dummy_prefix),
        prefix_after_special=settings.get("legacy", True) is not False,
        rstrip_ids=rstrip,
    )
