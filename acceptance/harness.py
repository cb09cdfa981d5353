"""How a promised figure is recorded: one row on the screen, one JSON object in docs/benchmarks/."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True)
class Figure:
    """One measured value beside what was promised and what a peer did in the same run."""

    name: str
    value: float | str
    unit: str
    promise: str
    """What is promised, in words with the number; ``none`` for a figure that is only reported."""
    met: bool
    peer: str = ""
    """Peer and version, and its value, measured in the same run."""
    detail: dict[str, Any] = field(default_factory=dict)


def machine() -> str:
    """Processor model and cores, as the rows name them."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Short hash of the measured tree, with ``+`` when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> tuple[float, float, Sequence[float]]:
    """Medians of both sides and the ratio theirs/ours of each pair, run in turn so that noise meets both."""
    mine, peer = [], []
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        first, second = order[0](), order[1]()
        mine.append(first if pair % 2 == 0 else second)
        peer.append(second if pair % 2 == 0 else first)
    return statistics.median(mine), statistics.median(peer), [b / a for a, b in zip(mine, peer, strict=True)]


def record(script: str, figures: Iterable[Figure], *, keep: bool = True) -> bool:
    """Prints each row and, to ``keep`` it, appends it to docs/benchmarks/<script>.json, where other processes
    may have written meanwhile; true when every promise is met.
    """
    shared = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("edgellm", "torch", "transformers", "xllamacpp")},
    }
    met = True
    for figure in figures:
        met &= figure.met
        if keep:
            _append(RESULTS / f"{script}.json", asdict(figure) | shared)
        value = f"{figure.value:.4g}" if isinstance(figure.value, float) else str(figure.value)
        peer = f"  [{figure.peer}]" if figure.peer else ""
        print(
            f"{'met ' if figure.met else 'MISS'}  {figure.name}: "
            f"{value} {figure.unit}  ({figure.promise}){peer}",
            flush=True,
        )
    return met


def _append(path: Path, row: dict[str, Any]) -> None:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    if isinstance(row["value"], float) and not math.isfinite(row["value"]):
        row["value"] = str(row["value"])  # JSON has no such numbers
    temporary.write_text(json.dumps([*rows, row], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
