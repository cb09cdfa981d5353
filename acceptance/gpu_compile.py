"""Compiles every GPU kernel ahead of time for every architecture and records what its machine code shows."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator

import torch

from acceptance.harness import RESULTS, Figure, version
from tests.support.cubins import ARCHITECTURES
from tests.support.gpu_cases import Case, cases, faults

SECONDS = "GPU_COMPILE_SECONDS"
"""A run ends after as many; the next one goes on with what is not recorded yet."""
ORDER = sorted(ARCHITECTURES, key=lambda architecture: (architecture not in (86, 120), architecture))


def source_hash(case: Case) -> str:
    """Of a kernel's source with all that it calls, and of the launch: figures of another hash are of another
    kernel."""
    launch = {name: value for name, value in case.arguments.items() if not isinstance(value, torch.Tensor)}
    launch |= {f"sm_90 {name}": value for name, value in case.on_hopper.items()}
    return hashlib.sha256(f"{case.kernel.cache_key} {sorted(launch.items())}".encode()).hexdigest()[:12]


def recorded() -> set[tuple[str, str, str]]:
    """What needs no second run: name, hash and compiler."""
    path = RESULTS / "gpu_compile.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(row["name"], row["detail"]["kernels"], row["peer"]) for row in rows}


def run() -> Iterator[Figure]:
    known, compiler = recorded(), f"Triton {version('triton')}"
    end = time.monotonic() + float(os.environ.get(SECONDS, "inf"))
    for architecture in ORDER:
        for case in cases(full=True):
            kernels = source_hash(case)
            if (f"{case.name} sm_{architecture}", kernels, compiler) in known:
                continue
            if time.monotonic() > end:
                print(f"{SECONDS} are over: run again for the rest")
                return
            yield figure(case, architecture, kernels)


def figure(case: Case, architecture: int, kernels: str) -> Figure:
    """One kernel on one architecture: instructions per weight where it has weights, else registers."""
    compiled = case.compile(architecture)
    wrong = faults(case, compiled, architecture)
    per_weight = case.instructions_per_weight(compiled)
    return Figure(
        name=f"{case.name} sm_{architecture}",
        value=compiled.resources["REG"] if per_weight is None else round(per_weight, 2),
        unit="registers" if per_weight is None else "instructions per weight",
        promise="no spills, shared memory within the card's"
        + (f", at most {case.ceiling}" if case.ceiling else ""),
        met=not wrong,
        peer=f"Triton {version('triton')}",
        detail={
            "kernels": kernels,
            "registers": compiled.resources["REG"],
            "shared_bytes": compiled.shared_bytes,
            "faults": wrong,
        },
    )
