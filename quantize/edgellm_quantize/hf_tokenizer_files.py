"""The tokenizer files of a Hugging Face folder, read with bounds, and what they say about added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.errors import BadInputError

MAX_TOKENIZER_BYTES = 256 << 20
"""tokenizer.json of a 260,000-token vocabulary has 35 MB."""
MAX_VOCAB = 1 << 24


@dataclass(frozen=True)
class AddedToken:
    """A token outside the trained vocabulary, or a declaration about one inside it."""

    token_id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """The parsed files; an absent one is an empty mapping."""

    folder: Path
    tokenizer: Mapping[str, Any]
    """tokenizer.json"""
    config: Mapping[str, Any]
    """tokenizer_config.json"""
    generation: Mapping[str, Any]
    """generation_config.json"""
    processor_template: str | None
    """The template in chat_template.json."""
    model_path: Path | None
    """tokenizer.model"""
    added: tuple[AddedToken, ...]
    """By id; a token that is declared in several files comes once."""

    def added_ids(self) -> dict[str, int]:
        """Spelling to id of the added tokens."""
        return {token.content: token.token_id for token in self.added}


def read_bounded_text(path: Path, max_bytes: int) -> str:
    """A UTF-8 text file. BadInputError when it is too large or not UTF-8."""
    size = path.stat().st_size
    if size > max_bytes:
        raise BadInputError(f"{path}: {size} bytes is too much here (limit {max_bytes})")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not UTF-8 text ({error})") from None


def _optional(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return read_json_object(path, MAX_TOKENIZER_BYTES) if path.is_file() else {}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read what is there. BadInputError names the file that is damaged, or a folder without any tokenizer."""
    tokenizer = _optional(folder, "tokenizer.json")
    model_path = folder / "tokenizer.model"
    if not isinstance(tokenizer.get("model"), Mapping) and not model_path.is_file():
        if (folder / "tokenizer.json").is_file():
            raise BadInputError(f"{folder / 'tokenizer.json'} has no tokenizer model in it")
        raise BadInputError(f"{folder}: neither tokenizer.json nor tokenizer.model is in this folder")
    config = _optional(folder, "tokenizer_config.json")
    return TokenizerFiles(
        folder=folder,
        tokenizer=tokenizer,
        config=config,
        generation=_optional(folder, "generation_config.json"),
        processor_template=_optional(folder, "chat_template.json").get("chat_template"),
        model_path=model_path if model_path.is_file() else None,
        added=_added_tokens(folder, tokenizer, config),
    )


def _added_tokens(
    folder: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[AddedToken, ...]:
    """Declarations of all files; tokenizer.json, which tokenizes, has the last word on an id."""
    found: dict[int, AddedToken] = {}
    for content, token_id in _optional(folder, "added_tokens.json").items():
        token = _added({"id": token_id, "content": content}, "added_tokens.json")
        found[token.token_id] = token
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise BadInputError("tokenizer_config.json: added_tokens_decoder must be an object")
    for key, entry in decoder.items():
        if not isinstance(entry, Mapping) or not str(key).isdecimal():
            raise BadInputError(f"tokenizer_config.json: added_tokens_decoder has a bad entry {key!r:.40}")
        token = _added({**entry, "id": int(key)}, "tokenizer_config.json")
        found[token.token_id] = token
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise BadInputError("tokenizer.json: added_tokens must be a list")
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise BadInputError(f"tokenizer.json: added_tokens has a bad entry {entry!r:.40}")
        token = _added(entry, "tokenizer.json")
        found[token.token_id] = token
    return tuple(found[token_id] for token_id in sorted(found))


def _added(entry: Mapping[str, Any], file_name: str) -> AddedToken:
    token_id, content = entry.get("id"), entry.get("content")
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_VOCAB:
        raise BadInputError(f"{file_name}: the added token {content!r:.40} has the bad id {token_id!r:.40}")
    if not isinstance(content, str) or not content:
        raise BadInputError(f"{file_name}: the added token {token_id} has no text")
    return AddedToken(
        token_id=token_id,
        content=content,
        special=bool(entry.get("special", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
    )
