"""How true the native kernels' default mode is to the file, against llama.cpp's rounding of activations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from acceptance.cpu_speed import rows_batch
from acceptance.harness import ROOT, Figure
from acceptance.llama_cpp_tools import VERSION, requantize, tool
from edgellm.bench.natural_text import natural_text
from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_type
from edgellm.runner.choose_program import choose_program
from edgellm.runner.step_program import StepProgram
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.tokenizer import load_tokenizer
from tests.support.real_models import REAL_MODELS, real_model

CTX = 512
WINDOWS = 8
"""Of CTX tokens each: 4,096 in all. The second half of each is scored, as llama-perplexity does."""
PROMISED = 0.02
QUESTION = "What is the capital of France?"


def programs(path: Path) -> tuple[StepProgram, StepProgram]:
    """The model with the default activations and with exact ones."""
    made = []
    for activations in ("auto", "exact"):
        decoder = build_decoder(open_checkpoint(path), kernels="native", activations=activations)
        kv = allocate_storage(
            decoder.spec, [CTX // BLOCK_SIZE + 1] * len(decoder.spec.kv_groups), kv_type("f32")
        )
        program = choose_program(decoder, kv)
        assert isinstance(program, StepProgram)
        made.append(program)
    return made[0], made[1]


def mean_divergence(path: Path, text: str) -> float:
    """Mean KL divergence of the default mode against exact f32, in nats, f32 KV on both sides."""
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
    ids = torch.tensor(tokenizer.encode(text, add_special=False)[: CTX * WINDOWS])
    assert len(ids) == CTX * WINDOWS, f"the text has only {len(ids)} tokens"
    rounded, exact = programs(path)
    first = tokenizer.bos_id if tokenizer.bos_id is not None else int(ids[0])
    total, rows = 0.0, 0
    with torch.inference_mode():
        for window in ids.view(WINDOWS, CTX):
            window[0] = first
            kept: list[torch.Tensor] = []
            for program in (exact, rounded):
                spec = program.decoder.spec
                kv = allocate_storage(spec, [CTX // BLOCK_SIZE + 1] * len(spec.kv_groups), kv_type("f32"))
                batch = replace(
                    rows_batch(len(kv), CTX, 0, BLOCK_SIZE),
                    token_ids=window.contiguous(),
                    logit_rows=torch.arange(CTX // 2, CTX),
                )
                kept.append(program.forward(batch, kv))
            for reference, ours in zip(kept[0].split(32), kept[1].split(32), strict=True):
                p, q = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
                total += (p.exp() * (p - q)).sum().item()
                rows += len(p)
    return total / rows


def peer_divergence(path: Path, text: Path, folder: Path, threads: int) -> float:
    """llama.cpp's mean KL divergence of the file against its own F16 conversion of it."""
    dense, base = folder / "dense.gguf", folder / "base.kld"
    requantize(path, dense, "F16", threads)
    common = ["-f", str(text), "-c", str(CTX), "-b", str(CTX), "-t", str(threads), "--chunks", str(WINDOWS)]
    perplexity = tool("llama-perplexity")
    for command in (
        [perplexity, "-m", str(dense), *common, "--kl-divergence-base", str(base)],
        [perplexity, "-m", str(path), *common, "--kl-divergence-base", str(base), "--kl-divergence"],
    ):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Mean\s+KLD:\s+([-\d.e]+)", done.stdout + done.stderr)
    if found is None:
        sys.exit(f"llama-perplexity said no mean KLD of {path}")
    dense.unlink()
    base.unlink()
    return float(found[1])


def answer() -> str:
    """What ``edgellm chat`` says to the question."""
    roots = [str(ROOT / part) for part in ("", "kernels", "models", "quantize", "tui")]
    command = [sys.executable, "-m", "edgellm", "chat", "-m", str(real_model("smollm2-135m")), "--temp", "0"]
    done = subprocess.run(
        [*command, "--max-tokens", "24", "--no-save", "-p", QUESTION],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
    )  # fmt: skip
    return done.stdout.strip()


def run() -> Iterator[Figure]:
    said = answer()
    yield Figure(
        name=f"smollm2-135m, greedy, default kernels: {QUESTION}",
        value=said.splitlines()[0] if said else "",
        unit="",
        promise="Paris",
        met="Paris" in said,
    )
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "prose.txt"
        text.write_text(natural_text("prose")[: 8 * CTX * (WINDOWS + 1)], encoding="utf-8")
        for model in REAL_MODELS:
            path = real_model(model)
            ours = mean_divergence(path, text.read_text(encoding="utf-8"))
            theirs = peer_divergence(path, text, folder, threads)
            yield Figure(
                name=f"{model}: mean KL divergence from exact f32, of llama.cpp's from its F16",
                value=ours / theirs,
                unit="times",
                promise=f"at most {PROMISED}",
                met=ours <= PROMISED * theirs,
                peer=f"{VERSION}: {theirs:.2e}; edgellm: {ours:.2e}",
                detail={"ours": ours, "theirs": theirs, "tokens": CTX * WINDOWS},
            )
