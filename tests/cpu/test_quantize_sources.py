"""Sources that are damaged, hold more than their model uses or are quantized already: what is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, OutputError
from edgellm_models.network import build
from edgellm_quantize.api import quantize_model
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe, QuantizeReport
from tests.support.packed_folders import awq_tensors, compressed_tensors, gptq_tensors, pack_folder
from tests.support.tiny_models import make_tiny, tiny_gguf
from tests.support.tiny_text import TRAINING_TEXT

FORMS: dict[str, dict[str, Any]] = {
    "gguf": {"format": "gguf", "type": "Q4_0"},
    "dense gguf": {"format": "gguf", "type": "F16"},
    "gptq": {"format": "gptq", "group_size": 32},
    "awq": {"format": "awq", "group_size": 32},
    "compressed": {"format": "compressed-tensors", "group_size": 32},
    "hf": {"format": "hf", "dtype": "f32"},
}
CALIBRATED = ("gguf", "gptq", "awq")
ROUNDED = ("gguf", "gptq", "awq", "compressed")
JOBS = [(form, False) for form in FORMS] + [(form, True) for form in CALIBRATED]
Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def tiny(folder: Path, arch: str = "llama", **overrides: Any) -> Path:
    return make_tiny(arch, folder, **({"num_hidden_layers": 1} | overrides))


def change(folder: Path, changed: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def configure(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def quantize(
    source: Path,
    out: Path,
    form: str,
    *,
    calibrated: bool = False,
    dry_run: bool = False,
    text_name: str = "calibration.txt",
    **recipe: Any,
) -> QuantizeReport:
    calibration = CalibrationSpec()
    if calibrated:
        text = out.with_name(text_name)
        text.write_text(TRAINING_TEXT)
        calibration = CalibrationSpec(source="file", path=text, samples=4, sequence_length=64)
    settings = QuantizeRecipe(effort="fast", **(FORMS[form] | recipe))
    return quantize_model(QuantizeJob(source, out, settings, calibration, dry_run=dry_run))


def refused(source: Path, folder: Path, words: str) -> None:
    """Every kind of job says so, and none leaves anything."""
    folder.mkdir()
    for form, calibrated in JOBS:
        for dry_run in (True, False):
            with pytest.raises(BadInputError, match=words):
                quantize(source, folder / "out", form, calibrated=calibrated, dry_run=dry_run)
    assert {path.name for path in folder.iterdir()} <= {"calibration.txt"}


def loads(out: Path) -> build.LayerLoader:
    """All that was written is what the model asks for."""
    checkpoint = open_checkpoint(out)
    loader = build.LayerLoader(checkpoint)
    assert loader.used == set(checkpoint.tensors())
    return loader


def kinds(report: QuantizeReport) -> list[str]:
    return [notice.kind for notice in report.notices]


def _cut(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:, :50]


def _transpose(tensors: Tensors) -> None:
    tensors[UP_PROJ] = tensors[UP_PROJ].T


def _lengthen(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(96)


def _widen(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = torch.ones(tensors["model.embed_tokens.weight"].shape[0], 96)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"attn_q.* \[64, 50\], but the model's sizes ask for \[64, 64\]"),
        (_transpose, r"ffn_up.* \[64, 128\], but the model's sizes ask for \[128, 64\]"),
        (_lengthen, r"output_norm.* \[96\], but the model's sizes ask for \[64\]"),
        (_widen, r"token_embd.* 96\], but the model's sizes ask for"),
    ],
)
def test_wrong_shapes_are_refused_by_every_job(damage: Any, words: str, tmp_path: Path) -> None:
    refused(change(tiny(tmp_path / "source"), damage), tmp_path / "outs", words)


def test_wrong_shapes_of_a_gguf_are_refused_by_every_job(tmp_path: Path) -> None:
    source = tiny_gguf(tiny(tmp_path / "m", num_key_value_heads=2), tmp_path / "m.gguf")
    data = source.read_bytes()
    key = b"llama.attention.head_count_kv"
    assert data.count(key) == 1
    at = data.index(key) + len(key) + 4  # behind the name lie four bytes of its type
    assert data[at : at + 4] == bytes((2, 0, 0, 0))
    source.write_bytes(data[:at] + bytes((4, 0, 0, 0)) + data[at + 4 :])
    refused(source, tmp_path / "outs", r"m\.gguf: tensor blk\.0\.attn_k.* \[32, 64\].* ask for \[64, 64\]")


def test_a_missing_head_is_refused_by_every_job(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", tie_word_embeddings=False, head="absent")
    refused(source, tmp_path / "outs", r"lm_head\.weight.* is missing")


@pytest.mark.parametrize(("form", "calibrated"), JOBS)
def test_a_tied_head_that_is_left_out_is_told(form: str, calibrated: bool, tmp_path: Path) -> None:

    def differ(tensors: Tensors) -> None:
        tensors["lm_head.weight"].neg_()

    source = change(tiny(tmp_path / "source", tie_word_embeddings=True, head="present"), differ)
    for dry_run in (True, False):
        report = quantize(source, tmp_path / "out", form, calibrated=calibrated, dry_run=dry_run)
        assert kinds(report).count("tied_head_dropped") == 1
    assert loads(tmp_path / "out").spec.tied_embeddings


@pytest.mark.parametrize(("form", "calibrated"), JOBS)
def test_what_the_model_does_not_use_is_left_out_and_told(
    form: str, calibrated: bool, tmp_path: Path
) -> None:
    """A layer more than config.json has, a bias of the head, a name of another family."""

    def extend(tensors: Tensors) -> None:
        tensors["lm_head.bias"] = torch.ones(len(tensors["lm_head.weight"]))
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)

    source = configure(tiny(tmp_path / "source", num_hidden_layers=2), num_hidden_layers=1)
    change(source, extend)
    for dry_run in (True, False):
        report = quantize(source, tmp_path / "out", form, calibrated=calibrated, dry_run=dry_run)
        assert not [tensor for tensor in report.tensors if tensor.name.startswith("blk.1.")]
        told = " ".join(n.detail for n in report.notices if n.kind == "unknown_tensors")
        assert (
            "lm_head.bias" in told and "q_norm" in told and "10 tensors" in told and "with 1 layer " in told
        )
    assert loads(tmp_path / "out").spec.num_layers == 1


@pytest.mark.parametrize("form", FORMS)
def test_what_the_model_of_a_gguf_does_not_use_is_left_out_and_told(form: str, tmp_path: Path) -> None:
    source = tiny_gguf(tiny(tmp_path / "m", num_hidden_layers=2), tmp_path / "m.gguf")
    data = source.read_bytes()
    key = b"llama.block_count"
    at = data.index(key) + len(key) + 4
    assert data[at : at + 4] == bytes((2, 0, 0, 0))
    source.write_bytes(data[:at] + bytes((1, 0, 0, 0)) + data[at + 4 :])
    report = quantize(source, tmp_path / "out", form)
    assert "blk.1.attn_norm.weight" in next(n.detail for n in report.notices if n.kind == "unknown_tensors")
    assert loads(tmp_path / "out").spec.num_layers == 1


def packed_source(method: str, folder: Path) -> dict[str, np.ndarray]:
    """A folder of packed linears; the f32 values that they stand for, by Hugging Face name."""
    tiny(folder, quantizable=True)
    if method == "gptq":
        section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
        make = partial(gptq_tensors, bits=4, version=1)
        return pack_folder(folder, section, make, bits=4, group=32, asym=False, shuffled=True)
    if method == "awq":
        section = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
        return pack_folder(folder, section, awq_tensors, bits=4, group=32, asym=True)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    make = partial(compressed_tensors, bits=8, asym=False)
    return pack_folder(folder, section, make, bits=8, group=32, asym=False)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + d/2 of each head side by side, as a llama of GGUF has them."""
    half = len(values) // heads // 2
    order = [
        head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)
    ]
    return values[order]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
def test_gguf_files_from_packed_folders(method: str, tmp_path: Path) -> None:
    """Floats hold the published formula's values; blocks decode near them, in gguf's decoder as in ours."""
    import gguf

    from edgellm_kernels.ggml_blocks import dequantize
    from edgellm_models.checkpoint.tensor_names import hf_name

    source = tmp_path / "source"
    values = packed_source(method, source)
    most = {"F32": 0.0, "BF16": 1e-5, "Q8_0": 1e-4, "Q4_0": 0.02, "Q4_K_M": 0.02, "Q2_K": 0.2}
    jobs = [(kind, False) for kind in most] + [("Q4_0", True)]
    for kind, calibrated in jobs:
        out = tmp_path / f"{kind}{calibrated}.gguf"
        report = quantize(source, out, "gguf", type=kind, calibrated=calibrated)
        told = kinds(report)
        assert told.count("source_is_quantized") == 1 and "requantized" not in told
        checkpoint, seen = open_checkpoint(out), 0
        for tensor in gguf.GGUFReader(out).tensors:
            wanted = values.get(hf_name("llama", tensor.name) or "")
            if wanted is None:
                continue
            if "attn_q." in tensor.name or "attn_k." in tensor.name:
                wanted = interleaved(wanted, 4 if "attn_q" in tensor.name else 2)
            decoded = gguf.dequantize(tensor.data, tensor.tensor_type)
            if calibrated:  # error feedback trades the weights' error for the outputs'
                assert np.square(decoded - wanted).sum() <= 0.1 * np.square(wanted).sum(), tensor.name
            else:
                assert np.square(decoded - wanted).sum() <= most[kind] * np.square(wanted).sum(), tensor.name
            weight = checkpoint.weight(tensor.name)
            ours = weight.data.float()
            if kind[0] == "Q":
                ours = dequantize(weight.data, weight.layout, weight.shape[1])
            assert np.array_equal(ours.numpy(), decoded), tensor.name
            seen += 1
        assert seen == len(values) == 7
    dry = quantize(source, tmp_path / "dry.gguf", "gguf", type="Q4_K_M", dry_run=True)
    assert "source_is_quantized" in kinds(dry)


@pytest.mark.parametrize(("form", "calibrated"), JOBS)
@pytest.mark.parametrize("source_form", ["folder", "gguf"])
def test_names_that_are_no_utf8(form: str, source_form: str, calibrated: bool, tmp_path: Path) -> None:
    """Source, output and calibration text: what is written of the names is text."""
    odd = os.fsdecode(b"m\xe9d")
    source = tiny(tmp_path / odd)
    if source_form == "gguf":
        source = tiny_gguf(source, tmp_path / f"{odd}.gguf")
    out = tmp_path / f"{odd}-out"
    if calibrated:
        with pytest.raises(OutputError, match="UTF-8: name another one with --work-dir"):
            quantize(source, out, form, calibrated=True)
        out = tmp_path / "out"
    report = quantize(source, out, form, calibrated=calibrated, text_name=f"{odd}.txt")
    json.dumps(report.as_json()).encode()
    assert not [notice for notice in report.notices if "surrogate" in notice.detail]
    written = loads(out).spec  # reads every string
    assert written.num_layers == 1
    metadata = open_checkpoint(out).metadata
    if form in ("gguf", "dense gguf"):
        assert metadata["general.name"] == "m\ufffdd"
        assert not calibrated or metadata["quantize.imatrix.dataset"] == "m\ufffdd.txt"
    else:
        assert "m\ufffdd" in (out / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "neither tokenizer.json nor tokenizer.model"),
        ("{}", r"tokenizer\.json has no tokenizer model in it"),
        ('{"version": "1.0", "added_tokens": []}', r"tokenizer\.json has no tokenizer model in it"),
    ],
)
def test_a_folder_without_a_usable_tokenizer(text: str | None, words: str, tmp_path: Path) -> None:
    """A GGUF file holds the tokenizer: refused. A folder is of use without: told, also in a dry run."""
    source = tiny(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    if text is not None:
        (source / "tokenizer.json").write_text(text)
    for form in FORMS:
        if "gguf" in form:
            with pytest.raises(BadInputError, match=words):
                quantize(source, tmp_path / "out", form)
            continue
        for dry_run in (True, False):
            report = quantize(source, tmp_path / f"out {form}", form, dry_run=dry_run)
            (notice,) = [notice for notice in report.notices if notice.kind == "no_tokenizer"]
            assert "tokenizer.json" in notice.detail
        loads(tmp_path / f"out {form}")
    assert "no_tokenizer" not in kinds(quantize(tiny(tmp_path / "whole"), tmp_path / "out", "gptq"))


def test_a_gguf_without_a_usable_tokenizer(tmp_path: Path) -> None:
    source = tiny_gguf(tiny(tmp_path / "m"), tmp_path / "m.gguf")
    data = source.read_bytes()
    for key in (b"tokenizer.ggml.model", b"tokenizer.ggml.tokens"):
        assert data.count(key) == 1
        (tmp_path / "cut.gguf").write_bytes(data.replace(key, key[:-1] + b"x"))
        out = tmp_path / f"out {key.decode()}"
        assert "no_tokenizer" in kinds(quantize(tmp_path / "cut.gguf", out, "gptq"))
        assert loads(out) and not list(out.glob("tokenizer*"))


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [1e30, -LARGEST])
@pytest.mark.parametrize(("form", "calibrated"), [job for job in JOBS if job[0] in ROUNDED])
def test_weights_beyond_every_scale(value: float, form: str, calibrated: bool, tmp_path: Path) -> None:
    """They are clipped, not lost; it is said; the error is a number, and the first of the largest."""
    from edgellm.cli.quantize import summary
    from edgellm_quantize.grids import dequantize

    def spoil(tensors: Tensors) -> None:
        tensors[UP_PROJ][3, 5] = value

    source = change(tiny(tmp_path / "source"), spoil)
    report = quantize(source, tmp_path / "out", form, calibrated=calibrated)
    (notice,) = [notice for notice in report.notices if notice.kind == "weights_clipped"]
    assert "blk.0.ffn_up.weight: 1 weight is beyond the range of" in notice.detail
    errors = {tensor.name: tensor.relative_error for tensor in report.tensors}
    assert errors["blk.0.ffn_up.weight"] == pytest.approx(1.0, abs=1e-6)
    assert all(error < 0.1 for name, error in errors.items() if error is not None and "ffn_up" not in name)
    measure = "outputs" if calibrated else "weights"
    first = f"largest relative squared errors of {measure}: blk.0.ffn_up.weight 100"
    assert any(line.startswith(first) for line in summary(report))
    weight = open_checkpoint(tmp_path / "out").weight("blk.0.ffn_up.weight")
    decoded = dequantize(weight)
    if not calibrated or form != "awq":  # AWQ's factors go over the columns after that
        reached = decoded[3, 5].item()
        assert 65504 * 7 <= abs(reached) <= 65504 * 15 and (reached > 0) == (value > 0)
    others = torch.arange(len(decoded)) != 3
    before = load_file(source / "model.safetensors")[UP_PROJ]
    if not calibrated:
        lost = (decoded - before)[others].square().sum() / before[others].square().sum()
        assert lost < 0.02


def test_the_number_of_weights_beyond_is_said(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[UP_PROJ][3, 5], tensors[UP_PROJ][7, 60], tensors[UP_PROJ][8, 2] = 1e30, -1e9, 60000.0

    source = change(tiny(tmp_path / "source"), spoil)
    for form in ("gguf", "gptq"):
        details = [n.detail for n in quantize(source, tmp_path / form, form).notices if "clipped" in n.kind]
        assert len(details) == 1 and "2 weights are beyond the range of" in details[0]


def test_errors_are_formed_in_f64(tmp_path: Path) -> None:
    """Of weights whose squares f32 does not hold, large and small, by the definition."""
    from edgellm_quantize.grids import dequantize

    for scale in (1e-25, 1e25):

        def spoil(tensors: Tensors, scale: float = scale) -> None:
            tensors[UP_PROJ] *= scale

        source = change(tiny(tmp_path / f"source {scale}"), spoil)
        before = load_file(source / "model.safetensors")[UP_PROJ].double()
        for form in ("gguf", "gptq"):
            out = tmp_path / f"{form} {scale}"
            report = quantize(source, out, form)
            written = dequantize(open_checkpoint(out).weight("blk.0.ffn_up.weight")).double()
            wanted = float((written - before).square().sum() / before.square().sum())
            assert wanted > 0.9
            (error,) = [t.relative_error for t in report.tensors if t.name == "blk.0.ffn_up.weight"]
            assert error == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("calibrated", [False, True])
def test_types_are_chosen_beside_a_weight_beyond_every_scale(calibrated: bool, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[UP_PROJ][3, 5] = 1e30

    source = change(tiny(tmp_path / "source", quantizable=True), spoil)
    report = quantize(source, tmp_path / "out", "gguf", calibrated=calibrated, target_bpw=5.0)
    assert "weights_clipped" in kinds(report) and report.bits_per_weight <= 5.0
    assert all(tensor.relative_error is None or tensor.relative_error <= 1.1 for tensor in report.tensors)


def test_a_weight_that_bf16_cannot_hold_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[UP_PROJ][3, 5] = LARGEST

    source = change(tiny(tmp_path / "source"), spoil)
    for form, recipe in (("hf", {"dtype": "bf16"}), ("dense gguf", {"type": "BF16"})):
        with pytest.raises(BadInputError, match=r"up_proj\.weight .*too large for bf16: write f32"):
            quantize(source, tmp_path / "out", form, **recipe)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
