"""The tokenizer of a Hugging Face folder as GGUF metadata: vocabulary, kinds, scores or merges, ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.sentencepiece_proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)
from edgellm_models.tokenizer.vocabulary import parse_byte_token
from edgellm_quantize.gguf_pre_tokenizer import CHECK_TEXT, find_pre_tokenizer
from edgellm_quantize.gguf_special_ids import special_id_fields
from edgellm_quantize.gguf_values import MetadataTable, array, boolean, text
from edgellm_quantize.hf_tokenizer_files import MAX_VOCAB, AddedToken, TokenizerFiles

_MAX_MODEL_BYTES = 64 << 20
_ADDED_SCORE, _PAD_SCORE = -1000.0, -10000.0


@dataclass
class TokenizerFields:
    """What the tokenizer becomes in a GGUF file."""

    metadata: MetadataTable = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)


@dataclass
class _Table:
    """The vocabulary while it is put together; embedding rows that no token names stay padding."""

    texts: list[str]
    kinds: list[int]
    scores: list[float]
    ids: dict[str, int] = field(default_factory=dict)

    @classmethod
    def padding(cls, rows: int) -> _Table:
        return cls([f"[PAD{index}]" for index in range(rows)], [UNUSED] * rows, [_PAD_SCORE] * rows)

    def put(self, token_id: int, spelling: str, kind: int, score: float) -> None:
        if self.kinds[token_id] != UNUSED and self.ids.get(self.texts[token_id]) == token_id:
            del self.ids[self.texts[token_id]]
        self.texts[token_id], self.kinds[token_id], self.scores[token_id] = spelling, kind, score
        self.ids[spelling] = token_id


def tokenizer_fields(files: TokenizerFiles, config: Mapping[str, Any], rows: int) -> TokenizerFields:
    """Metadata for an embedding of ``rows`` rows. BadInputError where GGUF cannot hold the tokenizer."""
    out = TokenizerFields()
    model = files.tokenizer.get("model")
    model = model if isinstance(model, Mapping) else {}
    if files.tokenizer and _is_byte_level(files.tokenizer):
        table = _byte_level(files, model, rows, out)
    elif files.model_path is not None:
        read = _read_spm(files.model_path)
        table = _sentencepiece(files, [(p.text, p.score, p.type) for p in read.pieces], rows, out)
        _put_spm(out, table, read.add_dummy_prefix)
    elif model.get("type") == "BPE":
        table = _sentencepiece(files, _pieces_of_merges(files, model), rows, out)
        _put_spm(out, table, _prepends_space(files.tokenizer))
    else:
        raise BadInputError(
            f"{files.folder}: tokenizer.json has a model of type {model.get('type')!r}, which these families "
            f"do not use; BPE and SentencePiece are written"
        )
    out.metadata |= special_id_fields(files, config, table.ids, _adds_tokens(files, table.ids), out.notices)
    trimmed = [token.content for token in files.added if token.lstrip or token.rstrip]
    if trimmed and not strips_like_phi3(files):
        out.notices.append(
            Notice(
                "added_token_stripping_dropped",
                f"{len(trimmed)} added tokens swallow white space next to them, which GGUF cannot state: "
                f"{', '.join(trimmed[:3])}",
            )
        )
    return out


_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_PHI3_NAME = re.compile("phi-?3", re.IGNORECASE)


def strips_like_phi3(files: TokenizerFiles) -> bool:
    """Whether the added tokens swallow the white space after them in the one way that llama.cpp knows.

    It goes by general.name: where that contains phi-3, every special token does so but ``<unk>``, ``<s>`` and
    ``<|endoftext|>`` (llama-vocab.cpp).
    """
    stripping = {token.content for token in files.added if token.rstrip}
    special = {token.content for token in files.added if token.special}
    plain = not any(token.lstrip for token in files.added)
    return plain and "</s>" in stripping and special >= _PHI3_PLAIN and stripping == special - _PHI3_PLAIN


def name_for_readers(name: str, files: TokenizerFiles) -> str:
    """general.name such that llama.cpp's rule for phi-3 holds exactly where the tokenizer asks for it.

    NOTE: with phi-3 in the name of a model that lacks those tokens, llama.cpp does not load the file at all.
    """
    named = _PHI3_NAME.search(name) is not None
    if strips_like_phi3(files):
        return name if named else f"phi-3 {name}"
    return _PHI3_NAME.sub("phi 3", name)


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    def has(step: Any, depth: int = 0) -> bool:
        if isinstance(step, Mapping) and depth < 8:
            return step.get("type") == "ByteLevel" or any(has(value, depth + 1) for value in step.values())
        return isinstance(step, list) and any(has(item, depth + 1) for item in step)

    return has(tokenizer.get("pre_tokenizer")) or has(tokenizer.get("decoder"))


def _vocab(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, Mapping) or not vocab:
        raise BadInputError("tokenizer.json: the model has no vocabulary")
    for spelling, token_id in vocab.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_VOCAB:
            raise BadInputError(f"tokenizer.json: the token {spelling!r:.40} has the bad id {token_id!r:.40}")
    return dict(vocab)


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merge rules, both spellings: "left right" and ["left", "right"]."""
    merges = model.get("merges")
    if not isinstance(merges, list) or not merges:
        raise BadInputError("tokenizer.json: the model has no merges")
    out = []
    for rule in merges:
        parts = rule.split(" ") if isinstance(rule, str) else rule
        if not (isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts)):
            raise BadInputError(f"tokenizer.json: {rule!r:.60} is no merge rule")
        out.append((parts[0], parts[1]))
    return out


def _check_rows(ids: Iterable[int], rows: int, notices: list[Notice], what: str) -> None:
    beyond = [token_id for token_id in ids if token_id >= rows]
    if beyond:
        notices.append(
            Notice(
                "tokens_beyond_embedding",
                f"{len(beyond)} {what} have ids from {rows} on, where the embedding has no row: left out",
            )
        )


def _put_added(
    table: _Table, added: Sequence[AddedToken], rows: int, out: TokenizerFields, *, spaces: bool
) -> None:
    """Added tokens over the trained vocabulary; re-declaring a trained entry only changes its kind."""
    _check_rows((token.token_id for token in added), rows, out.notices, "added tokens")
    for token in added:
        if token.token_id >= rows:
            continue
        first = table.ids.get(token.content)
        if first is not None and first != token.token_id:
            out.notices.append(
                Notice(
                    "added_token_repeated",
                    f"the added token {token.content!r} has the id {token.token_id}, but its text is already "
                    f"that of {first}, which stays: GGUF allows a text once",
                )
            )
            continue
        if table.kinds[token.token_id] == UNKNOWN:
            continue
        kind = CONTROL if token.special else USER_DEFINED
        spelling = token.content
        if spaces and kind == USER_DEFINED:
            # Readers look for these in the text itself, where a space is a space.
            spelling = spelling.replace("▁", " ")
        table.put(token.token_id, spelling, kind, _ADDED_SCORE)


def _byte_level(files: TokenizerFiles, model: Mapping[str, Any], rows: int, out: TokenizerFields) -> _Table:
    if model.get("type") != "BPE":
        raise BadInputError(
            f"tokenizer.json: a byte-level model of type {model.get('type')!r} cannot be written"
        )
    table = _Table.padding(rows)
    vocab = _vocab(model)
    _check_rows(vocab.values(), rows, out.notices, "tokens")
    for spelling, token_id in vocab.items():
        if token_id < rows:
            table.put(token_id, spelling, NORMAL, 0.0)
    _put_added(table, files.added, rows, out, spaces=False)
    pre, notices = find_pre_tokenizer(files.tokenizer, _check_ids(files))
    out.notices += notices
    # A space separates the two pieces; inside one it is spelled as byte-level vocabularies spell it.
    merges = [" ".join(part.replace(" ", "Ġ") for part in rule) for rule in _merges(model)]
    out.metadata = {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(pre),
        "tokenizer.ggml.tokens": array("STRING", table.texts),
        "tokenizer.ggml.token_type": array("INT32", table.kinds),
        "tokenizer.ggml.merges": array("STRING", merges),
    }
    return table


def _check_ids(files: TokenizerFiles) -> list[int] | None:
    from tokenizers import Tokenizer

    data = (files.folder / "tokenizer.json").read_bytes()  # the library takes no path that is not UTF-8
    try:
        return list(Tokenizer.from_buffer(data).encode(CHECK_TEXT).ids)
    except Exception as error:  # the library raises bare Exception
        raise BadInputError(
            f"{files.folder / 'tokenizer.json'}: the tokenizers library refuses it: {error}"
        ) from None


def _read_spm(path: Path) -> SentencePieceModel:
    size = path.stat().st_size
    if size > _MAX_MODEL_BYTES:
        raise BadInputError(
            f"{path}: {size} bytes is too much for a SentencePiece model (limit {_MAX_MODEL_BYTES})"
        )
    return read_model(path.read_bytes(), str(path), MAX_VOCAB)


def _sentencepiece(
    files: TokenizerFiles, pieces: Sequence[tuple[str, float, int]], rows: int, out: TokenizerFields
) -> _Table:
    table = _Table.padding(rows)
    _check_rows(range(len(pieces)), rows, out.notices, "tokens")
    for token_id, (spelling, score, kind) in enumerate(pieces[:rows]):
        if kind == BYTE and parse_byte_token(spelling) is None:
            raise BadInputError(
                f"{files.folder}: the byte token {token_id} is spelled {spelling!r}, not <0xNN>"
            )
        if kind == USER_DEFINED:
            spelling = spelling.replace("▁", " ")
        table.put(token_id, spelling, kind, score)
    _put_added(table, files.added, rows, out, spaces=True)
    return table


def _put_spm(out: TokenizerFields, table: _Table, add_space_prefix: bool) -> None:
    out.metadata = {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": array("STRING", table.texts),
        "tokenizer.ggml.scores": array("FLOAT32", table.scores),
        "tokenizer.ggml.token_type": array("INT32", table.kinds),
        "tokenizer.ggml.add_space_prefix": boolean(add_space_prefix),
    }


def _pieces_of_merges(files: TokenizerFiles, model: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """A SentencePiece vocabulary from a tokenizer.json alone.

    SentencePiece merges the pair with the best score first, a merge list the earliest rule: the score of a
    piece is minus the rank of the first rule that makes it.
    """
    vocab = _vocab(model)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(model)):
        ranks.setdefault(left + right, rank)
    size = max(vocab.values()) + 1
    unknown = model.get("unk_token")
    if size > 2 * len(vocab) + 1024:
        raise BadInputError(f"tokenizer.json: ids up to {size - 1} for {len(vocab)} tokens")
    pieces: list[tuple[str, float, int]] = [(f"[PAD{index}]", _PAD_SCORE, UNUSED) for index in range(size)]
    special = files.added_ids()
    for spelling, token_id in vocab.items():
        if spelling == unknown:
            pieces[token_id] = (spelling, 0.0, UNKNOWN)
        elif model.get("byte_fallback") and parse_byte_token(spelling) is not None:
            pieces[token_id] = (spelling, 0.0, BYTE)
        elif spelling in special:
            pieces[token_id] = (spelling, _ADDED_SCORE, CONTROL)
        else:
            # Characters are never the result of a merge: any score below the merged pieces does.
            pieces[token_id] = (spelling, -float(ranks.get(spelling, len(ranks) + token_id)), NORMAL)
    return pieces


def _prepends_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text gets a space in front: a Prepend normalizer, or a Metaspace that is not told never to."""

    def has(step: Any, depth: int = 0) -> bool:
        if isinstance(step, list):
            return any(has(item, depth + 1) for item in step)
        if not isinstance(step, Mapping) or depth > 8:
            return False
        kind = step.get("type")
        if kind == "Prepend" or (kind == "Metaspace" and step.get("prepend_scheme", "always") != "never"):
            return True
        return any(has(value, depth + 1) for value in step.values())

    return has(tokenizer.get("normalizer")) or has(tokenizer.get("pre_tokenizer"))


def _adds_tokens(files: TokenizerFiles, ids: Mapping[str, int]) -> tuple[bool, bool]:
    """(adds BOS, adds EOS).

    tokenizer.json's post-processor is the whole truth where that file is, as in transformers 5; the flags of
    tokenizer_config.json count for a tokenizer.model alone.
    """
    if files.tokenizer:
        template = _template_of(files.tokenizer.get("post_processor")) or [""]
        return template[0] in ids, len(template) > 1 and template[-1] in ids
    bos, eos = files.config.get("add_bos_token"), files.config.get("add_eos_token")
    return (bos if isinstance(bos, bool) else True), (eos if isinstance(eos, bool) else False)


def _template_of(post: Any) -> list[str] | None:
    """The special tokens of a TemplateProcessing's single form, "" for the text; None without one."""
    if not isinstance(post, Mapping):
        return None
    if post.get("type") == "Sequence":
        parts = post.get("processors")
        found = [_template_of(part) for part in parts] if isinstance(parts, list) else []
        return next((template for template in found if template is not None), None)
    if post.get("type") != "TemplateProcessing" or not isinstance(post.get("single"), list):
        return None
    out = []
    for step in post["single"]:
        special = step.get("SpecialToken") if isinstance(step, Mapping) else None
        out.append(str(special.get("id")) if isinstance(special, Mapping) else "")
    return out
