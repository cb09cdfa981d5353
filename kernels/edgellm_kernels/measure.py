"""Milliseconds and GB/s of single ops over random weights, beside the device's own copy speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgellm_kernels.ggml_blocks import block_bytes
from edgellm_kernels.operands import Prepared
from edgellm_kernels.ops import Kernels
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, DenseWeight, LinearWeight, prepare

HOLDS = {"native": "native", "triton": "planes", "torch": "dense"}
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block's f16 scales lie; everything else in it may be any byte."""
FORMS = (*_HALVES, "F16")


@dataclass(frozen=True)
class OpTime:
    """One op of one size."""

    op: str
    form: str
    n: int
    k: int
    rows: int
    ms: float
    gb_per_s: float
    """Of the weights as they are held, or of what is read and written."""
    of_copy: float
    """As a share of what a copy in memory moves."""


def random_weight(form: str, n: int, k: int) -> LinearWeight:
    """A weight of this GGUF type, [n, k], with scales of 0.01. ValueError where k is no whole blocks."""
    if form == "F16":
        return DenseWeight((torch.randn(n, k) * 0.02).half())
    layout = BlockLayout[form]
    size = block_bytes(layout)
    elements = 256 if form.endswith("_K") else 32
    if k % elements:
        raise ValueError(f"{form} needs rows of a multiple of {elements} weights, not {k}")
    data = torch.randint(0, 256, (n, k // elements, size), dtype=torch.uint8)
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    for place in _HALVES[form]:
        data[:, :, place : place + 2] = scale
    return BlockQuantWeight(data.view(n, -1), layout, k)


def milliseconds(call: Callable[[int], Any], device: torch.device, repeat: int) -> float:
    """Median time of a call, whose turn is its argument; two calls go before."""
    for turn in range(2):
        call(turn)
    times = []
    for turn in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call(turn)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def copy_gb_per_s(device: torch.device, repeat: int, nbytes: int = 1 << 28) -> float:
    """What a copy of ``nbytes`` reads and writes in a second."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / milliseconds(lambda turn: target.copy_(source), device, repeat) / 1e6


def measure_linears(
    kernels: Kernels,
    forms: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    *,
    repeat: int,
    copy: float,
    cache_bytes: int = 64 << 20,
) -> Iterator[OpTime]:
    """``linear`` of every form, shape (n, k) and number of rows. Weights take turns, so many that no cache of
    ``cache_bytes`` still holds the one that comes next."""
    hold = HOLDS[kernels.chosen["linear"]]
    for form in forms:
        for n, k in shapes:
            one = prepare(random_weight(form, n, k), kernels.device, "linear", hold, kernels.dtype)
            copies = min(64, 1 + 2 * cache_bytes // one.nbytes)
            others = (
                prepare(random_weight(form, n, k), kernels.device, "linear", hold, kernels.dtype)
                for _ in range(copies)
            )
            weights = [one, *others]
            for count in rows:
                x = Prepared(torch.randn(count, k, device=kernels.device))
                call = _linear(kernels, x, weights)
                taken = milliseconds(call, kernels.device, repeat)
                speed = one.nbytes / taken / 1e6
                yield OpTime("linear", form, n, k, count, taken, speed, speed / copy)


def _linear(kernels: Kernels, x: Prepared, weights: Sequence[LinearWeight]) -> Callable[[int], torch.Tensor]:
    return lambda turn: kernels.linear(x, weights[turn % len(weights)])


def _norm(
    kernels: Kernels, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor
) -> Callable[[int], Any]:
    return lambda turn: kernels.add_rms_norm(x, residual, gain, 1e-6)


def measure_norm(
    kernels: Kernels, hidden: int, rows: Sequence[int], *, repeat: int, copy: float
) -> Iterator[OpTime]:
    """``add_rms_norm`` of so many rows: two inputs and two outputs in f32."""
    gain = torch.ones(hidden, device=kernels.device)
    for count in rows:
        x, residual = torch.randn(2, count, hidden, device=kernels.device)
        taken = milliseconds(_norm(kernels, x, residual, gain), kernels.device, repeat)
        speed = 16 * count * hidden / taken / 1e6
        yield OpTime("add_rms_norm", "F32", hidden, hidden, count, taken, speed, speed / copy)
