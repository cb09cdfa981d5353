"""Profiles of layer skip: what a calibration found, as a small file per model, quantization and device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm.speculative.calibration import Calibration, Candidate, Costs, Prediction
from edgellm.speculative.drafter import MAX_DRAFT
from edgellm_models.errors import BadInputError, OutputError
from edgellm_models.network.sub_layers import SkippedSubLayers

FORMAT = 1
MAX_BYTES = 1 << 18
"""A profile of 1,000 layers is a tenth of this."""


@dataclass(frozen=True)
class ProfileKey:
    """What a profile holds for: anything else has other costs, or says other tokens."""

    model: str
    """The fingerprint of the weights; a quantization is a model of its own."""
    kernels: str
    """By op which backend computes, and the form of activations."""
    kv: str
    device: str
    threads: int
    version: str

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"skip-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


@dataclass(frozen=True)
class SkipProfile:
    """A calibration, and how it came about."""

    key: ProfileKey
    calibration: Calibration
    num_layers: int
    seconds: float
    """That it took."""


def save_profile(profile: SkipProfile, folder: Path) -> Path:
    """Writes a profile, whole or not at all; OutputError."""
    path = folder / profile.key.file_name
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_as_json(profile), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}; EDGELLM_HOME moves it") from None
    return path


def load_profile(key: ProfileKey, folder: Path, num_layers: int) -> SkipProfile | None:
    """The profile of a key; None where there is none. BadInputError for a file that is none."""
    path = folder / key.file_name
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"cannot read the profile {path}: {error.strerror}") from None
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"over {MAX_BYTES:,} bytes")
        return _from_json(json.loads(data.decode("utf-8")), key, num_layers)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInputError(
            f"the profile {path} is damaged ({error}); `edgellm bench spec` writes a new one"
        ) from None


def _as_json(profile: SkipProfile) -> dict[str, Any]:
    found = profile.calibration
    return {
        "format": FORMAT,
        "key": asdict(profile.key),
        "num_layers": profile.num_layers,
        "seconds": round(profile.seconds, 3),
        "complete": found.complete,
        "num_sets": found.num_sets,
        "costs": {
            "attention": found.costs.attention,
            "feed_forward": found.costs.feed_forward,
            "verify": {str(rows): ratio for rows, ratio in found.costs.verify.items()},
        },
        "chosen": candidate_as_json(found.chosen),
        "others": [candidate_as_json(one) for one in found.others],
    }


def candidate_as_json(one: Candidate) -> dict[str, Any]:
    """A set with what was measured and predicted of it, in plain types."""
    return {
        "name": one.name,
        "attention": sorted(one.skipped.attention),
        "feed_forward": sorted(one.skipped.feed_forward),
        "match": one.match,
        "pass_cost": one.pass_cost,
        "gain": one.prediction.gain,
        "draft_tokens": one.prediction.draft_tokens,
        "stop_below": one.prediction.stop_below,
    }


def _from_json(data: Any, key: ProfileKey, num_layers: int) -> SkipProfile:
    if not isinstance(data, dict) or data["format"] != FORMAT or data["key"] != asdict(key):
        raise ValueError("it belongs to another format or model")
    if data["num_layers"] != num_layers:
        raise ValueError(f"it is of {data['num_layers']!r} layers, the model has {num_layers}")
    costs = data["costs"]
    verify = {int(rows): _number(ratio, 1.0, 1e6) for rows, ratio in costs["verify"].items()}
    if any(not 1 <= rows <= 1024 for rows in verify):
        raise ValueError("a verification of impossible size")
    calibration = Calibration(
        _candidate(data["chosen"], num_layers),
        tuple(_candidate(one, num_layers) for one in data["others"][:16]),
        Costs(_number(costs["attention"], 0, 1), _number(costs["feed_forward"], 0, 1), verify),
        complete=data["complete"] is True,
        num_sets=int(_number(data["num_sets"], 0, 1e9)),
    )
    return SkipProfile(key, calibration, num_layers, _number(data["seconds"], 0, 1e9))


def _candidate(data: Mapping[str, Any], num_layers: int) -> Candidate:
    skipped = SkippedSubLayers.of(_layers(data["attention"]), _layers(data["feed_forward"]))
    skipped.check(num_layers)
    prediction = Prediction(
        _number(data["gain"], 0, 1e3),
        int(_number(data["draft_tokens"], 1, MAX_DRAFT)),
        _number(data["stop_below"], 0, 1),
    )
    return Candidate(
        str(data["name"])[:40],
        skipped,
        _number(data["match"], 0, 1),
        _number(data["pass_cost"], 0, 1e3),
        prediction,
    )


def _layers(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("layers that are no integers")
    return values


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    if not least <= value <= most:
        raise ValueError(f"{value!r} is not from {least:g} to {most:g}")
    return float(value)
