"""Error and speed of the block encoders against ggml's own, per type, effort and kind of rows.

EDGELLM_CODEC_TYPES    names of block types, separated by commas (default: all)
EDGELLM_CODEC_EFFORTS  fast,default,best
EDGELLM_CODEC_PAIRS    runs of each side in turn (default: 7)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from acceptance.harness import Figure, version

Array = np.ndarray[Any, Any]

ROWS, WIDTH = 128, 2048
LOSS_AT_MOST = {"Q4_K": 0.98, "Q5_K": 0.955}
"""Of ggml's RMSE, under the default effort; every other type and ``fast``: 1."""
SPEED_AT_LEAST = {"fast": 1.0, "default": 0.5}


def make_rows() -> dict[str, Array]:
    """Kinds of rows f32 [ROWS, WIDTH]: Gaussian, heavy-tailed (Student, 5 degrees), a real model's."""
    generator = np.random.default_rng(7)
    gauss = generator.standard_normal((ROWS, WIDTH)).astype(np.float32)
    heavy = (generator.standard_t(5, (ROWS, WIDTH)) / math.sqrt(5 / 3)).astype(np.float32)
    return {"gauss": gauss, "heavy": heavy, "twin": _twin_rows(generator)}


def _twin_rows(generator: np.random.Generator) -> Array:
    """Rows of Gemma 3's ffn_down with columns rescaled by 0.8 to 1.25, off the grid they were stored on."""
    from edgellm_kernels.ggml_blocks import dequantize
    from edgellm_models.checkpoint import open_checkpoint
    from tests.support.real_models import real_model

    checkpoint = open_checkpoint(real_model("gemma3-270m"))
    try:
        weight = checkpoint.weight("blk.9.ffn_down.weight")
        rows = dequantize(weight.data, weight.layout, WIDTH).numpy()
    finally:
        checkpoint.close()
    factors = np.exp(generator.uniform(math.log(0.8), math.log(1.25), WIDTH))
    return (rows[:ROWS] * factors).astype(np.float32)


def measure(type_name: str, rows: Array, importance: Array | None, efforts: list[str], pairs: int) -> Any:
    """(RMSE over ggml's, speed over ggml's) of each effort, both on one core, in alternating runs."""
    import gguf
    import libgguf

    from edgellm_quantize.kquant_codec import encode_rows

    kind = gguf.GGMLQuantizationType[type_name]
    weights = np.ones(rows.shape[1]) if importance is None else importance

    def rmse(data: Array) -> float:
        decoded = gguf.quants.dequantize(data, kind).astype(np.float64)
        return math.sqrt(float((weights * (rows - decoded) ** 2).mean()))

    peer = rmse(libgguf.quantize_rows(rows, int(kind), importance))
    out = {}
    for effort in efforts:
        ours = rmse(encode_rows(rows, type_name, importance, effort, threads=1).data)
        mine, theirs = [], []
        for _ in range(pairs):
            mine.append(_seconds(lambda e=effort: encode_rows(rows, type_name, importance, e, threads=1)))
            theirs.append(_seconds(lambda: libgguf.quantize_rows(rows, int(kind), importance)))
        # The least of each: what else the machine does only ever adds.
        out[effort] = (ours / peer, min(theirs) / min(mine), rows.size / min(mine) / 1e6)
    return out


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def run() -> Iterator[Figure]:
    from edgellm_kernels.native_library import load_library, why_missing
    from edgellm_quantize.block_grids import GRIDS

    if load_library() is None:
        raise SystemExit(f"the native library is missing: {why_missing()}")
    types = os.environ.get("EDGELLM_CODEC_TYPES", ",".join(GRIDS)).split(",")
    efforts = os.environ.get("EDGELLM_CODEC_EFFORTS", "fast,default,best").split(",")
    pairs = int(os.environ.get("EDGELLM_CODEC_PAIRS", "7"))
    rows = make_rows()
    importance = np.exp(np.random.default_rng(8).standard_normal(WIDTH)).astype(np.float32)
    print("type   rows  error    " + "".join(f"{effort:>32}" for effort in efforts))
    for name in types:
        cells: dict[str, list[tuple[float, float, float]]] = {effort: [] for effort in efforts}
        for kind, values in rows.items():
            for label, weights in (("plain", None), ("weighted", importance)):
                found = measure(name, values, weights, efforts, pairs)
                line = f"{name:6} {kind:5} {label:8}"
                for effort in efforts:
                    loss, speed, rate = found[effort]
                    cells[effort].append(found[effort])
                    line += f"   {100 * (loss - 1):+7.2f}%  {speed:6.2f}x {rate:7.1f} Mw/s"
                print(line, flush=True)
        for effort in efforts:
            worst_loss = max(cell[0] for cell in cells[effort])
            worst_speed = min(cell[1] for cell in cells[effort])
            limit = LOSS_AT_MOST.get(name, 1.0) if effort != "fast" else 1.0
            need = SPEED_AT_LEAST.get(effort, 0.0)
            yield Figure(
                name=f"{name} {effort}",
                value=worst_loss,
                unit="of ggml's RMSE (worst of six)",
                promise=f"at most {limit}, at {need} of its speed or better",
                met=worst_loss <= limit and worst_speed >= need,
                peer=f"libgguf {version('libgguf')}, speed {worst_speed:.2f} times (slowest of six)",
                detail={"cells": cells[effort]},
            )
