"""What an engine costs that waits: processor time of ``edgellm serve`` with nothing to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import ROOT, Figure
from tests.support.real_models import real_model

MODEL = "smollm2-135m"
SECONDS = 20.0
PROMISED = 0.01


def processor_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run() -> Iterator[Figure]:
    roots = [str(ROOT / part) for part in ("", "kernels", "models", "quantize", "tui")]
    server = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "serve", str(real_model(MODEL)), "--port", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        address = ready.get("url") or ready["address"]
        body = json.dumps({"model": MODEL, "prompt": "One, two, three,", "max_tokens": 32}).encode()
        request = urllib.request.Request(
            address.rstrip("/").removesuffix("/v1") + "/v1/completions",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).read()  # the threads have worked once
        time.sleep(25)  # layer skip is calibrated once per model and machine, when nobody asks for 3 s
        begin, before = time.monotonic(), processor_seconds(server.pid)
        time.sleep(SECONDS)
        share = (processor_seconds(server.pid) - before) / (time.monotonic() - begin)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    yield Figure(
        name=f"{MODEL}: processor time of an idle server that has answered once",
        value=100 * share,
        unit="% of a core",
        promise=f"under {100 * PROMISED:g} %",
        met=share < PROMISED,
        detail={"seconds": SECONDS},
    )
