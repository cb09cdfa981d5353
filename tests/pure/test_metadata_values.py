"""Typed metadata access: integer widths by value, everything else by name and found type."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import (
    metadata_bool,
    metadata_float,
    metadata_float_list,
    metadata_int,
    metadata_int_list,
    metadata_int_per_layer,
    metadata_str,
)

GOOD: dict[str, Any] = {"i": 3, "f": 1.5, "s": "x", "b": True, "one": 1, "null": None}


def test_good_values_and_defaults() -> None:
    assert metadata_int(GOOD, "i", minimum=3, maximum=3) == 3
    assert metadata_float(GOOD, "f") == 1.5 and metadata_float(GOOD, "i") == 3.0
    assert metadata_str(GOOD, "s") == "x"
    assert metadata_bool(GOOD, "b") is True and metadata_bool(GOOD, "one") is True
    assert metadata_int(GOOD, "absent", 7) == 7 and metadata_int(GOOD, "null", None) is None
    assert metadata_int_list({"l": [0, 5]}, "l", minimum=0, maximum=5) == [0, 5]
    assert metadata_float_list({"l": [0.5, 2]}, "l") == [0.5, 2.0]


@pytest.mark.parametrize(
    ("getter", "value", "words"),
    [
        (metadata_int, "3", "the string '3'"),
        (metadata_int, 3.0, "the number 3.0"),
        (metadata_int, True, "the boolean true"),
        (metadata_int, [3], "an array of 1 values"),
        (metadata_int, {"a": 1}, "an object"),
        (metadata_float, "1", "the string '1'"),
        (metadata_float, False, "the boolean false"),
        (metadata_float, math.nan, "nan"),
        (metadata_float, math.inf, "inf"),
        (metadata_float, 10**400, "a very large integer"),
        (metadata_bool, 2, "the integer 2"),
        (metadata_bool, "true", "the string 'true'"),
        (metadata_str, 3, "the integer 3"),
        (metadata_str, "y" * 100, None),
        (metadata_int_list, [1, True], "k[1]"),
        (metadata_int_list, [1, 2.5], "k[1]"),
        (metadata_float_list, [1.0, math.nan], "k[1]"),
        (metadata_float_list, [1.0, "z"], "k[1]"),
    ],
)
def test_impossible_types_name_the_key_and_what_was_found(
    getter: Any, value: object, words: str | None
) -> None:
    """C04: never reinterpreted."""
    if words is None:
        assert getter({"k": value}, "k") == value
        return
    with pytest.raises(BadInputError) as caught:
        getter({"k": value}, "k")
    assert "'k" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(("value", "ok"), [(0, False), (1, True), (4, True), (5, False), (-1, False)])
def test_ranges_are_inclusive(value: int, ok: bool) -> None:
    if ok:
        assert metadata_int({"k": value}, "k", minimum=1, maximum=4) == value
        assert metadata_int_list({"k": [value]}, "k", minimum=1, maximum=4) == [value]
        return
    with pytest.raises(BadInputError, match=r"outside its range 1 \.\. 4"):
        metadata_int({"k": value}, "k", minimum=1, maximum=4)
    with pytest.raises(BadInputError, match=r"k\[0\].*outside"):
        metadata_int_list({"k": [value]}, "k", minimum=1, maximum=4)


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(BadInputError, match="lacks the key 'k'"):
        metadata_int({}, "k")


def test_one_value_per_layer() -> None:
    """C04: an array is honoured when it has one value for each layer."""
    assert metadata_int_per_layer({"k": 2}, "k", 3) == [2, 2, 2]
    assert metadata_int_per_layer({"k": [1, 2, 3]}, "k", 3) == [1, 2, 3]
    with pytest.raises(BadInputError, match="2 values for 3 layers"):
        metadata_int_per_layer({"k": [1, 2]}, "k", 3)
