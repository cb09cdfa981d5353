"""From the command to the first token, against the import of torch plus a second; and the peak memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.harness import ROOT, Figure, version
from tests.support.real_models import REAL_MODELS, real_model

PROMPT = "In the year 1815 a stranger walked into the town with a bag on his shoulder, and asked"
"""About 20 tokens of both models."""
RUNS = 5
BEYOND_TORCH_S = 1.0

IMPORT_TORCH = "import sys, torch; sys.stdout.write('x')"

# llama.cpp in a process of its own, as a command would be: load, one prompt, first token.
PEER = """
import json, resource, sys, time
start = time.monotonic()
import xllamacpp
imported = time.monotonic()
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 8192
params.n_parallel = 1
params.cpuparams.n_threads = int(sys.argv[3])
params.warmup = False
params.n_gpu_layers = 0
params.fit_params = False
params.verbosity = 0
server = xllamacpp.Server(params)
loaded = time.monotonic()
server.handle_completions({"prompt": sys.argv[2], "n_predict": 1, "temperature": 0})
end = time.monotonic()
print(json.dumps({"import_s": imported - start, "load_s": loaded - imported, "prefill_s": end - loaded,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
"""


def timed(command: list[str]) -> tuple[float, int, str]:
    """Seconds from the command to its first byte of output, peak bytes, and the output."""
    script = (
        "import os, resource, subprocess, sys, time\n"
        "start = time.monotonic()\n"
        "process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "first = process.stdout.read(1)\n"
        "seconds = time.monotonic() - start\n"
        "rest = process.stdout.read()\n"
        "assert process.wait() == 0\n"
        "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "sys.stdout.buffer.write(b'%f %d\\n' % (seconds, peak) + first + rest)\n"
    )
    roots = [str(ROOT / part) for part in ("", "kernels", "models", "quantize", "tui")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, env=environment, check=True
    )
    head, _, output = done.stdout.partition("\n")
    seconds, peak = head.split()
    return float(seconds), int(peak) * 1024, output


def run() -> Iterator[Figure]:
    for model in REAL_MODELS:
        yield from measure(model)


def measure(model: str) -> Iterator[Figure]:
    path = real_model(model)
    threads = len(os.sched_getaffinity(0))
    complete = [sys.executable, "-m", "edgellm", "complete", "-m", str(path), PROMPT, "--max-tokens", "16"]
    timed(complete)  # the file's pages are in memory from here on
    seconds, peaks, torch_s, parts, peer = [], [], [], [], []
    for _ in range(RUNS):
        torch_s.append(timed([sys.executable, "-c", IMPORT_TORCH])[0])
        first, peak, _ = timed(complete)
        seconds.append(first)
        peaks.append(peak)
        parts.append(json.loads(timed([*complete, "--json"])[2])["timings"])
        peer.append(_peer(path, threads))
    split = {
        name: statistics.median(part[name] for part in parts) for name in ("import_s", "load_s", "prefill_s")
    }
    theirs = statistics.median(p["import_s"] + p["load_s"] + p["prefill_s"] for p in peer)
    ours, limit = statistics.median(seconds), statistics.median(torch_s) + BEYOND_TORCH_S
    yield Figure(
        name=f"{model}: from the command to the first token",
        value=ours,
        unit="s, of which " + ", ".join(f"{name[:-2]} {value:.2f}" for name, value in split.items()),
        promise=f"at most the import of torch + {BEYOND_TORCH_S:.0f} s = {limit:.2f} s",
        met=ours <= limit,
        peer=f"xllamacpp {version('xllamacpp')}: {theirs:.2f} s",
        detail={"runs": seconds, "torch_runs": torch_s, "peer_runs": peer},
    )
    yield Figure(
        name=f"{model}: peak memory of edgellm complete",
        value=statistics.median(peaks) / 1e6,
        unit="MB",
        promise="none",
        met=True,
        peer=f"xllamacpp: {statistics.median(p['peak'] for p in peer) * 1024 / 1e6:.0f} MB",
        detail={"runs": peaks},
    )


def _peer(path: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-c", PEER, str(path), PROMPT, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
