"""Measures the GPU linears against the card's own copy speed, and prints a table; run by gpu_check.sh."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from edgellm_kernels.gpu_layouts import FORMS, ScaleKind
from edgellm_kernels.linear_triton import linear
from edgellm_kernels.operands import Prepared
from edgellm_kernels.weights import PlaneWeight

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)


def random_planes(form: str, n: int, k: int) -> PlaneWeight:
    """A weight made on the device: random codes, scales of 0.01."""
    bits, kind = FORMS[form], FORMS[form].scale_kind

    def plane(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, nbytes), dtype=torch.uint8, device="cuda")

    halves = {ScaleKind.F16: k // 32, ScaleKind.F16_MIN: k // 16}
    if kind in halves:
        scales = torch.full((n, halves[kind]), 0.01, dtype=torch.float16, device="cuda")
    else:
        scales = plane(k // 16).view(torch.int8 if kind is ScaleKind.I8_HALVES else torch.uint8)
    width = k // 256 if kind is ScaleKind.I8_HALVES else k // 128
    supers = torch.full((n, width), 0.01, dtype=torch.float16, device="cuda")
    return PlaneWeight(
        form,
        plane(k * bits.low_bits // 8),
        plane(k * bits.high_bits // 8) if bits.high_bits else None,
        scales,
        None if kind in halves else supers,
        None,
        None,
        1,
        n,
        k,
    )


def milliseconds(call: Callable[[int], object], turns: int = 20) -> float:
    """Median time of a call, whose turn is its argument; compiled and warm."""
    for turn in range(3):
        call(turn)
    times = []
    for turn in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(turn)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / milliseconds(lambda turn: target.copy_(source)) / 1e6
    results = []
    print(f"copy {copy:.0f} GB/s\n{'form':10} {'N x K':>14} {'rows':>4} {'us':>8} {'GB/s':>7} {'of copy':>7}")
    for form in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        for n, k in SHAPES if form == "Q4_0" else SHAPES[:1]:
            one = random_planes(form, n, k)
            # More copies than the second-level cache holds four times over: no call finds its weight there.
            copies = 1 + 4 * properties.L2_cache_size // one.nbytes
            weights = [one, *(random_planes(form, n, k) for _ in range(copies))]
            cases = [(rows, "exact") for rows in (ROWS if form == "Q4_0" else ROWS[:1])]
            for rows, activations in (*cases, (1, "int8"), (1, "int16")):
                name = form if activations == "exact" else f"{form} {activations}"
                x = Prepared(torch.randn(rows, k, device="cuda"))
                taken = milliseconds(
                    lambda turn, x=x, weights=weights, activations=activations: linear(
                        x, weights[turn % len(weights)], dtype=torch.bfloat16, activations=activations
                    )
                )
                speed = one.nbytes / taken / 1e6
                results.append(
                    {"form": name, "n": n, "k": k, "rows": rows, "us": taken * 1e3, "of_copy": speed / copy}
                )
                print(
                    f"{name:10} {n:>6} x {k:>5} {rows:>4} {taken * 1e3:8.1f} {speed:7.0f} {speed / copy:7.2f}"
                )
    report = {"gpu": properties.name, "torch": torch.__version__, "copy_gb_per_s": copy, "linears": results}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
