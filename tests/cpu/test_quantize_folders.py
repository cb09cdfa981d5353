"""Folders that the toolkit writes, read by the published formulas and by edgellm; what goes wrong."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, OutputError, UsageError
from edgellm_models.network import build, read_spec
from edgellm_quantize import safetensors_file
from edgellm_quantize.api import quantize_model
from edgellm_quantize.grids import dequantize
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.imatrix_file import ImportanceEntry, ImportanceMatrix, read_imatrix, write_imatrix
from edgellm_quantize.packed_layouts import vllm_refusals
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe, QuantizeReport
from tests.support.packed_folders import (
    all_tensors,
    awq_values,
    compressed_values,
    gptq_values,
    is_linear,
)
from tests.support.paged import relative_error, run_whole
from tests.support.tiny_models import ARCHITECTURES, make_tiny, tiny_gguf

PROMPT = [5, 9, 2, 7, 11]
build_decoder = partial(build.build_decoder, kernels="torch")


def tiny(folder: Path, arch: str = "llama", **overrides: Any) -> Path:
    return make_tiny(arch, folder, **({"num_hidden_layers": 1} | overrides))


def quantize(source: Path, out: Path, **recipe: Any) -> QuantizeReport:
    return quantize_model(QuantizeJob(source, out, QuantizeRecipe(effort="fast", **recipe)))


def section_of(folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return section


def check_against_formula(source: Path, out: Path, read: Any, most: float) -> None:
    """Every linear stands for what the source holds up to rounding, and edgellm reads the formula's bits."""
    from edgellm_kernels.int_groups import dequantize_groups
    from edgellm_models.checkpoint.tensor_names import canonical_name

    original, written = all_tensors(source), all_tensors(out)
    checkpoint = open_checkpoint(out)
    linears = [name for name in original if is_linear(name)]
    assert linears and not any(name in written for name in linears)
    for name in original:
        if name not in linears:
            assert torch.equal(written[name], original[name].to(written[name].dtype)), name
            continue
        values = read(written, name.removesuffix(".weight"))
        dense = original[name].float().numpy()
        assert np.square(values - dense).sum() <= most * np.square(dense).sum(), name
        ours = dequantize_groups(checkpoint.weight(canonical_name(checkpoint.architecture, name) or ""))
        assert np.array_equal(ours.numpy(), values), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_that_outgrows_f16_is_declared_as_bf16(tmp_path: Path, arch: str) -> None:
    """Readers compute in the type that config.json names, and in f16 Gemma's activations end in NaN."""
    outgrows = arch in ("gemma2", "gemma3")
    source = tiny(tmp_path / "source", arch)
    for form in ("gptq", "awq", "compressed-tensors"):
        given = {"format": form, "group_size": 32, "symmetric": form != "awq", "method": "rtn"}
        quantize(source, tmp_path / form, **given)
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert config["torch_dtype"] == ("bfloat16" if outgrows else "float16")
        weights = all_tensors(tmp_path / form)
        kinds = {tensor.dtype for name, tensor in weights.items() if name.endswith(("scales", "norm.weight"))}
        assert kinds == {torch.float16}
    report = quantize(source, tmp_path / "dense", format="hf", dtype="f16")
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["torch_dtype"] == "float16"
    assert [n.kind for n in report.notices if n.kind == "outgrows_f16"] == ["outgrows_f16"] * outgrows


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "version", "most"),
    [
        (2, 1, 0.2),
        (2, 2, 0.2),
        (3, 1, 0.05),
        (3, 2, 0.05),
        (4, 1, 0.012),
        (4, 2, 0.012),
        (8, 1, 1e-4),
        (8, 2, 1e-4),
    ],
)
def test_gptq_folders(tmp_path: Path, bits: int, version: int, most: float, symmetric: bool) -> None:
    """E02, E06, E07: every width, version and zero point by the published formula, positive rows included."""
    source = tiny(tmp_path / "source")
    tensors = all_tensors(source)
    gate = "model.layers.0.mlp.gate_proj.weight"
    tensors[gate][:8] = tensors[gate][:8].abs()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    form = "gptq" if version == 1 else "gptq_v2"
    out = tmp_path / "out"
    report = quantize(
        source, out, format="gptq", bits=bits, group_size=32, symmetric=symmetric, checkpoint_format=form
    )
    check_against_formula(source, out, lambda t, stem: gptq_values(t, stem, bits, version=version), most)
    section = section_of(out)
    assert section == json.loads((out / "quantize_config.json").read_text())
    wanted = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "desc_act": False}
    assert wanted.items() <= section.items()
    assert section["checkpoint_format"] == section["format"] == form
    stored = all_tensors(out)[f"{gate.removesuffix('.weight')}.qzeros"].view(torch.int32)
    if symmetric and bits != 3:
        middle = (1 << (bits - 1)) - (1 if version == 1 else 0)
        assert set(stored.numpy().view(np.uint32).flatten().tolist()) == {
            sum(middle << place for place in range(0, 32, bits))
        }
    assert section["meta"]["recipe"]["bits"] == bits
    assert section["meta"]["quantizer"][0].startswith("edgellm:")
    weights = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in all_tensors(out).values())
    assert report.bits_per_weight == pytest.approx(8 * size / weights) and report.num_weights == weights


def test_three_bits_are_written_as_one_version(tmp_path: Path) -> None:
    """Whoever asks; what is asked for by name is written, and nothing of it shows in other formats."""
    source = tiny(tmp_path / "source")
    for bits, asked, version in (
        (3, None, "gptq_v2"),
        (3, "gptq", "gptq"),
        (4, None, "gptq"),
        (2, None, "gptq"),
    ):
        out = tmp_path / f"{bits} {asked}"
        given = {} if asked is None else {"checkpoint_format": asked}
        quantize(source, out, format="gptq", bits=bits, group_size=32, **given)
        section = section_of(out)
        assert section["checkpoint_format"] == section["format"] == version
        assert section["meta"]["recipe"]["checkpoint_format"] == version
        read = partial(gptq_values, bits=bits, version=2 if version == "gptq_v2" else 1)
        check_against_formula(source, out, read, 0.2)
    assert QuantizeRecipe(bits=3).checkpoint_format == QuantizeRecipe(format="hf").checkpoint_format == "gptq"


def test_awq_and_compressed_folders(tmp_path: Path) -> None:
    """AWQ by its formula (a zero point of 0 is kept: E02), compressed-tensors with and without zeros."""
    source = tiny(tmp_path / "source")
    quantize(source, tmp_path / "awq", format="awq", group_size=32)
    check_against_formula(source, tmp_path / "awq", lambda t, stem: awq_values(t, stem, 32), 0.012)
    wanted = {"quant_method": "awq", "version": "gemm", "zero_point": True, "bits": 4, "group_size": 32}
    assert wanted.items() <= section_of(tmp_path / "awq").items()
    for bits, symmetric in ((4, True), (4, False), (8, True)):
        out = tmp_path / f"compressed{bits}{symmetric}"
        quantize(source, out, format="compressed-tensors", bits=bits, group_size=32, symmetric=symmetric)
        read = partial(compressed_values, bits=bits)
        check_against_formula(source, out, read, 0.012)


def test_eight_bits_answer_as_the_source(tmp_path: Path) -> None:
    """E07: greedy ids of 8 bits are those of the source."""
    source = make_tiny("llama", tmp_path / "source")
    quantize(source, tmp_path / "out", format="gptq", bits=8, group_size=32)
    ids = []
    for folder in (source, tmp_path / "out"):
        decoder = build_decoder(open_checkpoint(folder))
        answer = list(PROMPT)
        for _ in range(30):
            answer.append(int(run_whole(decoder, answer)[-1].argmax()))
        ids.append(answer)
    assert ids[0] == ids[1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_folders_from_gguf_files(tmp_path: Path, arch: str) -> None:
    """Names, row order, norm gains, config and tokenizer come back: the folder's logits and ids."""
    from edgellm_models.tokenizer import load_tokenizer

    source = make_tiny(arch, tmp_path / "source")
    gguf = tiny_gguf(source, tmp_path / "model.gguf")
    quantize(gguf, tmp_path / "dense", format="hf", dtype="f32")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "dense")
    wanted = run_whole(build_decoder(before), PROMPT)
    assert relative_error(run_whole(build_decoder(after), PROMPT), wanted) < 1e-5
    text = "Hello <b>world</b>, 12 times\n"
    encoders = [
        load_tokenizer(c.path, c.file_format, c.metadata) for c in (before, after, open_checkpoint(gguf))
    ]
    assert encoders[0].encode(text) == encoders[1].encode(text) == encoders[2].encode(text)
    if (tmp_path / "dense" / "tokenizer.model").is_file():  # both forms of a SentencePiece vocabulary
        (tmp_path / "dense" / "tokenizer.json").unlink()
        model_file = load_tokenizer(after.path, after.file_format, after.metadata)
        assert model_file.encode(text) == encoders[0].encode(text)
    quantize(gguf, tmp_path / "packed", format="gptq", bits=8, group_size=32)
    packed = run_whole(build_decoder(open_checkpoint(tmp_path / "packed")), PROMPT)
    assert float((packed - wanted).norm() / wanted.norm()) < 0.05


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path / "source")
    quantize(source, tmp_path / "one", format="gptq", group_size=32)
    monkeypatch.setattr("edgellm_quantize.hf_folder.SHARD_BYTES", 40_000)
    monkeypatch.setattr(
        "edgellm_quantize.hf_folder.write_shards",
        lambda *arguments: safetensors_file.write_shards(*arguments[:4], shard_bytes=40_000),
    )
    quantize(source, tmp_path / "many", format="gptq", group_size=32)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in many.values())
    assert open_checkpoint(tmp_path / "many").tensors().keys() == open_checkpoint(source).tensors().keys()


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        quantize(source, tmp_path / name / "out", format="gptq", group_size=32)
    for path in (tmp_path / "a" / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "out" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(("method", "bits", "most"), [("gptq", 8, 0.03), ("awq", 4, 0.5)])
@pytest.mark.parametrize("source_form", ["folder", "gguf"])
def test_calibrated_folders(tmp_path: Path, method: str, bits: int, most: float, source_form: str) -> None:
    """Error feedback and folding reach the file in the right rows: logits of such text stay near."""
    from edgellm_models.tokenizer import load_tokenizer

    source = tiny(tmp_path / "source", "llama")
    text = "One day a fox met a hen by the old mill. "
    opened = open_checkpoint(source)
    prompt = load_tokenizer(source, "safetensors", opened.metadata).encode(text)
    wanted = run_whole(build_decoder(opened), prompt)
    model = source if source_form == "folder" else tiny_gguf(source, tmp_path / "model.gguf")
    (tmp_path / "text.txt").write_text(text * 120)
    out = tmp_path / "out"
    job = QuantizeJob(
        model,
        out,
        QuantizeRecipe(format=method, bits=bits, effort="fast", group_size=32),
        CalibrationSpec("file", tmp_path / "text.txt", samples=4, sequence_length=64),
        save_imatrix=tmp_path / "seen.gguf",
    )
    report = quantize_model(job)
    got = run_whole(build_decoder(open_checkpoint(out)), prompt)
    assert float((got - wanted).norm() / wanted.norm()) < most
    assert report.method == method and report.calibration_tokens == 256
    record = section_of(out)["meta"]["calibration"]
    seen = {"source": "text.txt", "sha256": report.calibration_hash, "tokens": 256, "seed": 0}
    assert record == seen
    assert (tmp_path / "seen.gguf").is_file() and not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_rounding_to_nearest_weighs_the_columns(form: str, tmp_path: Path) -> None:
    """With a calibration or an importance matrix the columns that matter are met better, in equal bytes."""
    source = make_tiny("llama", tmp_path / "source", quantizable=True, num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("One day a fox met a hen by the old mill. " * 120)
    spec = CalibrationSpec("file", tmp_path / "text.txt", samples=8, sequence_length=64)
    recipe = QuantizeRecipe(format=form, method="rtn", effort="fast", group_size=32)
    seen = tmp_path / "seen.gguf"
    reports = [
        quantize_model(QuantizeJob(source, tmp_path / name, recipe, **options))
        for name, options in (
            ("plain", {}),
            ("calibrated", {"calibration": spec, "save_imatrix": seen}),
            ("weighted", {"imatrix": seen}),
        )
    ]
    assert [report.method for report in reports] == ["rtn"] * 3
    assert reports[1].calibration_tokens == 512
    sizes = [[tensor.nbytes for tensor in report.tensors] for report in reports]
    assert sizes[0] == sizes[1] == sizes[2]
    matrix = read_imatrix(seen)
    opened = {report.out.name: open_checkpoint(report.out) for report in reports}
    original = open_checkpoint(source)
    for report in reports[0].tensors:
        if not is_block_linear(report.name):
            continue
        weight = dequantize(original.weight(report.name))
        columns = torch.tensor(matrix.entries[report.name].mean_square)
        errors = {
            name: float((columns * (dequantize(checkpoint.weight(report.name)) - weight).square()).sum())
            for name, checkpoint in opened.items()
        }
        assert errors["weighted"] < errors["plain"] and errors["calibrated"] < 1.02 * errors["plain"]
        if report.name == "blk.0.attn_v.weight":  # its inputs are the same in both ways
            assert errors["weighted"] == pytest.approx(errors["calibrated"], rel=1e-3)
    metas = [section_of(report.out)["meta"] for report in reports]
    assert [meta.get("imatrix") for meta in metas] == [None, None, "seen.gguf"]
    assert [meta["calibration"] is not None for meta in metas] == [False, True, False]


def test_importance_of_another_model_or_of_some_linears(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    seen = tmp_path / "seen.gguf"
    recipe = QuantizeRecipe(format="gptq", effort="fast", group_size=32)
    columns = open_checkpoint(source).tensors()["blk.0.attn_q.weight"].shape[1]
    for count, dry_run in ((columns, False), (columns + 1, True)):
        entry = ImportanceEntry(np.ones(count, np.float32), 5)
        write_imatrix(seen, ImportanceMatrix({"blk.0.attn_q.weight": entry}))
        job = QuantizeJob(source, tmp_path / f"{count}", recipe, imatrix=seen, dry_run=dry_run)
        if count == columns:
            notices = {notice.kind: notice.detail for notice in quantize_model(job).notices}
            assert notices["no_importance"].startswith("6 tensors have no importance")
        else:
            with pytest.raises(BadInputError, match="made for another model"):
                quantize_model(job)
    text = tmp_path / "text.txt"
    text.write_text("words " * 200)
    spec = CalibrationSpec("file", text)
    for options, words in (
        ({"recipe": recipe, "calibration": spec}, "give one of them"),
        ({"recipe": QuantizeRecipe(format="hf")}, "a dense folder rounds nothing"),
    ):
        with pytest.raises(UsageError, match=words):
            quantize_model(QuantizeJob(source, tmp_path / "none", imatrix=seen, **options))


def test_damaged_weights_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    """E20: a NaN in the source is found where it lies, in quantized and in dense tensors."""
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        source = tiny(tmp_path / name)
        tensors = all_tensors(source)
        tensors[name].view(-1)[5] = float("nan")
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        for form in ("gptq", "hf"):
            with pytest.raises(BadInputError, match=rf"{name}.*nan.*5\]"):
                quantize(source, tmp_path / "out", format=form)
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    }


def test_zero_groups_and_extreme_weights(tmp_path: Path) -> None:
    """E09: all-zero groups, tiny and huge values give finite scales that are not 0."""
    source = tiny(tmp_path / "source")
    tensors = all_tensors(source)
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    up[:4], up[4:8], up[8, 0] = 0.0, 1e-8, 6e4
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for form in ("gptq", "awq"):
        out = tmp_path / form
        quantize(source, out, format=form, group_size=32)
        scales = all_tensors(out)["model.layers.0.mlp.up_proj.scales"].float()
        assert bool(torch.isfinite(scales).all()) and bool((scales.abs() >= 2**-14).all())
        assert bool(torch.isfinite(run_whole(build_decoder(open_checkpoint(out)), PROMPT)).all())


def test_no_place_for_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E16: a missing folder, an existing output, a full disk and an interruption leave nothing behind."""
    source = tiny(tmp_path / "source")
    with pytest.raises(OutputError, match=r"folder .*no does not exist"):
        quantize(source, tmp_path / "no" / "out", format="gptq", group_size=32)
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        quantize(source, tmp_path / "there", format="gptq", group_size=32)
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):

        def fail(*arguments: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(safetensors_file, "_read_back", fail)
        with pytest.raises((OutputError, KeyboardInterrupt)) as raised:
            quantize(source, tmp_path / "out", format="gptq", group_size=32)
        if isinstance(error, OSError):
            assert "no space left" in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "there"}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"format": "gptq", "group_size": 128}, "groups of 128 do not divide 64 .*--group-size 64"),
        ({"format": "gptq", "group_size": 32, "method": "gptq"}, "needs calibration"),
    ],
)
def test_jobs_that_cannot_be_done(tmp_path: Path, recipe: dict[str, Any], words: str) -> None:
    source = tiny(tmp_path / "source")
    with pytest.raises((BadInputError, UsageError), match=words):
        quantize(source, tmp_path / "out", **recipe)
    assert not (tmp_path / "out").exists()


def test_what_vllm_refuses() -> None:
    """Bits, zero points, groups, shapes and the linears that it joins, by its published rules."""
    shapes = {
        f"model.layers.0.{stem}.weight": (256, 256)
        for stem in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    good = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    assert vllm_refusals(good, shapes) == [] == vllm_refusals(good | {"bits": 8, "group_size": -1}, shapes)
    for change, words in (
        ({"bits": 3}, "3 bits"),
        ({"sym": False}, "asymmetric"),
        ({"group_size": 256}, "groups of 256"),
    ):
        (found,) = vllm_refusals(good | change, shapes)
        assert words in found
    (found,) = vllm_refusals({key: good[key] for key in good if key != "desc_act"}, shapes)
    assert "desc_act" in found
    (found,) = vllm_refusals(good, shapes | {"model.layers.0.mlp.down_proj.weight": (576, 1536 + 64)})
    assert "64 x 128" in found
    (found,) = vllm_refusals(good, {k: v for k, v in shapes.items() if "v_proj" not in k})
    assert "only k_proj, q_proj" in found
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    assert vllm_refusals(awq, shapes) == []
    assert len(vllm_refusals(awq | {"bits": 8}, shapes)) == 1


def test_a_dry_run_says_what_is_written(tmp_path: Path) -> None:
    """The same tensors, bytes and bits per weight as the real thing, and nothing on the disk."""
    source = tiny(tmp_path / "source")
    for recipe in (
        {"format": "gptq", "group_size": 32},
        {"format": "awq", "group_size": 32},
        {"format": "hf"},
    ):
        out = tmp_path / recipe["format"]
        job = QuantizeJob(source, out, QuantizeRecipe(effort="fast", **recipe), dry_run=True)
        planned = quantize_model(job)
        assert not out.exists() and planned.dry_run and planned.seconds > 0 and planned.peak_bytes > 0
        real = quantize(source, out, **recipe)
        sizes = [[(t.name, t.type_name, t.nbytes) for t in report.tensors] for report in (planned, real)]
        assert sizes[0] == sizes[1] and planned.bits_per_weight == real.bits_per_weight
        assert real.nbytes - planned.nbytes < 20_000
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert read_spec("safetensors", checkpoint.metadata, checkpoint.tensors()).num_layers == 1
