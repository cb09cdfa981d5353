"""Reads the small JSON files that lie beside a Hugging Face model, bounded and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError

MAX_CONFIG_BYTES = 32 << 20
"""tokenizer_config.json lists added tokens and templates: a few MB at most."""
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 256 << 10
"""Real chat templates have up to 32 KB."""


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes. BadInputError names the file and both sizes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise BadInputError(f"{path} has {size} bytes; at most {limit} are read")
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_text(path: Path, limit: int) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file, or an empty one where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInputError(f"{path} holds {type(value).__name__}, not an object")
    return value


def token_string(value: Any) -> str | None:
    """A special token as the files spell it: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def special_token_strings(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token ... by name, tokenizer_config.json first."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_object(folder / name).items():
            text = token_string(value) if key.endswith("_token") else None
            if text is not None:
                found[key] = text
    return found
