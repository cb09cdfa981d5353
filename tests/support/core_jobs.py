"""Small runs of the quantization core, and a program that kills such runs and goes on with them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_quantize import work_folder
from edgellm_quantize.calibration import CalibrationTokens, hash_of
from edgellm_quantize.grids import Grid, IntegerGrid, dequantize
from edgellm_quantize.job import CoreResult, run_core
from edgellm_quantize.layer_rounding import CorePlan, uniform_grids
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.rounding import RoundingOptions
from tests.support.forked import signal_of


def random_calibration(
    vocab_size: int, sequences: int = 12, length: int = 32, seed: int = 0
) -> CalibrationTokens:
    """Sequences of random ids and of several lengths."""
    draw = torch.Generator().manual_seed(seed)
    made = tuple(
        tuple(torch.randint(0, vocab_size, (length - index % 5,), generator=draw).tolist())
        for index in range(sequences)
    )
    return CalibrationTokens(made, hash_of(made))


def small_plan(
    checkpoint: Checkpoint, method: str = "gptq", grid: Grid | None = None, **options: Any
) -> CorePlan:
    """4 bits in groups of 32 with a short search."""
    grid = grid or IntegerGrid(4, 32, symmetric=method != "awq", min_zero=0)
    asymmetric = options.pop("asymmetric_share", 0.25)
    rounding = RoundingOptions(**({"candidates": 8, "descent_passes": 1} | options))
    return CorePlan(uniform_grids(checkpoint, grid), method, rounding, asymmetric, awq_ratios=4)


def as_checkpoint(base: Checkpoint, result: CoreResult) -> OverlayCheckpoint:
    """The model as it is with a job's results."""
    overlay = OverlayCheckpoint(base)
    for layer in result.layers():
        overlay.replaced |= layer.changed
        for name, outcome in layer.outcomes.items():
            overlay.replaced[name] = dequantize(outcome.weight)
    return overlay


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a finished work folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _job(model: Path, folder: Path, *, resume: bool, kill_at: str = "") -> None:
    """One job; ``kill_at`` is "rename N" (before the N-th file gets its name) or "progress SHARE"."""
    checkpoint = open_checkpoint(model)
    vocab = checkpoint.tensors()["token_embd.weight"].shape[0]
    renames = 0

    def replace(source: Path, target: Path) -> None:
        nonlocal renames
        renames += 1
        if kill_at == f"rename {renames}":
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    def progress(place: Any) -> None:
        if kill_at == f"progress {place.done:g}":
            os.kill(os.getpid(), signal.SIGKILL)

    work_folder.os = type("os", (), {"replace": staticmethod(replace), "fsync": staticmethod(os.fsync)})
    run_core(
        checkpoint,
        small_plan(checkpoint, "awq"),
        folder,
        random_calibration(vocab, sequences=6),
        resume=resume,
        on_progress=progress,
    )


def _in_child(model: Path, folder: Path, *, resume: bool, kill_at: str = "") -> int:
    """Runs a job in a forked process (no torch op has run in this one); the signal that ended it, or 0."""
    return signal_of(lambda: _job(model, folder, resume=resume, kill_at=kill_at))


def main() -> None:
    """``MODEL FOLDER POINT...``: an undisturbed run in FOLDER/whole; one per point, killed and resumed."""
    model, folder, points = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    assert _in_child(model, folder / "whole", resume=False) == 0
    for number, point in enumerate(points):
        place = folder / f"killed-{number}"
        assert _in_child(model, place, resume=False, kill_at=point) == signal.SIGKILL, point
        assert _in_child(model, place, resume=True) == 0


if __name__ == "__main__":
    main()
