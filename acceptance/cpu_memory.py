"""Peak resident memory on the native kernels, file pages included, against llama.cpp's at one context."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import ROOT, Figure, version
from acceptance.llama_cpp_server import LlamaCppServer
from tests.support.real_models import REAL_MODELS, real_model

CONTEXT = 4096
PROMPT = 512
NEW = 32
KV = "f16"
PROMISED = 1.15

# In a process each: the peak of the one would hide that of the other.
IMPORT = """
import resource, torch
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
OURS = """
import json, resource, sys
from pathlib import Path
from edgellm.bench.workload import run_together
from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
path, context, new = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kv, ids = sys.argv[4], json.loads(sys.argv[5])
settings = EngineConfig(kernels="native", device="cpu", ctx=context, kv_dtype=kv)
runtime = load_runtime(settings.resolve(environ={}), path, "m")
run_together(runtime.core, [ids], new)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(script: str, *arguments: str) -> int:
    """Bytes that a process of its own has resident at most."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return int(done.stdout.split()[-1]) * 1024


def prompt(path: Path) -> list[int]:
    from edgellm.bench.natural_text import natural_ids
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
    ids = natural_ids(lambda text: tokenizer.encode(text, add_special=False), "prose", PROMPT, 1)
    return list(ids)


def run() -> Iterator[Figure]:
    torch_bytes = peak(IMPORT)
    for model in REAL_MODELS:
        path = real_model(model)
        ids = prompt(path)
        ours = peak(OURS, str(path), str(CONTEXT), str(NEW), KV, json.dumps(ids))
        with LlamaCppServer(path, context=CONTEXT, threads=1, kv_type=KV) as peer:
            peer.run([ids], NEW)
            theirs = peer.peak_bytes
        limit = PROMISED * theirs + torch_bytes
        yield Figure(
            name=f"{model}: peak resident memory, context {CONTEXT}, {KV} KV",
            value=ours / 1e6,
            unit="MB",
            promise=f"at most {PROMISED} times llama.cpp's + import of torch = {limit / 1e6:.0f} MB",
            met=ours <= limit,
            peer=f"xllamacpp {version('xllamacpp')}: {theirs / 1e6:.0f} MB; torch {torch_bytes / 1e6:.0f} MB",
            detail={"ours": ours, "theirs": theirs, "torch": torch_bytes},
        )
