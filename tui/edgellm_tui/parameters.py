"""The sampling values that a person may set in the chat: names, kinds, and what is typed made a value."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from edgellm.contracts import SamplingParams
from edgellm_models.errors import BadInputError


@dataclass(frozen=True)
class Parameter:
    """A field of SamplingParams in the panel."""

    name: str
    label: str
    kind: str
    """float, int or words."""
    does: str
    short: str = ""
    """Another name that people know it by."""


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("temperature", "Temperature", "float", "0 always takes the likeliest word", "temp"),
    Parameter("top_p", "Top-p", "float", "the likeliest, this share; 1: off", "top-p"),
    Parameter("top_k", "Top-k", "int", "so many of the likeliest; 0: off", "top-k"),
    Parameter("min_p", "Min-p", "float", "near the likeliest only; 0: off", "min-p"),
    Parameter(
        "repetition_penalty", "Repeat penalty", "float", "above 1 avoids what was said", "repeat_penalty"
    ),
    Parameter("presence_penalty", "Presence penalty", "float", "against words already said", "presence"),
    Parameter(
        "frequency_penalty", "Frequency penalty", "float", "more so the oftener they came", "frequency"
    ),
    Parameter("max_new_tokens", "Longest answer", "int", "in tokens; empty: what fits", "max_tokens"),
    Parameter("seed", "Seed", "int", "repeats an answer; empty: by chance"),
    Parameter("stop", "Stop at", "words", "texts that end it, with commas"),
)
BY_NAME = {name: p for p in PARAMETERS for name in (p.name, p.short) if name}


def find_parameter(name: str) -> Parameter:
    """By its name or its short one; BadInputError with the nearest otherwise."""
    known = name.strip().lower().replace("-", "_")
    found = BY_NAME.get(known) or BY_NAME.get(known.replace("_", "-"))
    if found is None:
        near = difflib.get_close_matches(known, BY_NAME, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "F3 lists them"
        raise BadInputError(f"{name} is no parameter, {hint}")
    return found


def parse_value(parameter: Parameter, text: str) -> Any:
    """What was typed as a value that SamplingParams takes; BadInputError with the rule that it breaks."""
    text = text.strip()
    value: Any
    try:
        if parameter.kind == "float":
            value = float(text)
        elif parameter.kind == "int":
            value = int(text)
        else:
            value = tuple(part.strip() for part in text.split(",") if part.strip())
    except ValueError:
        kind = "a number" if parameter.kind == "float" else "a whole number"
        raise BadInputError(f"{parameter.label} must be {kind}, not {text!r}") from None
    SamplingParams(**{parameter.name: value})
    return value


def value_text(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
