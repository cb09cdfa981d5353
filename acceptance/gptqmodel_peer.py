"""GPTQModel as a peer: layer errors of our plain GPTQ, its published recipe computed here, beside its own.

It is no dependency: install it in an environment of its own (``pip install gptqmodel optimum accelerate``).

EDGELLM_GPTQMODEL_PYTHON  the Python of that environment; with it ``quantize_quality`` has the cases
                          ``gptqmodel 4`` and ``gptqmodel 3`` too
EDGELLM_QUALITY_*         as in quantize_quality, whose folder and files this script shares
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acceptance.harness import ROOT, Figure

if TYPE_CHECKING:
    from acceptance.quantize_quality import Bench

PYTHON = "EDGELLM_GPTQMODEL_PYTHON"
LINEARS = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")
LAYER = 0
"""The first: behind it every tool has inputs of its own, and errors are no longer those of the rounding."""


def quantized_folder(bench: Bench, bits: int, *, first_layer: bool = False) -> tuple[Path, dict[str, Any]]:
    """GPTQModel's output for the bench's twin and calibration, made where it is missing, and what it said.

    ``first_layer`` leaves out all layers but the first, which comes out the same: minutes become seconds.
    """
    python = os.environ.get(PYTHON)
    out = bench.out(f"gptqmodel {bits}{' first layer' if first_layer else ''}")
    note = out.with_name(f"{out.name}.json")
    if not note.exists():
        if not python:
            raise SystemExit(f"{PYTHON} must name the Python of an environment with gptqmodel")
        dense = _dense_folder(bench)
        if first_layer:
            dense = _without_later_layers(dense, _first_layer_folder(bench))
        ids = bench.folder / f"calibration-{bench.tokens}.json"
        ids.write_text(json.dumps(_calibration(bench)), encoding="utf-8")
        command = [python, ROOT / "tools" / "quantize_with_gptqmodel.py"]
        command += [dense.absolute(), ids.absolute(), out.absolute(), "--bits", bits]
        # Where it runs it leaves a folder of logs.
        done = subprocess.run(
            list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, cwd=bench.folder
        )
        note.write_text(done.stdout.strip().splitlines()[-1], encoding="utf-8")
    return out, json.loads(note.read_text(encoding="utf-8"))


def _dense_folder(bench: Bench) -> Path:
    """The twin as a Hugging Face folder in f32."""
    from edgellm_quantize.api import quantize_model
    from edgellm_quantize.recipe import QuantizeJob, QuantizeRecipe

    dense = bench.folder / "twin-hf"
    if not dense.exists():
        quantize_model(QuantizeJob(bench.twin, dense, QuantizeRecipe(format="hf", dtype="f32")))
    return dense


def _first_layer_folder(bench: Bench) -> Path:
    return bench.folder / "twin-hf-first-layer"


def _without_later_layers(dense: Path, short: Path) -> Path:
    from safetensors import safe_open
    from safetensors.torch import save_file

    short.mkdir(exist_ok=True)
    for path in dense.iterdir():
        if path.suffix == ".json" or path.suffix == ".jinja":
            (short / path.name).write_bytes(path.read_bytes())
    (short / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    (short / "config.json").write_text(json.dumps(config), encoding="utf-8")
    kept = {}
    for path in sorted(dense.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no dictionary)
                if ".layers." not in name or ".layers.0." in name:
                    kept[name] = file.get_tensor(name)
    save_file(kept, short / "model.safetensors", {"format": "pt"})
    return short


def _calibration(bench: Bench) -> tuple[tuple[int, ...], ...]:
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.tokenizer import load_tokenizer
    from edgellm_quantize.calibration import calibration_tokens

    base = open_checkpoint(bench.twin)
    tokenizer = load_tokenizer(base.path, base.file_format, base.metadata)
    vocab = base.tensors()["token_embd.weight"].shape[0]
    tokens = calibration_tokens(bench.calibration(), tokenizer, vocab)
    base.close()
    assert tokens is not None
    return tokens.sequences


def layer_errors(bench: Bench, bits: int) -> tuple[dict[str, tuple[float, float]], str]:
    """tr(E H E^T) / tr(W H W^T) of the first layer's linears: plain GPTQ as computed here, and GPTQModel's;
    and its version.

    H is the same for both: the sum of x x^T of the twin's own inputs on the calibration.
    """
    from acceptance.quantize_quality import plain_gptq
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network.build import LayerLoader
    from edgellm_quantize.capture import STAGE_STEMS, STAGES, collect, open_stream
    from edgellm_quantize.folding import CheckpointTensors
    from edgellm_quantize.grids import dequantize
    from edgellm_quantize.layer_rounding import quantize_layer
    from edgellm_quantize.rounding import output_error

    folder, note = quantized_folder(bench, bits, first_layer=True)
    # The folder, not the GGUF file: there the rows of q and k lie in another order.
    base, peer = open_checkpoint(_first_layer_folder(bench)), open_checkpoint(folder)
    loader = LayerLoader(base)
    stream = open_stream(loader, _calibration(bench), 4096)
    ours = quantize_layer(base, loader, plain_gptq(base, bits), LAYER, stream.copy())
    weights, theirs = CheckpointTensors(base), CheckpointTensors(peer)
    found = {}
    for stage in STAGES:
        hessian = collect(stage, LAYER, stream, loader.layer(LAYER)).input.hessian
        for stem in STAGE_STEMS[stage]:
            if stem in LINEARS:
                name = f"blk.{LAYER}.{stem}.weight"
                weight = weights.matrix(name).float()
                mine = output_error(weight, dequantize(ours.outcomes[name].weight), hessian)
                found[stem] = (mine, output_error(weight, theirs.matrix(name).float(), hessian))
    peer.close()
    base.close()
    return found, note["peer"]


def run() -> Iterator[Figure]:
    from acceptance.quantize_quality import Bench, quality_folder

    tokens = int(os.environ.get("EDGELLM_QUALITY_TOKENS", "32768"))
    for model in os.environ.get("EDGELLM_QUALITY_MODELS", "smollm2-135m").split(","):
        bench = Bench(model, quality_folder() / model, tokens, 0)
        if PYTHON not in os.environ and not bench.out("gptqmodel 4 first layer").exists():
            print(f"left out: {PYTHON} does not say how to run GPTQModel", flush=True)
            return
        bench.prepare()
        errors, peer = layer_errors(bench, 4)
        for stem, (mine, theirs) in errors.items():
            yield Figure(
                f"{model}: layer error of plain GPTQ over GPTQModel's, 4 bits g64, layer {LAYER} {stem}",
                mine / theirs,
                "",
                "within 3%",
                abs(mine / theirs - 1) <= 0.03,
                peer,
                {"plain gptq": mine, "GPTQModel": theirs, "calibration_tokens": tokens},
            )
