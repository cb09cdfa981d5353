"""Compiles every GPU kernel ahead of time for every architecture and records what its machine code shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure, record, version
from tests.support.cubins import ARCHITECTURES
from tests.support.gpu_cases import Case, cases, faults


def source_hash() -> str:
    """Of the kernels' sources and launch sizes: figures of another hash are of other kernels."""
    import edgellm_kernels

    folder = Path(edgellm_kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*_triton.py"), *folder.glob("gpu_*.py"), *folder.glob("tuned/*.json")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def figures() -> Iterator[Figure]:
    kernels = source_hash()
    for architecture in ARCHITECTURES:
        for case in cases(full=True):
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


def main() -> bool:
    return record("gpu_compile", figures())


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
