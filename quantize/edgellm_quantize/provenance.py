"""Where an output comes from: the version of the tool, the source, the recipe, the calibration."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_quantize.recipe import QuantizeJob, QuantizeRecipe

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint


def tool_version() -> str:
    """Version of edgellm as it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("edgellm")
    except PackageNotFoundError:
        return "unknown"


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What unfinished work follows from whatever the options are, as plain values: tool, source, its content.

    The content is the sampled fingerprint of the model's files, which reads 64 MB of an 8B model in bf16: a
    change of one small tensor alone may lie between the samples.
    """
    from edgellm_models.checkpoint.fingerprint import fingerprint

    declared = [
        (name, info.type_name, list(info.shape)) for name, info in sorted(checkpoint.tensors().items())
    ]
    return {
        "edgellm": tool_version(),
        "source": digest([checkpoint.file_format, checkpoint.file_bytes, declared]),
        "weights": fingerprint(checkpoint.path),
    }


def digest(value: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def readable_name(path: Path) -> str:
    """The last part of ``path`` as text: names are bytes, and what is no UTF-8 in one becomes U+FFFD."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def calibration_name(job: QuantizeJob) -> str:
    """What the output calls the calibration text."""
    path = job.calibration.path
    return job.calibration.source if path is None else readable_name(path)


def recipe_record(
    job: QuantizeJob, recipe: QuantizeRecipe, calibration_hash: str | None, tokens: int
) -> dict[str, Any]:
    """What is written into the output of how it was made. The same job gives the same record."""
    calibration = None
    if calibration_hash is not None:
        calibration = {
            "source": calibration_name(job),
            "sha256": calibration_hash,
            "tokens": tokens,
            "seed": job.calibration.seed,
        }
    return {
        "quantizer": [f"edgellm:{tool_version()}"],
        "recipe": recipe.record(),
        "calibration": calibration,
        "imatrix": None if job.imatrix is None else readable_name(job.imatrix),
        "source": readable_name(job.source),
    }
