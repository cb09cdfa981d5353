"""Typed access to a request's JSON: every refusal is a 400 that names the field, the value and the rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.server.api_errors import ApiError, bad_field

MAX_SHOWN = 80


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. ApiError 400 for anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})") from None
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(found)}")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value for an error message, bounded."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."


class Fields:
    """The fields of one object. null counts as absent, as OpenAI's clients send it."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def name(self, key: str) -> str:
        return self._prefix + key

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def names(self) -> list[str]:
        return list(self._values)

    def refuse(self, key: str, rule: str, code: str | None = None) -> ApiError:
        """The error for a field's value."""
        name = self.name(key)
        return bad_field(name, f"{name} must be {rule}, not {shown(self._values.get(key))}", code)

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.refuse(key, "one of " + ", ".join(choices))
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if fits and isinstance(value, int) and abs(value) > 1 << 53:
            fits = False
        if not fits or not math.isfinite(value) or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def object(self, key: str) -> Fields | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value, f"{self.name(key)}.")

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return value

    def objects(self, key: str, most: int) -> list[dict[str, Any]]:
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most or not all(isinstance(v, dict) for v in value):
            raise self.refuse(key, f"a list of at most {most} objects")
        return value
