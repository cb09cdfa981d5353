"""The native library's contract calls under the address and undefined-behaviour sanitizers.

The whole, which is the library's tests of all back ends, is ``python -m acceptance native_sanitizers``.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import tempfile
from pathlib import Path

from edgellm_kernels.native import build

PROGRAMS = Path(__file__).resolve().parents[1] / "native"
PARTS = (
    "activations",
    "api_attention",
    "api_core",
    "api_linear",
    "api_step",
    "attention",
    "gate",
    "kv_pages",
    "linear",
    "linear_exact",
    "linear_integer",
    "pack",
    "rows",
    "step",
    "thread_pool",
)
FLAGS = (
    "-std=c++17",
    "-O0",  # every read and write as it stands in the source, and a third of the compiler's time
    "-ffp-contract=off",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


def test_contract_calls_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """Every format and KV type, odd shapes, 1 and 3 threads, buffers exactly as large as promised."""
    compiler = build.find_compiler()
    flags = [*FLAGS, *build.backends().get("avx2", ()), f"-I{build.SOURCES}"]
    programs = sorted(PROGRAMS.glob("*_contract.cpp"))
    sources = [*(build.SOURCES / f"{part}.cpp" for part in PARTS), *programs]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: build._object(compiler, flags, source, tmp_path), sources))
    shared = [str(path) for path in objects[: len(PARTS)]]
    environment = {"PATH": os.environ["PATH"], "TMPDIR": tempfile.gettempdir()}
    for source, made in zip(programs, objects[len(PARTS) :], strict=True):
        program = tmp_path / source.stem
        link = [*compiler, *flags, "-pthread", *shared, str(made), "-o", str(program)]
        subprocess.run(link, check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
