"""Our GPTQ, AWQ and compressed-tensors folders in transformers: its logits beside those of our f32 model.

GPTQModel is no dependency: install it in an environment of its own (``pip install gptqmodel optimum
accelerate compressed-tensors``). Folders are made without calibration, and those of quantize_quality, where
they were made, are calibrated. transformers computes in f32, which shows what it reads, and in the type that
a folder declares; what that type alone costs is beside it: the same weights, decoded into a dense folder.

EDGELLM_GPTQMODEL_PYTHON  the Python of that environment; without it nothing is measured
EDGELLM_QUALITY_FOLDER    where twins and outputs are kept, see quantize_quality
EDGELLM_QUALITY_MODELS    smollm2-135m,gemma3-270m (default: both)
EDGELLM_FOLDER_OUTPUTS    of OUTPUTS, separated by commas (default: all)
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acceptance.gptqmodel_peer import PYTHON
from acceptance.harness import ROOT, Figure
from acceptance.output_formats import made
from acceptance.quantize_quality import Bench, quality_folder
from acceptance.twin_loss import encoder, output_head, run_layers
from edgellm.bench.natural_text import natural_text
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe
from tests.support.real_models import REAL_MODELS

OUTPUTS = {
    "GPTQ 4 bits": "gptq 4",
    "GPTQ 3 bits": "gptq 3",
    "AWQ 4 bits": "awq",
    "GPTQ 8 bits": None,
    "GPTQ 4 bits with zero points": None,
    "GPTQ 2 bits": None,
    "compressed-tensors 4 bits": None,
}
"""Output of output_formats, and the case of quantize_quality that is the same with a calibration."""
MOST = 0.05
_SEQUENCES, _LENGTH = 2, 64


def our_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[sequences, tokens, vocabulary] of the decoded weights, all in f32."""
    with closing(open_checkpoint(folder)) as checkpoint:
        loader = LayerLoader(checkpoint)
        hidden = run_layers(loader, sequences)
        return output_head(loader)(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def their_logits(
    folder: Path, sequences: Sequence[Sequence[int]], *options: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same by transformers, and what it ran."""
    with tempfile.TemporaryDirectory() as place:
        tokens, out = Path(place) / "tokens.json", Path(place) / "logits.npy"
        tokens.write_text(json.dumps([list(ids) for ids in sequences]), encoding="utf-8")
        script = ROOT / "tools" / "logits_with_transformers.py"
        command = [os.environ[PYTHON], script, folder, tokens, out, *options]
        done = subprocess.run(
            list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, cwd=place
        )
        return torch.from_numpy(np.load(out)), json.loads(done.stdout.strip().splitlines()[-1])


def dense_error(folder: Path, mine: torch.Tensor, sequences: Sequence[Sequence[int]], dtype: str) -> float:
    """Of the folder's weights without their packing, in transformers in the same type."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        out = Path(place) / "dense"
        recipe = QuantizeRecipe(format="hf", dtype="bf16" if "bfloat16" in dtype else "f16")
        quantize_model(QuantizeJob(folder, out, recipe, CalibrationSpec()))
        theirs, ran = their_logits(out, sequences)
    assert ran["dtype"] == dtype, ran
    return float((theirs - mine).norm() / mine.norm())


def figures(name: str, folder: Path, sequences: Sequence[Sequence[int]]) -> Iterator[Figure]:
    """In f32 and in the folder's own type."""
    mine = our_logits(folder, sequences)
    for options in (("--float32",), ()):
        theirs, ran = their_logits(folder, sequences, *options)
        error = float((theirs - mine).norm() / mine.norm())
        peer = ", ".join(f"{package} {version}" for package, version in ran["versions"].items())
        dtype = ran["dtype"].removeprefix("torch.")
        dense = {} if options else {"dense": dense_error(folder, mine, sequences, ran["dtype"])}
        unit = "relative" + "".join(f"; dense {value:.2g}" for value in dense.values())
        title = f"{name}, logits of transformers in {dtype} over those of our f32 model"
        yield Figure(title, error, unit, f"at most {MOST}", error <= MOST, peer, ran | dense)


def folders(bench: Bench, output: str, case: str | None) -> Iterator[tuple[str, Path]]:
    """How they were made, and where they are."""
    yield "without calibration", made(bench, output)[0]
    if case is not None and bench.out(case).exists():
        yield "calibrated", bench.out(case)


def run() -> Iterator[Figure]:
    if PYTHON not in os.environ:
        print(f"left out: {PYTHON} does not say how to run transformers with GPTQModel", flush=True)
        return
    for model in os.environ.get("EDGELLM_QUALITY_MODELS", ",".join(REAL_MODELS)).split(","):
        bench = Bench(model, quality_folder() / model, 32768, 0)
        bench.prepare()
        with closing(open_checkpoint(bench.twin)) as twin:
            ids = encoder(twin)(natural_text("prose"))
        sequences = [ids[i * _LENGTH : (i + 1) * _LENGTH] for i in range(_SEQUENCES)]
        for output in os.environ.get("EDGELLM_FOLDER_OUTPUTS", ",".join(OUTPUTS)).split(","):
            for how, folder in folders(bench, output, OUTPUTS[output]):
                yield from figures(f"{model}: {output} {how}", folder, sequences)
