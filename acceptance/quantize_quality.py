"""KL divergence of what the toolkit writes, and of its peers at the same bits, from dense twins in f32.

Windows of 512 tokens, the first 128 not scored, of prose, code and chat that calibration never saw; the same
calibration text for every case, llama-imatrix's included. Each case is kept when it is done, with the files
that it made, so a long run can be ended and taken up again:

Rows of docs/benchmarks/quantize_quality.json count as done too, whose commits say what they measured.

The prose is from the same book as the calibration's and the chat's answers too, though no passage is in both:
``by_kind`` of each row shows the code, which is other modules by other hands, apart.

EDGELLM_QUALITY_FOLDER    twins, outputs and cases.json (default: edgellm-quality in the system's temporary
                          folder; several GB)
EDGELLM_QUALITY_CASES     names of CASES, separated by commas (default: all; those of GPTQModel itself where
                          EDGELLM_GPTQMODEL_PYTHON says how to run it, see gptqmodel_peer)
EDGELLM_QUALITY_MODELS    smollm2-135m,gemma3-270m (default: both)
EDGELLM_QUALITY_TOKENS    calibration tokens (default: 32768)
EDGELLM_QUALITY_SCORED    scored tokens at least (default: 16384)
EDGELLM_QUALITY_AGAIN     1 measures the named cases anew
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acceptance import gptqmodel_peer
from acceptance.harness import RESULTS, Figure, commit
from acceptance.llama_cpp_tools import VERSION, tool
from acceptance.quality_text import calibration_text, prose_text
from acceptance.twin_loss import WINDOW, encoder, twin_loss
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.tokenizer import load_tokenizer
from edgellm_quantize.api import quantize_model
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.grids import IntegerGrid, dequantize
from edgellm_quantize.layer_rounding import CorePlan, uniform_grids
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe
from edgellm_quantize.rounding import RoundingOptions
from tests.support.dense_twin import write_twin_gguf
from tests.support.real_models import REAL_MODELS, real_model

PROMISES = (
    ("Q4_K_M", "llama Q4_K_M", 0.75),
    ("Q3_K_M", "llama Q3_K_M", 0.7),
    ("gptq 4", "rtn 4", 0.35),
    ("gptq 4", "plain gptq 4", 0.85),
    ("gptq 4", "gptqmodel 4", 0.85),
    ("gptq 3", "plain gptq 3", 0.7),
    ("gptq 3", "gptqmodel 3", 0.7),
    ("awq", "rtn 4 asymmetric", 0.5),
    ("awq", "awq identity", 0.95),
    ("target-bpw", "Q4_K_M", 0.95),
    ("self Q4_K_M", "prose Q4_K_M", 1.15),
    ("self Q4_K_M", "Q4_K_M", None),
)
"""(case, over case, at most). A model's own text is to be about as good as prose; how far it lies behind
text of the kinds that are scored is a figure without a promise."""


@dataclass
class Bench:
    """One model's twin, text and results."""

    model: str
    folder: Path
    tokens: int
    scored: int

    @property
    def twin(self) -> Path:
        return self.folder / "twin.gguf"

    @property
    def text(self) -> Path:
        return self.folder / f"calibration-{self.tokens}.txt"

    def prose(self) -> Path:
        """A file with nothing but prose, as many tokens."""
        path = self.folder / f"prose-{self.tokens}.txt"
        if not path.exists():
            with closing(open_checkpoint(self.twin)) as checkpoint:
                path.write_text(prose_text(encoder(checkpoint), self.tokens), encoding="utf-8")
        return path

    def out(self, case: str) -> Path:
        return self.folder / f"{case.replace(' ', '-')}-{self.tokens}"

    def calibration(self) -> CalibrationSpec:
        """All of the text, in windows as llama-imatrix cuts them."""
        return CalibrationSpec("file", self.text, samples=1_000_000, sequence_length=WINDOW)

    def prepare(self) -> None:
        """Make the twin and the text where they are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.twin.exists():
            partial = self.folder / ".twin.partial"
            write_twin_gguf(real_model(self.model), partial).replace(self.twin)
        if not self.text.exists():
            with closing(open_checkpoint(self.twin)) as checkpoint:
                self.text.write_text(calibration_text(encoder(checkpoint), self.tokens), encoding="utf-8")


Made = tuple[Callable[[], Checkpoint], dict[str, Any]]
"""What opens the model that came out, and what there is to say of it."""


def ours(**settings: Any) -> Callable[[Bench, str], Made]:
    """A file or folder by the front door of the toolkit."""

    def make(bench: Bench, case: str) -> Made:
        options = dict(settings)  # each model's own
        out = bench.out(case)
        spec = bench.calibration()
        generate = None
        if options.pop("own_text", False):
            from edgellm.cli.quantize import own_writing

            spec = CalibrationSpec("self", samples=-(-bench.tokens // WINDOW), sequence_length=WINDOW)
            generate = own_writing(bench.twin)
        if options.pop("prose", False):
            spec = replace(spec, path=bench.prose())
        if options.get("target_bpw") == "Q4_K_M":
            options["target_bpw"] = _bits(bench, "Q4_K_M")
        note = out.with_name(out.name + ".json")
        if not (out.exists() and note.exists()):
            begun = out.with_name(f"{out.name}.work") / "manifest.json"
            recipe = QuantizeRecipe(**options)
            job = QuantizeJob(bench.twin, out, recipe, spec, resume=begun.exists(), generate=generate)
            report = quantize_model(job)
            found = {"bpw": report.bits_per_weight, "bytes": report.nbytes, "seconds": report.seconds}
            note.write_text(json.dumps(found), encoding="utf-8")
        return lambda: open_checkpoint(out), json.loads(note.read_text(encoding="utf-8"))

    return make


def llama(type_name: str) -> Callable[[Bench, str], Made]:
    """llama-quantize with llama-imatrix of the same text."""

    def make(bench: Bench, case: str) -> Made:
        imatrix = bench.folder / f"imatrix-{bench.tokens}.gguf"
        threads = str(len(os.sched_getaffinity(0)))
        if not imatrix.exists():
            command = [tool("llama-imatrix"), "-m", bench.twin, "-f", bench.text, "-o", imatrix]
            command += ["-c", str(WINDOW), "-b", str(WINDOW), "--no-ppl", "-t", threads]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
        out = bench.out(case)
        began = time.perf_counter()
        command = [tool("llama-quantize"), "--imatrix", imatrix, bench.twin, out, type_name, threads]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        seconds = time.perf_counter() - began
        with closing(open_checkpoint(out)) as checkpoint:
            infos = checkpoint.tensors().values()
            weights = sum(math.prod(info.shape) for info in infos)
            stored = sum(tensor_nbytes(tuple(info.shape), info.type_name) for info in infos)
        detail = {
            "bpw": 8 * stored / weights,
            "bytes": out.stat().st_size,
            "seconds": seconds,
            "peer": VERSION,
        }
        return lambda: open_checkpoint(out), detail

    return make


def gptqmodel(bits: int) -> Callable[[Bench, str], Made]:
    """GPTQModel itself in an environment of its own, groups of 64 and its defaults."""

    def make(bench: Bench, case: str) -> Made:
        folder, note = gptqmodel_peer.quantized_folder(bench, bits)
        grid = IntegerGrid(bits, 64)
        return lambda: open_checkpoint(folder), {
            "bits of linears": grid.bits_per_weight(64 * 9),
            "seconds": note["seconds"],
            "settings": note["settings"],
            "peer": note["peer"],
        }

    return make


def plain_gptq(base: Checkpoint, bits: int, *, symmetric: bool = True) -> CorePlan:
    """GPTQ as it was published, on the usual grid, with columns ordered within groups."""
    grid = IntegerGrid(bits, 64, symmetric, min_zero=1 if symmetric else 0)
    return CorePlan(uniform_grids(base, grid), "gptq", RoundingOptions(candidates=0), 0.0)


def baseline(method: str, bits: int, symmetric: bool = True, *, usual: bool = True) -> Callable[..., Made]:
    """A published recipe computed here: the peers' grid, and GPTQ with columns ordered within groups.

    ``usual`` False keeps our own search, for the comparison with AWQ's identity.
    """

    def make(bench: Bench, case: str) -> Made:
        from edgellm_quantize.calibration import calibration_tokens
        from edgellm_quantize.job import run_core

        base = open_checkpoint(bench.twin)
        grid = IntegerGrid(bits, 64, symmetric, min_zero=1 if symmetric else 0)
        plan = replace(plain_gptq(base, bits, symmetric=symmetric), method=method)
        if not usual:
            plan = replace(plan, options=RoundingOptions(descent_passes=1), asymmetric_share=0.25)
        tokenizer = load_tokenizer(base.path, base.file_format, base.metadata)
        vocab = base.tensors()["token_embd.weight"].shape[0]
        tokens = None if method == "rtn" else calibration_tokens(bench.calibration(), tokenizer, vocab)
        overlay = OverlayCheckpoint(base)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=bench.folder) as work:
            result = run_core(base, plan, Path(work) / "core", tokens)
            seconds = time.perf_counter() - began
            for layer in result.layers():
                overlay.replaced |= layer.changed
                overlay.replaced |= {n: dequantize(o.weight) for n, o in layer.outcomes.items()}
        return lambda: overlay, {"bits of linears": grid.bits_per_weight(64 * 9), "seconds": seconds}

    return make


_INTEGERS: dict[str, Any] = {"format": "gptq", "group_size": 64}
CASES: dict[str, Callable[[Bench, str], Made]] = {
    "Q4_K_M": ours(type="Q4_K_M"),
    "llama Q4_K_M": llama("Q4_K_M"),
    "Q3_K_M": ours(type="Q3_K_M"),
    "llama Q3_K_M": llama("Q3_K_M"),
    "gptq 4": ours(**_INTEGERS, bits=4),
    "rtn 4": baseline("rtn", 4),
    "plain gptq 4": baseline("gptq", 4),
    "gptq 3": ours(**_INTEGERS, bits=3),
    "plain gptq 3": baseline("gptq", 3),
    "rtn 4 asymmetric": baseline("rtn", 4, symmetric=False),
    "awq identity": baseline("gptq", 4, symmetric=False, usual=False),
    "awq": ours(format="awq", group_size=64),
    "target-bpw": ours(target_bpw="Q4_K_M"),
    "self Q4_K_M": ours(own_text=True),
    "prose Q4_K_M": ours(prose=True),
    "gptqmodel 4": gptqmodel(4),
    "gptqmodel 3": gptqmodel(3),
}


def _bits(bench: Bench, case: str) -> float:
    note = bench.out(case).with_name(bench.out(case).name + ".json")
    if not note.exists():
        CASES[case](bench, case)
    return float(json.loads(note.read_text(encoding="utf-8"))["bpw"])


def _measure(bench: Bench, case: str) -> dict[str, Any]:
    opener, detail = CASES[case](bench, case)
    found = twin_loss(bench.twin, opener, bench.scored)
    return detail | found | {"calibration_tokens": bench.tokens, "measured_at": commit()}


def quality_folder() -> Path:
    """Where twins and outputs are kept."""
    named = os.environ.get("EDGELLM_QUALITY_FOLDER")
    return Path(named) if named else Path(tempfile.gettempdir()) / "edgellm-quality"


def recorded() -> dict[str, dict[str, Any]]:
    """What was measured before, by the figure's name; of several the last."""
    path = RESULTS / "quantize_quality.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {row["name"]: row["detail"] for row in rows if "kl" in row["detail"]}


def run() -> Iterator[Figure]:
    default = [case for case in CASES if gptqmodel_peer.PYTHON in os.environ or "gptqmodel" not in case]
    chosen = os.environ.get("EDGELLM_QUALITY_CASES", ",".join(default)).split(",")
    root = quality_folder()
    tokens = int(os.environ.get("EDGELLM_QUALITY_TOKENS", "32768"))
    scored = int(os.environ.get("EDGELLM_QUALITY_SCORED", "16384"))
    sizes = "" if (tokens, scored) == (32768, 16384) else f" ({tokens} calibration tokens, {scored} scored)"
    kept = recorded()
    for model in os.environ.get("EDGELLM_QUALITY_MODELS", ",".join(REAL_MODELS)).split(","):
        bench = Bench(model, root / model, tokens, scored)
        bench.prepare()
        store = bench.folder / "cases.json"
        done: dict[str, Any] = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
        again = os.environ.get("EDGELLM_QUALITY_AGAIN") == "1"
        for case in chosen:
            key = f"{case}, {tokens} tokens, {scored} scored"
            name = f"{model}: KL from the twin, {case}{sizes}"
            if key not in done and name in kept and not again:
                done[key] = kept[name]
            if key not in done or again:
                entry = _measure(bench, case)
                if store.exists():  # another process may have finished cases meanwhile
                    done |= json.loads(store.read_text(encoding="utf-8"))
                done[key] = entry
                partial = store.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(done, indent=1), encoding="utf-8")
                partial.replace(store)
            entry = done[key]
            size = f", {entry['bpw']:.3f} bits per weight" if "bpw" in entry else ""
            unit = f"nats ± {entry['standard_error']:.2g}{size}"
            yield Figure(name, entry["kl"], unit, "none", True, entry.get("peer", ""), entry)
        suffix = f", {tokens} tokens, {scored} scored"
        for mine, theirs, most in PROMISES:
            if mine in chosen and mine + suffix in done and theirs + suffix in done:
                ratio = done[mine + suffix]["kl"] / done[theirs + suffix]["kl"]
                name = f"{model}: KL of {mine} over {theirs}{sizes}"
                shared = {"calibration_tokens": tokens, "scored": done[mine + suffix]["scored"]}
                promise = "none" if most is None else f"at most {most}"
                yield Figure(name, ratio, "", promise, most is None or ratio <= most, detail=shared)
