"""Typed access to a model's metadata (GGUF keys or config.json): one place that checks type and range by key.

Integer widths are accepted by value, an impossible type is an error that names the key and what was found. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from edgellm_models.errors import BadInputError

T = TypeVar("T")


class _Required:
    """The default of a key that must be there."""


REQUIRED = _Required()


def shown(names: list[str], limit: int = 4) -> str:
    """Some of the names that a file gives, for a message, without control characters (terminal escapes)."""
    safe = [name[:120] if name.isprintable() else repr(name[:120]) for name in names[:limit]]
    return ", ".join(safe) + (f" ... ({len(names)} in all)" if len(names) > limit else "")


def type_label(value: object) -> str:
    """What a person calls the type of a metadata value, with the value itself where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int):
        return f"the integer {value}" if abs(value) < 10**20 else "a very large integer"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)} values"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _wrong(key: str, value: object, wanted: str) -> BadInputError:
    return BadInputError(f"the model's metadata key {key!r} must be {wanted}, but it is {type_label(value)}")


def _lookup(metadata: Mapping[str, Any], key: str, default: object, wanted: str) -> tuple[bool, Any]:
    """(found, value or default). A JSON null counts as absent."""
    value = metadata.get(key)
    if value is not None:
        return True, value
    if isinstance(default, _Required):
        raise BadInputError(f"the model's metadata lacks the key {key!r} ({wanted})")
    return False, default


def _check_range(key: str, value: float, minimum: float | None, maximum: float | None) -> None:
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        low = "-" if minimum is None else f"{minimum:g}"
        high = "-" if maximum is None else f"{maximum:g}"
        shown = f"{value:g}" if isinstance(value, float) else str(value)[:40]
        raise BadInputError(f"the model's metadata key {key!r} is {shown}, outside its range {low} .. {high}")


def _as_int(key: str, value: object, minimum: int | None, maximum: int | None, wanted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(key, value, wanted)
    _check_range(key, value, minimum, maximum)
    return value


def _as_float(key: str, value: object, minimum: float | None, maximum: float | None, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, value, wanted)
    try:
        number = float(value)
    except OverflowError:
        raise _wrong(key, value, wanted) from None
    if not math.isfinite(number):
        raise BadInputError(f"the model's metadata key {key!r} is {number}, which is not a finite number")
    _check_range(key, number, minimum, maximum)
    return number


@overload
def metadata_int(
    metadata: Mapping[str, Any],
    key: str,
    default: _Required = ...,
    *,
    minimum: int | None = ...,
    maximum: int | None = ...,
) -> int: ...
@overload
def metadata_int(
    metadata: Mapping[str, Any],
    key: str,
    default: T,
    *,
    minimum: int | None = ...,
    maximum: int | None = ...,
) -> int | T: ...
def metadata_int(
    metadata: Mapping[str, Any],
    key: str,
    default: object = REQUIRED,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
) -> object:
    """An integer of any width, ``minimum <= value <= maximum``; ``default`` (unchecked) where the key is
    absent.

    Raises BadInputError for an absent required key, another type (booleans and floats included), or out of
    range.
    """
    found, value = _lookup(metadata, key, default, "an integer")
    return _as_int(key, value, minimum, maximum, "an integer") if found else value


@overload
def metadata_float(
    metadata: Mapping[str, Any],
    key: str,
    default: _Required = ...,
    *,
    minimum: float | None = ...,
    maximum: float | None = ...,
) -> float: ...
@overload
def metadata_float(
    metadata: Mapping[str, Any],
    key: str,
    default: T,
    *,
    minimum: float | None = ...,
    maximum: float | None = ...,
) -> float | T: ...
def metadata_float(
    metadata: Mapping[str, Any],
    key: str,
    default: object = REQUIRED,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> object:
    """A finite number (an integer counts); otherwise as metadata_int."""
    found, value = _lookup(metadata, key, default, "a number")
    return _as_float(key, value, minimum, maximum, "a number") if found else value


@overload
def metadata_bool(metadata: Mapping[str, Any], key: str, default: _Required = ...) -> bool: ...
@overload
def metadata_bool(metadata: Mapping[str, Any], key: str, default: T) -> bool | T: ...
def metadata_bool(metadata: Mapping[str, Any], key: str, default: object = REQUIRED) -> object:
    """True or false; the integers 0 and 1, which some writers use, count. Otherwise as metadata_int."""
    found, value = _lookup(metadata, key, default, "true or false")
    if not found or isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise _wrong(key, value, "true or false")


@overload
def metadata_str(metadata: Mapping[str, Any], key: str, default: _Required = ...) -> str: ...
@overload
def metadata_str(metadata: Mapping[str, Any], key: str, default: T) -> str | T: ...
def metadata_str(metadata: Mapping[str, Any], key: str, default: object = REQUIRED) -> object:
    """A string; otherwise as metadata_int."""
    found, value = _lookup(metadata, key, default, "a string")
    if found and not isinstance(value, str):
        raise _wrong(key, value, "a string")
    return value


def _as_list(metadata: Mapping[str, Any], key: str, default: object, wanted: str) -> tuple[bool, Any]:
    found, value = _lookup(metadata, key, default, wanted)
    if found and not isinstance(value, list | tuple):
        raise _wrong(key, value, wanted)
    return found, value


def metadata_int_list(
    metadata: Mapping[str, Any],
    key: str,
    default: list[int] | _Required = REQUIRED,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
) -> list[int]:
    """An array of integers of any width, each within the range; an error names the index."""
    found, value = _as_list(metadata, key, default, "an array of integers")
    if not found:
        return list(value)
    if set(map(type, value)) <= {int} and (
        not value
        or ((minimum is None or min(value) >= minimum) and (maximum is None or max(value) <= maximum))
    ):
        return list(value)  # a vocabulary has 260,000 entries: check them in C
    return [_as_int(f"{key}[{i}]", x, minimum, maximum, "an integer") for i, x in enumerate(value)]


def metadata_float_list(
    metadata: Mapping[str, Any], key: str, default: list[float] | _Required = REQUIRED
) -> list[float]:
    """An array of finite numbers; an error names the index."""
    found, value = _as_list(metadata, key, default, "an array of numbers")
    if not found:
        return list(value)
    if set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        return list(value)
    return [_as_float(f"{key}[{i}]", x, None, None, "a number") for i, x in enumerate(value)]


def metadata_int_per_layer(
    metadata: Mapping[str, Any],
    key: str,
    num_layers: int,
    default: int | _Required = REQUIRED,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
) -> list[int]:
    """One integer per layer from a key that holds one for all or an array with one for each."""
    if isinstance(metadata.get(key), list | tuple):
        values = metadata_int_list(metadata, key, minimum=minimum, maximum=maximum)
        if len(values) != num_layers:
            raise BadInputError(
                f"the model's metadata key {key!r} has {len(values)} values for {num_layers} layers"
            )
        return values
    return [metadata_int(metadata, key, default, minimum=minimum, maximum=maximum)] * num_layers
