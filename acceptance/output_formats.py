"""Every output of ``edgellm quantize`` for both real models: bits, bytes, loss without calibration, speed.

The source of the losses is the dense twin, whose weights do not lie on the grids of the catalog's files; the
files of the speeds are the same. Speeds are those of this machine, medians of turns that go through all
outputs: what counts is one output beside another.

EDGELLM_QUALITY_FOLDER    where twins and outputs are kept, see quantize_quality
EDGELLM_OUTPUT_PARTS      size,loss,speed (default: all; speed wants a quiet machine)
EDGELLM_OUTPUT_MODELS     smollm2-135m,gemma3-270m (default: both)
EDGELLM_OUTPUT_SCORED     tokens scored at least (default: 4096)
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.cpu_speed import Ours
from acceptance.engines import tokens
from acceptance.harness import RESULTS, Figure, commit
from acceptance.quantize_quality import Bench, quality_folder
from acceptance.twin_loss import twin_loss
from edgellm_models.checkpoint import open_checkpoint
from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe
from tests.support.real_models import REAL_MODELS

_GROUPS: dict[str, Any] = {"group_size": 64}
_TYPES = (
    "Q2_K_S", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1",
    "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16", "F32",
)  # fmt: skip
OUTPUTS: dict[str, dict[str, Any]] = {
    **{f"GGUF {kind}": {"type": kind} for kind in _TYPES},
    "GPTQ 2 bits": {"format": "gptq", "bits": 2, **_GROUPS},
    "GPTQ 3 bits": {"format": "gptq", "bits": 3, **_GROUPS},
    "GPTQ 4 bits": {"format": "gptq", "bits": 4, **_GROUPS},
    "GPTQ 4 bits with zero points": {"format": "gptq", "bits": 4, "symmetric": False, **_GROUPS},
    "GPTQ 8 bits": {"format": "gptq", "bits": 8, **_GROUPS},
    "AWQ 4 bits": {"format": "awq", "symmetric": False, "method": "rtn", **_GROUPS},
    "compressed-tensors 4 bits": {"format": "compressed-tensors", **_GROUPS},
    "Hugging Face bf16": {"format": "hf"},
}
_SCORED = 4096
_TURNS = 3
_PROMPT, _NEW = 32, 48


def made(bench: Bench, output: str) -> tuple[Path, dict[str, Any]]:
    """The file or folder, and what its report says."""
    out = bench.folder / "outputs" / output.replace(" ", "-")
    out.parent.mkdir(exist_ok=True)
    note = out.with_name(f"{out.name}.json")
    if not (out.exists() and note.exists()):
        job = QuantizeJob(bench.twin, out, QuantizeRecipe(**OUTPUTS[output]), CalibrationSpec())
        report = quantize_model(job)
        found = {"bpw": report.bits_per_weight, "bytes": report.nbytes, "seconds": report.seconds}
        note.write_text(json.dumps(found), encoding="utf-8")
    return out, json.loads(note.read_text(encoding="utf-8"))


def sizes(bench: Bench) -> Iterator[Figure]:
    """What a dry run says; it writes nothing."""
    for output, options in OUTPUTS.items():
        out = bench.folder / "outputs" / f"{output.replace(' ', '-')}.planned"
        job = QuantizeJob(bench.twin, out, QuantizeRecipe(**options), CalibrationSpec(), dry_run=True)
        report = quantize_model(job)
        detail = {"bpw": report.bits_per_weight, "bytes": report.nbytes}
        unit = "bits per weight, by a dry run"
        yield Figure(
            f"{bench.model}: {output}, size", report.bits_per_weight, unit, "none", True, detail=detail
        )


def losses(bench: Bench, known: set[str]) -> Iterator[Figure]:
    suffix = "" if bench.scored == _SCORED else f" ({bench.scored} scored)"
    for output in OUTPUTS:
        name = f"{bench.model}: {output}, loss without calibration{suffix}"
        if name in known:
            continue
        out, detail = made(bench, output)
        detail |= twin_loss(bench.twin, lambda out=out: open_checkpoint(out), bench.scored)  # type: ignore[misc]
        detail |= {"measured_at": commit()}
        unit = f"nats ± {detail['standard_error']:.2g}, {detail['bpw']:.3f} bits per weight"
        yield Figure(name, detail["kl"], unit, "none", True, detail=detail)


def speeds(bench: Bench) -> Iterator[Figure]:
    """Tokens per second of one answer, all outputs in turn so that noise meets all."""
    taken: dict[str, list[float]] = {output: [] for output in OUTPUTS}
    for turn in range(_TURNS):
        for output in OUTPUTS:
            engine = Ours(made(bench, output)[0], 256, 2)
            for answer in range(3):
                prompt = tokens(engine.runtime, _PROMPT, (3 * turn + answer) * _PROMPT)
                seconds = engine.run([prompt], _NEW).decode_s
                if answer:  # the first one warms up
                    taken[output].append(seconds)
            engine.runtime.close()
    usual = statistics.median(taken["GGUF Q4_K_M"])
    for output, seconds_of in taken.items():
        seconds = statistics.median(seconds_of)
        detail = {"tokens_per_second": (_NEW - 1) / seconds, "over_Q4_K_M": usual / seconds}
        name = f"{bench.model}: {output}, decoding"
        unit = f"tokens per second, {usual / seconds:.2f} of Q4_K_M's"
        yield Figure(name, (_NEW - 1) / seconds, unit, "none", True, detail=detail)


def _known() -> set[str]:
    path = RESULTS / "output_formats.json"
    return {row["name"] for row in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else set()


def run() -> Iterator[Figure]:
    parts = os.environ.get("EDGELLM_OUTPUT_PARTS", "size,loss,speed").split(",")
    scored = int(os.environ.get("EDGELLM_OUTPUT_SCORED", _SCORED))
    for model in os.environ.get("EDGELLM_OUTPUT_MODELS", ",".join(REAL_MODELS)).split(","):
        bench = Bench(model, quality_folder() / model, 32768, scored)
        bench.prepare()
        if "size" in parts:
            yield from sizes(bench)
        if "loss" in parts:
            yield from losses(bench, _known())
        if "speed" in parts:
            yield from speeds(bench)
