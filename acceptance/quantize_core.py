"""Quality and time of the quantization core on a dense twin of SmolLM2: KL divergence per method.

Divergence is measured from the twin in f32, on text that calibration never saw, in windows of 512 whose first
128 tokens are not scored. All methods see the same calibration. The peers' grids and recipes are computed
here from their published form: round to nearest and GPTQ with scales 2 absmax / (2^b - 1), columns ordered
by the diagonal within groups (GPTQModel's default), damping 0.05.

EDGELLM_CORE_LAYERS=N quantizes only the first N layers, EDGELLM_CORE_TOKENS the calibration's size.
"""

from __future__ import annotations

import os
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from acceptance.harness import Figure
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_models.tokenizer import load_tokenizer
from edgellm_quantize.calibration import CalibrationTokens, hash_of
from edgellm_quantize.capture import open_stream
from edgellm_quantize.grids import IntegerGrid, dequantize
from edgellm_quantize.job import run_core
from edgellm_quantize.layer_rounding import CorePlan, uniform_grids
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.rounding import RoundingOptions
from tests.support.dense_twin import twin_tensors
from tests.support.real_models import real_model

WINDOW, UNSCORED = 512, 128
SYMMETRIC = IntegerGrid(4, 64)
ASYMMETRIC = IntegerGrid(4, 64, symmetric=False, min_zero=0)
OURS = RoundingOptions(descent_passes=1)
USUAL = RoundingOptions(candidates=0)
METHODS: dict[str, tuple[str, IntegerGrid, RoundingOptions, float]] = {
    "rtn": ("rtn", SYMMETRIC, USUAL, 0.0),
    "plain gptq": ("gptq", SYMMETRIC, USUAL, 0.0),
    "gptq": ("gptq", SYMMETRIC, OURS, 0.25),
    "rtn asymmetric": ("rtn", ASYMMETRIC, USUAL, 0.0),
    "awq, identity only": ("gptq", ASYMMETRIC, OURS, 0.25),
    "awq": ("awq", ASYMMETRIC, OURS, 0.25),
}
PROMISES = (
    ("gptq", "rtn", 0.35),
    ("gptq", "plain gptq", 0.85),
    ("awq", "rtn asymmetric", 0.5),
    ("awq", "awq, identity only", 0.95),
)


def windows(texts: Sequence[str], checkpoint: Checkpoint, count: int, seed: int) -> list[tuple[int, ...]]:
    """Windows of token ids, an equal share from each text, in a drawn order."""
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    made = []
    for text in texts:
        ids = tokenizer.encode(text[:600_000], add_special=False)
        starts = list(range(0, len(ids) - WINDOW, WINDOW))
        random.Random(seed).shuffle(starts)
        made.append([tuple(ids[start : start + WINDOW]) for start in starts])
    turns = [part[index] for index in range(count) for part in made if index < len(part)]
    return turns[:count]


def corpora() -> list[str]:
    """Prose of the language reference, descriptions of packages, and code of the standard library."""
    import pydoc_data.topics as topics

    prose = "\n\n".join(topics.topics.values())
    packages = Path(torch.__file__).parent.parent
    pages = "\n\n".join(
        path.read_text(errors="ignore")[:20_000] for path in sorted(packages.glob("*.dist-info/METADATA"))
    )
    library = Path(sysconfig.get_path("stdlib"))
    code = "\n\n".join(path.read_text(errors="ignore")[:20_000] for path in sorted(library.glob("*.py"))[:60])
    return [prose, pages, code]


def log_probabilities(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[scored tokens, vocab] f32, layer by layer."""
    loader = LayerLoader(checkpoint)
    stream = open_stream(loader, sequences, 4096)
    for index in range(loader.spec.num_layers):
        stream.forward(loader.layer(index), index)
    hidden = torch.cat([part.view(-1, WINDOW, loader.spec.hidden_size) for part in stream.state()])
    scored = hidden[:, UNSCORED:].reshape(-1, loader.spec.hidden_size)
    prepared, _ = loader.kernels.add_rms_norm(None, scored, loader.output_norm(), loader.spec.rms_eps)
    return loader.kernels.lm_head(prepared, loader.head(), loader.spec.final_softcap).log_softmax(-1)


def quantized(
    checkpoint: Checkpoint, method: str, calibration: CalibrationTokens, layers: int
) -> tuple[OverlayCheckpoint, float]:
    """The model after a method, and the seconds that it took."""
    kind, grid, options, share = METHODS[method]
    grids = {
        name: chosen
        for name, chosen in uniform_grids(checkpoint, grid).items()
        if int(name.split(".")[1]) < layers
    }
    overlay = OverlayCheckpoint(checkpoint)
    overlay.replaced |= getattr(checkpoint, "replaced", {})
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plan = CorePlan(grids, kind, options, share)
        result = run_core(checkpoint, plan, Path(folder) / "work", None if kind == "rtn" else calibration)
        seconds = time.monotonic() - begun
        for layer in result.layers():
            overlay.replaced |= layer.changed
            overlay.replaced |= {n: dequantize(outcome.weight) for n, outcome in layer.outcomes.items()}
    return overlay, seconds


def run() -> list[Figure]:
    base = open_checkpoint(real_model("smollm2-135m"))
    twin = OverlayCheckpoint(base, twin_tensors(base))
    layers = int(os.environ.get("EDGELLM_CORE_LAYERS", "30"))
    count = int(os.environ.get("EDGELLM_CORE_TOKENS", "32768")) // WINDOW
    texts = corpora()
    drawn = windows([text[: len(text) // 2] for text in texts], twin, count, seed=1)
    held_out = windows([text[len(text) // 2 :] for text in texts], twin, max(6, min(43, count)), seed=2)
    calibration = CalibrationTokens(tuple(drawn), hash_of(drawn))
    wanted = torch.cat([log_probabilities(twin, held_out[i : i + 6]) for i in range(0, len(held_out), 6)])
    divergence: dict[str, torch.Tensor] = {}
    figures = []
    seconds = {}
    for method in METHODS:
        model, seconds[method] = quantized(twin, method, calibration, layers)
        parts, at = [], 0
        for i in range(0, len(held_out), 6):
            found = log_probabilities(model, held_out[i : i + 6])
            reference = wanted[at : at + len(found)]
            parts.append((reference.exp() * (reference - found)).sum(-1))
            at += len(found)
        divergence[method] = torch.cat(parts)
        mean = float(divergence[method].mean())
        error = float(divergence[method].std()) / len(divergence[method]) ** 0.5
        detail = {"standard_error": error, "scored": len(divergence[method]), "seconds": seconds[method]}
        detail |= {"layers": layers, "calibration_tokens": calibration.num_tokens}
        figures.append(Figure(f"KL divergence, {method}", mean, "nats", "none", True, detail=detail))
    for ours, theirs, most in PROMISES:
        ratio = float(divergence[ours].mean() / divergence[theirs].mean())
        name = f"KL divergence of {ours} over {theirs}"
        figures.append(Figure(name, ratio, "", f"at most {most}", ratio <= most))
    figures.append(_time_ratio(twin, calibration, seconds["gptq"], layers))
    return figures


def _time_ratio(twin: Checkpoint, calibration: CalibrationTokens, seconds: float, layers: int) -> Figure:
    """Seconds of GPTQ over one forward pass of the same tokens through the same layers and the head."""
    loader = LayerLoader(twin)
    times = []
    for _ in range(2):
        begun = time.monotonic()
        stream = open_stream(loader, calibration.sequences, 4096)
        for index in range(layers):
            stream.forward(loader.layer(index), index)
        head = loader.head()
        for part in stream.state():
            prepared, _ = loader.kernels.add_rms_norm(None, part, loader.output_norm(), loader.spec.rms_eps)
            for rows in prepared.values.split(1024):
                loader.kernels.lm_head(type(prepared)(rows), head)
        times.append(time.monotonic() - begun)
    ratio = seconds / statistics.median(times)
    return Figure("seconds of GPTQ over one f32 forward pass", ratio, "", "at most 8", ratio <= 8)
