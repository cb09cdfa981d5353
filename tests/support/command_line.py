"""Runs the real ``edgellm`` command in a process of its own, from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT, ROOT / "kernels", ROOT / "models", ROOT / "quantize", ROOT / "tui")


def command_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command: this one, with the source tree first on the path."""
    paths = [str(path) for path in SOURCE_ROOTS]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(extra or {})}


def run_edgellm(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    stdin: str = "",
    folder: Path | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line to its end, with no terminal."""
    return subprocess.run(
        [sys.executable, "-m", "edgellm", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=command_environment(environ),
        cwd=folder,
        timeout=timeout_s,
        check=False,
    )
