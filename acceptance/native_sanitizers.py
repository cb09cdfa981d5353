"""The native library's tests with a library built for the address and undefined-behaviour sanitizers.

Run as ``python -m acceptance.native_sanitizers [--backend avx2 ...] [--no-record]``. The tests' tensors come
from malloc, each exactly as large as its shape says, so a byte read or written behind one ends the run. About
two minutes of processor time to compile and one for each back end; the compiler must have the sanitizers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from acceptance.harness import ROOT, Figure, record
from edgellm_kernels.native import build
from edgellm_kernels.native_library import BACKEND_VARIABLE, runnable_libraries
from edgellm_kernels.packed_memory import SWITCH

TESTS = (
    "native_attention",
    "native_linear",
    "native_grids",
    "native_pool",
    "step_program",
    "int_weights",
    "block_codecs",
)
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_FAULT = """
import torch
from edgellm_kernels.native_library import load_library
from edgellm_kernels.native_threads import pool
x, out, place = torch.zeros(1024), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
library = load_library()
library.call("edgellm_largest", pool(library), x.data_ptr(), 1, 1025, out.data_ptr(), place.data_ptr())
"""
"""Reads one float behind a tensor: a build that lets it pass proves nothing."""


def copy_with_sanitizers(folder: Path) -> Path:
    """A copy of the kernels' package in ``folder`` whose libraries are built with the sanitizers."""
    kernels = folder / "kernels"
    package = kernels / "edgellm_kernels"
    ignored = shutil.ignore_patterns("__pycache__", build.BUILT)
    shutil.copytree(ROOT / "kernels" / "edgellm_kernels", package, ignore=ignored)
    build.compile_libraries(package / "native" / build.BUILT, package / "native", extra=FLAGS)
    return kernels


def runtimes() -> str:
    """The sanitizers' libraries, which must be loaded before anything else of the interpreter."""
    compiler = build.find_compiler()
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*compiler, f"-print-file-name={name}"]
        found.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return ":".join(found)


def environment(kernels: Path, backend: str) -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(kernels), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        BACKEND_VARIABLE: backend,
        SWITCH: "0",  # weights by malloc too, each for itself
    }


def check(kernels: Path, backend: str) -> Figure:
    """One back end's tests, and that the sanitizers see what they are for."""
    around = environment(kernels, backend)
    fault = subprocess.run([sys.executable, "-c", _FAULT], env=around, capture_output=True, text=True)
    seen = "AddressSanitizer" in fault.stderr and fault.returncode != 0
    roots = f"pythonpath=. {kernels} models quantize tui"
    files = [f"tests/cpu/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", roots, *files]
    done = subprocess.run(command, env=around, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-4000:] + done.stderr[-4000:], file=sys.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout)
    return Figure(
        name=f"the native library's tests under sanitizers, {backend}",
        value=", ".join(counts) or "no test ran",
        unit="tests",
        promise="all clean, and a read behind a tensor is seen",
        met=done.returncode == 0 and seen,
        peer="" if seen else "NOT SEEN: a read behind a tensor",
    )


def measure(backends: Sequence[str]) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        kernels = copy_with_sanitizers(Path(folder))
        for backend in backends:
            yield check(kernels, backend)


def run() -> Iterator[Figure]:
    yield from measure(list(runnable_libraries()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = list(runnable_libraries())
    parser.add_argument("--backend", nargs="+", choices=known, default=known)
    parser.add_argument("--no-record", action="store_true", help="prints, writes nothing")
    chosen = parser.parse_args()
    figures = measure(chosen.backend)
    return 0 if record("native_sanitizers", figures, keep=not chosen.no_record) else 1


if __name__ == "__main__":
    sys.exit(main())
