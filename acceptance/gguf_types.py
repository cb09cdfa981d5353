"""Every GGUF type of both real models and of seven small families, and whether llama.cpp runs it.

Files with error feedback, of a chosen size and with an importance matrix are among them: of the small
families made here, of the real models those of quantize_quality, where they were made.

EDGELLM_QUALITY_FOLDER  where quantize_quality keeps its files
EDGELLM_TYPES_MODELS    names, separated by commas (default: both real models and tinyq-FAMILY of all)
EDGELLM_TYPES           names, separated by commas (default: all)
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from acceptance.harness import Figure, version
from acceptance.quantize_quality import quality_folder
from edgellm_models.checkpoint import open_checkpoint
from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import GGUF_TYPES, CalibrationSpec, QuantizeJob, QuantizeRecipe
from tests.support.llama_cpp import LlamaCpp, LlamaCppError
from tests.support.real_models import REAL_MODELS, real_model
from tests.support.tiny_models import ARCHITECTURES, make_tiny

_CALIBRATED: dict[str, dict[str, Any]] = {
    "Q4_K_M calibrated": {"type": "Q4_K_M"},
    "Q3_K_M calibrated": {"type": "Q3_K_M"},
    "Q4_K_M by importance": {"type": "Q4_K_M", "method": "rtn"},
    "5.5 bits": {"target_bpw": 5.5},
}
_KEPT = ("Q4_K_M", "Q3_K_M", "target-bpw", "self Q4_K_M")
"""Cases of quantize_quality."""
_TEXT = "The moon is far away, and yet the tides follow it: twice a day the water comes and goes. "


def runs(path: Path) -> tuple[bool, str]:
    """Whether llama.cpp loads the file and writes eight tokens, and what it said where it did not."""
    try:
        with LlamaCpp(path, context=128) as judge:
            return len(judge.greedy(judge.tokenize("The capital of France is"), 8)) == 8, ""
    except LlamaCppError as error:
        return False, str(error)[-300:]


def figure(name: str, path: Path, detail: dict[str, Any]) -> Figure:
    ran, words = runs(path)
    promise = "llama.cpp loads it and generates"
    peer = f"xllamacpp {version('xllamacpp')}"
    bits = detail.get("bits", 0.0)
    return Figure(name, round(bits, 3), "bits per weight", promise, ran, peer, detail | {"said": words})


def made(source: Path, out: Path, name: str, recipe: QuantizeRecipe, text: Path | None = None) -> Figure:
    spec = CalibrationSpec() if text is None else CalibrationSpec("file", text, samples=8, sequence_length=64)
    began = time.perf_counter()
    report = quantize_model(QuantizeJob(source, out, recipe, spec))
    seconds = round(time.perf_counter() - began, 2)
    detail = {"bits": report.bits_per_weight, "bytes": report.nbytes, "seconds": seconds}
    return figure(name, out, detail | {"effort": recipe.effort})


def of_a_family(family: str, types: list[str], folder: Path) -> Iterator[Figure]:
    source = make_tiny(family, folder / "source", quantizable=True)
    text = folder / "text.txt"
    text.write_text(_TEXT * 200, encoding="utf-8")
    for type_name in types:
        recipe = QuantizeRecipe(type=type_name, effort="fast")
        yield made(source, folder / f"{type_name}.gguf", f"tinyq-{family} {type_name}", recipe)
    for words, options in _CALIBRATED.items():
        out = folder / f"{words.replace(' ', '-')}.gguf"
        yield made(source, out, f"tinyq-{family} {words}", QuantizeRecipe(**options), text)


def of_a_real_model(model: str, types: list[str], folder: Path) -> Iterator[Figure]:
    for type_name in types:
        out = folder / f"{type_name}.gguf"
        recipe = QuantizeRecipe(type=type_name, effort="fast")
        yield made(real_model(model), out, f"{model} {type_name}", recipe)
        out.unlink()
    for case in _KEPT:
        path = quality_folder() / model / f"{case.replace(' ', '-')}-32768"
        if not path.exists():
            print(f"left out: {model} {case}, which quantize_quality did not make here", flush=True)
            continue
        with closing(open_checkpoint(path)) as checkpoint:
            infos = checkpoint.tensors().values()
            weights = sum(info.shape[0] * (info.shape[1] if len(info.shape) > 1 else 1) for info in infos)
        detail = {"bits": 8 * path.stat().st_size / weights, "bytes": path.stat().st_size}
        link = folder / "kept.gguf"  # llama.cpp goes by the name
        link.symlink_to(path)
        yield figure(f"{model} {case}, calibrated", link, detail)
        link.unlink()


def run() -> Iterator[Figure]:
    default = ",".join([*REAL_MODELS, *(f"tinyq-{family}" for family in ARCHITECTURES)])
    types = os.environ.get("EDGELLM_TYPES", ",".join(GGUF_TYPES)).split(",")
    for model in os.environ.get("EDGELLM_TYPES_MODELS", default).split(","):
        with tempfile.TemporaryDirectory() as folder:
            one = of_a_real_model if model in REAL_MODELS else of_a_family
            yield from one(model.removeprefix("tinyq-"), types, Path(folder))
