"""Time of GPTQ over one f32 forward pass of the same tokens, on a dense twin of SmolLM2.

Layer by layer in turn, the pass and the rounding, so that noise meets both, in processor time of the process
(with several cores: seconds of all of them). Quality per method is ``quantize_quality``'s.

EDGELLM_CORE_TOKENS  tokens of calibration (default: 32768)
EDGELLM_CORE_LAYERS  the first N layers only (default: all); the head, which GPTQ leaves alone, then counts in
                     proportion
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence

from acceptance.harness import Figure
from acceptance.quality_text import calibration_text
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_models.tokenizer import load_tokenizer
from edgellm_quantize.capture import Stream, open_stream
from edgellm_quantize.grids import IntegerGrid
from edgellm_quantize.layer_rounding import CorePlan, quantize_layer, uniform_grids
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.rounding import RoundingOptions
from tests.support.dense_twin import twin_tensors
from tests.support.real_models import real_model

WINDOW, ROWS = 512, 4096
OURS = RoundingOptions(descent_passes=1)
"""Of the default effort."""


def windows(checkpoint: Checkpoint, tokens: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    text = calibration_text(lambda part: tokenizer.encode(part, add_special=False), tokens + WINDOW)
    ids = tokenizer.encode(text, add_special=False)
    return [tuple(ids[start : start + WINDOW]) for start in range(0, tokens, WINDOW)]


def head_seconds(loader: LayerLoader, stream: Stream) -> float:
    """The last norm and the logits of every token, a few rows at a time."""
    began = time.process_time()
    head, norm = loader.head(), loader.output_norm()
    for part in stream.state():
        for rows in part.split(1024):
            prepared, _ = loader.kernels.add_rms_norm(None, rows, norm, loader.spec.rms_eps)
            loader.kernels.lm_head(prepared, head, loader.spec.final_softcap)
    return time.process_time() - began


def in_turn(
    twin: Checkpoint, sequences: Sequence[Sequence[int]], layers: int
) -> tuple[list[float], list[float], float]:
    """Seconds of each layer's pass, of each layer's rounding, and of the head."""
    loader = LayerLoader(twin)
    plan = CorePlan(uniform_grids(twin, IntegerGrid(4, 64)), "gptq", OURS)
    plain = open_stream(loader, sequences, ROWS)
    stream, original = plain.copy(), plain.copy()
    passes, roundings = [], []
    for index in range(layers):
        began = time.process_time()
        plain.forward(loader.layer(index), index)
        passed = time.process_time()
        quantize_layer(twin, loader, plan, index, stream, original)
        passes.append(passed - began)
        roundings.append(time.process_time() - passed)
    return passes, roundings, head_seconds(loader, plain)


def run() -> Iterator[Figure]:
    base = open_checkpoint(real_model("smollm2-135m"))
    twin = OverlayCheckpoint(base, twin_tensors(base))
    tokens = int(os.environ.get("EDGELLM_CORE_TOKENS", "32768"))
    total = LayerLoader(twin).spec.num_layers
    layers = int(os.environ.get("EDGELLM_CORE_LAYERS", total))
    passes, roundings, head = in_turn(twin, windows(twin, tokens), layers)
    forward = sum(passes) + head * layers / total
    ratio = sum(roundings) / forward
    detail = {
        "forward_seconds": forward,
        "gptq_seconds": sum(roundings),
        "median_layer_ratio": statistics.median(r / p for r, p in zip(roundings, passes, strict=True)),
        "layers": layers,
        "calibration_tokens": tokens,
    }
    few = "" if layers == total else f" (the first {layers} of {total} layers)"
    name = f"smollm2-135m: GPTQ with {tokens} tokens over one f32 forward pass of them{few}"
    yield Figure(name, ratio, "times the processor time", "at most 8", ratio <= 8, detail=detail)
