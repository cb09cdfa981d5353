"""Sizes that are known before anything is written: tensors, linears of a layer, whole GGUF files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network import read_spec
from edgellm_quantize.api import quantize_model
from edgellm_quantize.capture import STAGE_STEMS, stage_shapes
from edgellm_quantize.gguf_file import PlannedTensor, padded, write_gguf_file
from edgellm_quantize.gguf_sizes import file_nbytes, tensor_nbytes
from edgellm_quantize.gguf_values import GGUFValue, MetadataTable, array, boolean, f32, text, u32
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.recipe import TENSOR_TYPES, CalibrationSpec, QuantizeJob, QuantizeRecipe
from tests.support.tiny_models import ARCHITECTURES, make_tiny, tiny_gguf


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_a_tensor_takes_what_the_format_says(kind: str) -> None:
    found = gguf.quant_shape_to_byte_shape((3, 512), gguf.GGMLQuantizationType[kind])
    assert tensor_nbytes((3, 512), kind) == found[0] * found[1]
    assert tensor_nbytes((512,), kind) == found[1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linears_and_their_shapes_are_those_of_the_model(arch: str, tmp_path: Path) -> None:
    """Every matrix of a block is a linear; those that share an input have the shapes that are planned."""
    checkpoint = open_checkpoint(make_tiny(arch, tmp_path / arch, num_hidden_layers=1))
    infos = checkpoint.tensors()
    matrices = {name for name, info in infos.items() if name.startswith("blk.") and len(info.shape) == 2}
    assert matrices == {name for name in infos if is_block_linear(name)} != set()
    shapes = stage_shapes(read_spec(checkpoint.file_format, checkpoint.metadata, infos))
    for stage, stems in STAGE_STEMS.items():
        members = [infos[name].shape for stem in stems if (name := f"blk.0.{stem}.weight") in infos]
        assert shapes[stage] == (sum(rows for rows, _ in members), members[0][1]), stage


def test_a_header_takes_what_is_planned(tmp_path: Path) -> None:
    """Every kind of metadata value, text of several bytes a letter, names and shapes of any length."""
    scalars = {f"a.{kind.lower()}": GGUFValue(kind, 1) for kind in ("UINT8", "INT16", "UINT64", "FLOAT64")}
    metadata: MetadataTable = {
        "general.architecture": text("llama"),
        **scalars,
        "a.text": text("Bücher 本"),
        "a.switch": boolean(True),
        "a.number": f32(0.5),
        "a.words": array("STRING", ["", "ä", "word" * 9]),
        "a.scores": array("FLOAT32", [0.5] * 7),
        "a.kinds": array("INT32", [1] * 3),
        "a.flags": array("BOOL", [True] * 5),
        "a.count": u32(3),
    }
    shapes = [("x.weight", (3, 64), "Q8_0"), ("y" * 50, (7,), "F32"), ("z.weight", (5, 32), "F16")]
    tensors = [
        PlannedTensor(name, shape, kind, nbytes := tensor_nbytes(shape, kind), lambda n=nbytes: _zeros(n))
        for name, shape, kind in shapes
    ]
    out = tmp_path / "out.gguf"
    written = write_gguf_file(out, metadata, tensors, check=lambda *_: None)
    assert file_nbytes(metadata, shapes) == written == out.stat().st_size


def _zeros(count: int) -> list[object]:
    import numpy as np

    return [np.zeros(count, np.uint8)]


OPTIONS: tuple[dict[str, object], ...] = ({}, {"type": "Q6_K", "method": "rtn"}, {"target_bpw": 6.0})


@pytest.mark.parametrize(
    ("options", "calibration"),
    [({"type": "F16"}, "none"), *itertools.product(OPTIONS, ("none", "file", "self"))],
)
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_dry_run_says_the_bytes_of_the_file(
    form: str, options: dict[str, object], calibration: str, tmp_path: Path
) -> None:
    """Exactly: header, vocabulary, recipe and what calibration leaves there are counted."""
    source = make_tiny(
        "llama", tmp_path / "source", quantizable=True, num_hidden_layers=1, intermediate_size=256
    )
    if form == "gguf":
        source = tiny_gguf(source, tmp_path / "source.gguf")
    path = tmp_path / "text.txt"
    path.write_text("A fox met a hen by the old mill, and they talked. " * 60)
    given = path if calibration == "file" else None
    spec = CalibrationSpec(calibration, given, samples=4, sequence_length=64)

    def generate(prompts: Sequence[Sequence[int]], most: int, seed: int) -> list[list[int]]:
        return [[5] * most for _ in prompts]

    recipe = QuantizeRecipe(effort="fast", **options)  # type: ignore[arg-type]
    job = QuantizeJob(source, tmp_path / "out.gguf", recipe, spec, generate=generate)
    planned = quantize_model(replace(job, dry_run=True))
    report = quantize_model(job)
    size = (tmp_path / "out.gguf").stat().st_size
    assert report.nbytes == size
    if "target_bpw" in options and calibration != "none":
        # Which types follow from what the text shows, but not what is written besides.
        planned_tensors, tensors = (
            sum(padded(tensor.nbytes) for tensor in found.tensors) for found in (planned, report)
        )
        assert planned.nbytes - planned_tensors == size - tensors > 0
    else:
        assert planned.nbytes == size
