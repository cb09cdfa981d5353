"""Where an output comes from: the version of the tool, the source, the recipe, the calibration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgellm_quantize.recipe import QuantizeJob, QuantizeRecipe


def tool_version() -> str:
    """Version of edgellm as it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("edgellm")
    except PackageNotFoundError:
        return "unknown"


def calibration_name(job: QuantizeJob) -> str:
    """What the output calls the calibration text."""
    return job.calibration.path.name if job.calibration.path is not None else job.calibration.source


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
        "recipe": asdict(recipe),
        "calibration": calibration,
        "source": job.source.name,
    }
