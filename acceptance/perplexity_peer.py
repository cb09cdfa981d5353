"""Perplexity of the same F16 file beside llama-perplexity's: windows, counting and arithmetic agree."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from acceptance.harness import Figure
from acceptance.llama_cpp_tools import VERSION, perplexity, requantize
from tests.support.real_models import REAL_MODELS, real_model

CTX = 512
WINDOWS = int(os.environ.get("EDGELLM_TEST_PERPLEXITY_WINDOWS", "8"))
KINDS = ("prose", "code")
PROMISED = 0.001


def run() -> Iterator[Figure]:
    from edgellm.bench.natural_text import natural_text
    from edgellm.cli.evaluate_text import Evaluation, read_text, run_evaluation
    from edgellm.config import EngineConfig

    threads = len(os.sched_getaffinity(0))
    settings = EngineConfig(
        ctx=CTX, device="cpu", kernels="torch", activations="exact", kv_dtype="f32", threads=threads
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in REAL_MODELS:
            path = Path(folder) / f"{name}-f16.gguf"
            requantize(real_model(name), path, "F16", threads)
            for kind in KINDS:
                text = Path(folder) / f"{kind}.txt"
                text.write_text(natural_text(kind)[: 8 * CTX * (WINDOWS + 1)], encoding="utf-8")
                job = Evaluation(
                    read_text(str(text)), path, name, settings.resolve(environ={}), windows=WINDOWS
                )
                ours = run_evaluation(job, lambda notice: None).result
                theirs, error = perplexity(path, text, CTX, WINDOWS, threads)
                apart = abs(ours.perplexity / theirs - 1)
                yield Figure(
                    name=f"{name}: perplexity of the F16 file apart from llama-perplexity's, {kind}",
                    value=100 * apart,
                    unit="%",
                    promise=f"at most {100 * PROMISED:g} %",
                    met=apart <= PROMISED,
                    peer=f"{VERSION}: {theirs:.4f} +/- {error:.4f}; ours {ours.perplexity:.4f}",
                    detail={
                        "perplexity": ours.perplexity,
                        "stderr": ours.perplexity_stderr,
                        "tokens": ours.tokens,
                        "windows": ours.windows,
                        "ctx": CTX,
                        "peer_perplexity": theirs,
                        "peer_stderr": error,
                    },
                )
            path.unlink()
