"""Reads the small JSON files that lie beside a Hugging Face model, bounded and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError

MAX_CONFIG_BYTES = 32 << 20
"""tokenizer_config.json lists added tokens and templates: a few MB at most."""
MAX_TOKENIZER_BYTES = 64 << 20
"""The largest published tokenizer.json has 33 MB."""
MAX_JSON_GROUPS = 2_000_000
"""Objects and arrays in a file, of 64 bytes or more each: merges are pairs, of which Gemma 3 has 510,000."""
MAX_JSON_ITEMS = 6_000_000
"""Members and elements in a file; Gemma 3 has 2 million."""
MAX_TEMPLATE_BYTES = 256 << 10
"""Real chat templates have up to 32 KB."""


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes. BadInputError names the file and both sizes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise BadInputError(f"{path} has {size} bytes; at most {limit} are read")
        with path.open("rb") as file:
            return file.read(size)  # a larger number would be allocated whole
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_text(path: Path, limit: int) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def check_json_size(data: bytes, path: Path) -> None:
    """BadInputError for JSON text of so many values that the objects would take many times its size."""
    # Marks inside strings count too: those are few beside what is allowed.
    for count, limit, what in (
        (data.count(b"[") + data.count(b"{"), MAX_JSON_GROUPS, "arrays and objects"),
        (data.count(b","), MAX_JSON_ITEMS, "values"),
    ):
        if count > limit:
            raise BadInputError(f"{path} holds {count} {what}; at most {limit} are read")


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file, or an empty one where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        text = read_text(path, limit)
        check_json_size(text.encode(), path)
        value = json.loads(text)
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
