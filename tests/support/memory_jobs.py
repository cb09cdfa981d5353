"""Runs one quantization in a process of its own and says what memory it took at which point."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny_models import make_tiny

LAYERS = 24
TOKENS, LENGTH = 512, 128


@dataclass(frozen=True)
class Taken:
    """Peaks of resident memory in bytes."""

    early: int
    """Behind the third layer, or when it is written."""
    whole: int
    """Of the whole process, writing and reading back included."""
    notices: tuple[str, ...]


def deep_model(folder: Path, **overrides: Any) -> Path:
    """24 layers, 57 MB in f32: all of them in memory would be a fifth more than the program with three."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    return make_tiny("llama", folder, num_hidden_layers=LAYERS, **sizes | overrides)


def calibration_text(path: Path) -> Path:
    draw = random.Random(0)
    words = ("the keeper", "of light", "counted", "17 ships")
    path.write_text(" ".join(draw.choice(words) for _ in range(4 * TOKENS)), encoding="utf-8")
    return path


def run_job(
    source: Path,
    out: Path,
    recipe: dict[str, Any],
    text: Path | None,
    max_memory: int | None = None,
    *,
    save_imatrix: bool = False,
) -> Taken:
    """``text`` None is a job without calibration."""
    job = [str(source), str(out), recipe, None if text is None else str(text), max_memory, save_imatrix]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_jobs", json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return Taken(found["early"], found["whole"], tuple(found["notices"]))


def _child(
    source: str,
    out: str,
    recipe: dict[str, Any],
    text: str | None,
    max_memory: int | None,
    save_imatrix: bool,
) -> None:
    import gguf  # noqa: F401 - a library that some jobs load at their end is no growth

    from edgellm_quantize.api import quantize_model
    from edgellm_quantize.process_memory import peak_memory
    from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeProgress, QuantizeRecipe

    early = 0

    def on_progress(progress: QuantizeProgress) -> None:
        nonlocal early
        written = progress.phase == "writing" and progress.done > 3 / LAYERS
        if not early and (written or progress.detail.startswith("layer 4 of")):
            early = peak_memory()

    calibration = CalibrationSpec("none")
    if text is not None:
        calibration = CalibrationSpec("file", Path(text), samples=TOKENS // LENGTH, sequence_length=LENGTH)
    job = QuantizeJob(
        Path(source),
        Path(out),
        QuantizeRecipe(**recipe),
        calibration,
        max_memory=max_memory,
        save_imatrix=Path(f"{out}.imatrix.gguf") if save_imatrix else None,
        on_progress=on_progress,
    )
    report = quantize_model(job)
    kinds = sorted({notice.kind for notice in report.notices})
    print(json.dumps({"early": early, "whole": peak_memory(), "notices": kinds}))


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
