"""Small JSON files of a model folder, read with a bound on their size and depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.mapped_file import read_bounded
from edgellm_models.errors import BadInputError

MAX_JSON_BYTES = 16 << 20


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file. BadInputError for a file that is too large, no JSON, or no object."""
    raw = read_bounded(path, max_bytes)
    try:
        found = json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise BadInputError(f"{path}: this JSON nests too deep") from None
    except ValueError as error:
        raise BadInputError(f"{path}: this is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInputError(f"{path}: this must be a JSON object")
    return found
