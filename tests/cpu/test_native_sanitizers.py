"""The native linears' contract calls under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import tempfile
from pathlib import Path

from edgellm_kernels.native import build

PROGRAM = Path(__file__).resolve().parents[1] / "native" / "linear_contract.cpp"
PARTS = ("api_core", "api_linear", "activations", "gate", "linear", "linear_exact", "linear_integer", "pack")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


def test_linears_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """Every format, odd numbers of rows, columns and threads, every buffer exactly as large as promised."""
    compiler = build.find_compiler()
    flags = [*FLAGS, *build.backends().get("avx2", ()), f"-I{build.SOURCES}"]
    sources = [build.SOURCES / f"{part}.cpp" for part in (*PARTS, "thread_pool")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(
            pool.map(lambda source: build._object(compiler, flags, source, tmp_path), [*sources, PROGRAM])
        )
    program = tmp_path / "linear_contract"
    subprocess.run([*compiler, *flags, "-pthread", *map(str, objects), "-o", str(program)], check=True)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
