"""Peak workspace of a prefill of 8,192 tokens against one of 4,096: attention memory is linear."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from acceptance.harness import ROOT, Figure

MODEL = "smollm2-135m"

# In a process each: the peak of the one would hide that of the other. Everything runs in one forward pass.
MEASURE = """
import resource, sys
from acceptance.engines import load, tokens, ttft_of
count = int(sys.argv[1])
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from tests.support.real_models import real_model
resolved = EngineConfig(kernels="torch", kv_dtype="f32", device="cpu", ctx=8192).resolve(environ={})
runtime = load_runtime(resolved, real_model(sys.argv[2]), "m", prefill_chunk=8192)
pages = runtime.runner._kv.storages
for group in pages:
    for part in group.pages():
        part.zero_()  # so that the cache itself is no part of what grows
ttft_of(runtime, tokens(runtime, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ttft_of(runtime, tokens(runtime, count, 100))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def grown(count: int) -> int:
    """Bytes by which the peak memory of a process grows with a prefill of ``count`` tokens."""
    command = [sys.executable, "-c", MEASURE, str(count), MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.split()[-1]) * 1024


def run() -> Iterator[Figure]:
    half, whole = grown(4096 - 64), grown(8192 - 64)
    yield Figure(
        name=f"{MODEL}: workspace of a prefill of 8,128 tokens in one pass",
        value=whole / half,
        unit=f"times that of 4,032 ({whole / 1e6:.0f} MB, {half / 1e6:.0f} MB)",
        promise="at most 2.2",
        met=whole <= 2.2 * half,
        detail={"bytes": [half, whole]},
    )
