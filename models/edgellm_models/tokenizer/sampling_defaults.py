"""The sampling values that a model's files recommend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.tokenizer.hf_files import read_json_object

_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: v >= 0, "0 or more"),
    "top_k": (lambda v: v >= -1 and v == int(v), "a whole number of -1 (off) or more"),
    "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "from 0 to 1"),
    "typical_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "repetition_penalty": (lambda v: v > 0, "above 0"),
}

_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Under ``general.sampling.``."""


def _checked(name: str, value: object, where: str) -> float | int:
    holds, rule = _RULES[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadInputError(f"{where} must be {rule}, not {value!r}")
    if not holds(value):
        raise BadInputError(f"{where} must be {rule}, not {value!r}")
    return max(0, int(value)) if name == "top_k" else float(value)


def sampling_from_hf(folder: Path) -> dict[str, float | int]:
    """From generation_config.json; ``do_sample: false`` is temperature 0."""
    path = folder / "generation_config.json"
    config = read_json_object(path)
    found = {
        name: _checked(name, config[name], f"{path}: {name}")
        for name in _RULES
        if config.get(name) is not None
    }
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def sampling_from_gguf(metadata: Mapping[str, Any]) -> dict[str, float | int]:
    """From the ``general.sampling.*`` fields."""
    found: dict[str, float | int] = {}
    for key, name in _GGUF_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            found[name] = _checked(name, value, f"general.sampling.{key}")
    return found
