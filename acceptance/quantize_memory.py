"""Peak memory of quantization: two blocks of an 8B shape in three formats, and growth over many blocks.

Each job runs in a process of its own, whose peak resident memory is what the system says. The weights are
random: memory does not depend on them.

The part ``limit`` allows what the estimate says of a job without its second stream. That is more than
such a job takes: the row shows that a job goes by its limit and that the estimate is kept, not how much less
would do. tests/cpu/test_quantize_memory.py has jobs that pass their limit where pages are not given back.

EDGELLM_MEMORY_SCALE   1 is the 8B shape (about 20 minutes a format on two cores); 4 is a fourth of each width
EDGELLM_MEMORY_LAYERS  blocks of the second measurement (default: 12)
EDGELLM_MEMORY_FORMATS gguf,gptq,awq (default: all)
EDGELLM_MEMORY_TOKENS  tokens of calibration (default: 8192); fewer make the residual streams smaller only
EDGELLM_MEMORY_PARTS   blocks,growth,limit (default: all)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from acceptance.harness import ROOT, Figure

LIMIT = 8 << 30
LENGTH = 512
FORMATS: dict[str, dict[str, Any]] = {
    "gguf": {"format": "gguf", "type": "Q4_K_M"},
    "gptq": {"format": "gptq", "group_size": 128},
    "awq": {"format": "awq", "group_size": 128},
}


def make_model(folder: Path, scale: int, layers: int, vocab: int) -> Path:
    """A llama of the 8B shape, narrower by ``scale``, in bf16; the head is the embedding."""
    from tests.support.tiny_models import make_tiny

    return make_tiny(
        "llama",
        folder,
        dtype="bf16",
        hidden_size=4096 // scale,
        intermediate_size=14336 // scale,
        num_attention_heads=32 // scale,
        num_key_value_heads=8 // scale,
        head_dim=128,
        vocab_size=vocab,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )


def calibration_tokens() -> int:
    return int(os.environ.get("EDGELLM_MEMORY_TOKENS", "8192"))


def in_child(
    source: Path, folder: Path, recipe: dict[str, Any], max_memory: int | None = None
) -> dict[str, Any]:
    """Quantize in another process; its peaks in bytes: in all, as each block began, behind the last."""
    words = Path(folder) / "text.txt"
    draw = random.Random(0)
    text = " ".join(
        draw.choice(("the keeper", "of light", "counted", "17 ships"))
        for _ in range(4 * calibration_tokens())
    )
    words.write_text(text, encoding="utf-8")
    out = folder / f"out-{recipe['format']}"
    job: dict[str, Any] = {"source": str(source), "out": str(out), "recipe": recipe, "text": str(words)}
    job["max_memory"] = max_memory
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "acceptance.quantize_memory", json.dumps(job)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the job failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(job: dict[str, Any]) -> None:
    from edgellm_quantize.api import quantize_model
    from edgellm_quantize.process_memory import peak_memory
    from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeProgress, QuantizeRecipe

    peaks: dict[str, int] = {}

    def on_progress(progress: QuantizeProgress) -> None:
        if progress.phase == "quantizing":
            peaks.setdefault(progress.detail, peak_memory())
        elif peaks:
            peaks.setdefault("written", peak_memory())

    report = quantize_model(
        QuantizeJob(
            Path(job["source"]),
            Path(job["out"]),
            QuantizeRecipe(**job["recipe"]),
            CalibrationSpec(
                "file", Path(job["text"]), samples=calibration_tokens() // LENGTH, sequence_length=LENGTH
            ),
            max_memory=job["max_memory"],
            on_progress=on_progress,
        )
    )
    peak = peak_memory()
    peaks.setdefault("written", peak)
    notices = sorted({notice.kind for notice in report.notices})
    found = {"peak": peak, "by_block": list(peaks.values()), "seconds": report.seconds, "notices": notices}
    found["calibration_tokens"] = report.calibration_tokens
    print(json.dumps(found))


def run() -> Iterator[Figure]:
    scale = int(os.environ.get("EDGELLM_MEMORY_SCALE", "1"))
    layers = int(os.environ.get("EDGELLM_MEMORY_LAYERS", "12"))
    formats = os.environ.get("EDGELLM_MEMORY_FORMATS", ",".join(FORMATS)).split(",")
    parts = os.environ.get("EDGELLM_MEMORY_PARTS", "blocks,growth,limit").split(",")
    tokens = calibration_tokens()
    sizes = "" if scale == 1 else f" (each width over {scale})"
    sizes += "" if tokens == 8192 else f" ({tokens} calibration tokens)"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "blocks" in parts:
            source = make_model(folder / "wide", scale, 2, 128_256 // scale)
            for form in formats:
                found = in_child(source, folder, FORMATS[form])
                yield Figure(
                    f"peak memory, two blocks of an 8B shape and its embedding to {form}{sizes}",
                    found["peak"] / 2**30,
                    "GiB",
                    "at most 8 GiB",
                    found["peak"] <= LIMIT,
                    detail=found,
                )
        if {"growth", "limit"} & set(parts):
            source = make_model(folder / "deep", 4, layers, 4096)
            for form in formats:
                yield from _many_blocks(source, folder, form, layers, "limit" in parts)


def _many_blocks(source: Path, folder: Path, form: str, layers: int, limit: bool) -> Iterator[Figure]:
    found = in_child(source, folder, FORMATS[form])
    third, last = found["by_block"][3], found["by_block"][layers]
    yield Figure(
        f"peak after block {layers} over that after block 3, {form}",
        last / third,
        "",
        "at most 1.1",
        last <= 1.1 * third,
        detail=found,
    )
    if not limit:
        return
    allowed = _enough_without_asymmetric_term(source, form)
    held = in_child(source, folder, FORMATS[form], allowed)
    yield Figure(
        f"peak over --max-memory of {allowed / 2**20:.0f} MiB, {form}",
        held["peak"] / allowed,
        "",
        "at most 1",
        held["peak"] <= allowed and "asymmetric_term_left_out" in held["notices"],
        f"without a limit {found['peak'] / 2**20:.0f} MiB",
        detail=held | {"max_memory": allowed},
    )


def _enough_without_asymmetric_term(source: Path, form: str) -> int:
    """Bytes under which a job of this form must do without its second stream."""
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network.build import LayerLoader
    from edgellm_quantize.calibrated_run import core_plan
    from edgellm_quantize.job import estimate_memory
    from edgellm_quantize.recipe import QuantizeRecipe

    checkpoint = open_checkpoint(source)
    plan = core_plan(QuantizeRecipe(**FORMATS[form]), {}, "awq" if form == "awq" else "gptq")
    spec = LayerLoader(checkpoint).spec
    checkpoint.close()
    return estimate_memory(spec, replace(plan, asymmetric_share=0.0), calibration_tokens(), 256, LENGTH)


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
