"""The GPU tests in Triton's interpreter, in processes of their own: it is on before Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.oracles import require_oracle

require_oracle("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "fewest"),
    [
        ("linear", 20),
        ("int_gemv", 25),
        ("fused", 10),
        ("attention", 10),
        ("decoder", 1),
        ("decode_graphs", 1),
        ("sampling", 6),
    ],
)
def test_in_the_interpreter(name: str, fewest: int) -> None:
    """Every test runs and passes; none is skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/gpu/test_{name}_triton.py",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "-p", "no:xdist"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) >= fewest and "skipped" not in done.stdout, done.stdout[-500:]
