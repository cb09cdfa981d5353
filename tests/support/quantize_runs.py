"""Whole quantization jobs that stop at a point: by an exception, or by kill -9 of their process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeProgress, QuantizeRecipe
from tests.support.forked import signal_of
from tests.support.tiny_models import make_tiny

TEXT = "A fox met a hen by the old mill, and they talked of 7 x 6 = 42. " * 60
RECIPES = {
    "gguf": QuantizeRecipe(type="q4_k_m", effort="fast"),
    "target": QuantizeRecipe(target_bpw=4.6, effort="fast", tensor_types=(("attn_v", "q6_k"),)),
    "gptq": QuantizeRecipe(format="gptq", group_size=32),
    "awq": QuantizeRecipe(format="awq", group_size=32, effort="fast"),
}
"""One of each kind of calibrated output; gptq runs the original stream too."""
POINTS = (("quantizing", 0.5), ("writing", 0.0), ("writing", 0.9999))
"""Inside the second of two layers, behind the first bytes of the output, behind its last."""


def small_text(folder: Path) -> CalibrationSpec:
    """256 tokens of calibration."""
    path = folder / "text.txt"
    path.write_text(TEXT)
    return CalibrationSpec("file", path, samples=8, sequence_length=32)


def stop_at(phase: str, share: float, stop: Callable[[], None]) -> Callable[[QuantizeProgress], None]:
    """Calls ``stop`` where the phase has come to a share of the whole job."""

    def on_progress(place: QuantizeProgress) -> None:
        if place.phase == phase and place.done >= share:
            stop()

    return on_progress


def interrupt(job: QuantizeJob, phase: str, share: float = 0.0) -> None:
    """Run the job up to a point, as Ctrl-C ends it there."""

    def stop() -> None:
        raise KeyboardInterrupt

    try:
        quantize_model(replace(job, on_progress=stop_at(phase, share, stop)))
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the job never came to {phase} {share}")


def model_for(recipe: str, folder: Path) -> Path:
    """Two layers; rows of whole blocks of 256 where block types are chosen."""
    blocks = recipe in ("gguf", "target")
    width = 256 if blocks else 64
    return make_tiny("llama", folder, quantizable=blocks, num_hidden_layers=2, intermediate_size=width)


def output_bytes(out: Path) -> dict[str, bytes]:
    """The file, or every file of the folder."""
    files = [out] if out.is_file() else sorted(out.iterdir())
    return {path.name: path.read_bytes() for path in files}


def _in_child(job: QuantizeJob) -> int:
    """Run the job in a forked process (no torch op has run in this one); the signal that ended it, or 0."""
    return signal_of(lambda: quantize_model(job))


def _load() -> None:
    """What every job imports, once for all children."""
    for name in ("gguf", "safetensors.torch", "tokenizers"):
        importlib.import_module(name)
    for name in ("gguf_job", "folder_job", "job", "capture", "target_size"):
        importlib.import_module(f"edgellm_quantize.{name}")


def main() -> None:
    """``MODEL FOLDER RECIPE``: undisturbed in FOLDER/whole; killed at POINTS[N] and resumed in FOLDER/N."""
    _load()
    model, folder, recipe = Path(sys.argv[1]), Path(sys.argv[2]), RECIPES[sys.argv[3]]
    spec = small_text(folder)
    (folder / "whole").mkdir()
    assert _in_child(QuantizeJob(model, folder / "whole" / "out", recipe, spec)) == 0
    for number, (phase, share) in enumerate(POINTS):
        place = folder / str(number)
        place.mkdir()
        job = QuantizeJob(model, place / "out", recipe, spec)
        kill = stop_at(phase, share, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert _in_child(replace(job, on_progress=kill)) == signal.SIGKILL, phase
        left = sorted(path.name.partition(".")[2] for path in place.iterdir())
        assert len(left) == (2 if phase == "writing" else 1) and "work" in left, left
        assert _in_child(replace(job, resume=True)) == 0


if __name__ == "__main__":
    main()
