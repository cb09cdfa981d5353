"""Quantized GGUF files: llama.cpp runs them, gguf reads them as we do, faults leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from edgellm_kernels.ggml_blocks import dequantize
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, OutputError
from edgellm_quantize.gguf_source import open_gguf_source
from edgellm_quantize.gguf_typed_metadata import read_typed_metadata
from edgellm_quantize.imatrix_file import ImportanceEntry, ImportanceMatrix, read_imatrix, write_imatrix
from edgellm_quantize.kquant_codec import encode
from edgellm_quantize.kquant_mix import FILE_TYPE_IDS
from edgellm_quantize.recipe import GGUF_TYPES, QuantizeProgress
from edgellm_quantize.writers import QuantizedPlan, write_planned_gguf, write_quantized_gguf
from tests.support.llama_cpp import LlamaCpp, require_llama_cpp
from tests.support.real_models import real_model
from tests.support.tiny_models import ARCHITECTURES, make_tiny

PROMPT = "The keeper of the light counted the ships"
LOADED = ("Q2_K", "Q3_K_L", "Q5_K_M", "Q4_1", "Q5_0", "Q8_0")
"""What llama.cpp loads here: most tensor types once (acceptance/gguf_types.py loads all)."""


def _imatrix(model: Path) -> ImportanceMatrix:
    """One entry for every linear, ones and twos in turn."""
    source = open_gguf_source(model)
    try:
        return ImportanceMatrix(
            {
                tensor.name: ImportanceEntry(1 + np.arange(tensor.shape[1], dtype=np.float32) % 2, 512)
                for tensor in source.tensors
                if len(tensor.shape) == 2 and tensor.name.startswith("blk.")
            },
            ("ones and twos",),
            1,
            512,
        )
    finally:
        source.close()


def _agree(quantized: Path, dense: Path) -> None:
    """llama.cpp says nearly the same of a quantized file and of its decoded f32 form."""
    judged = 0
    with LlamaCpp(quantized, context=128) as first, LlamaCpp(dense, context=128) as second:
        for end in range(8, len(PROMPT), 8):
            ids = first.tokenize(PROMPT[:end])
            assert ids == second.tokenize(PROMPT[:end])
            ours, theirs = dict(first.top_logprobs(ids, 20)), dict(second.top_logprobs(ids, 20))
            if not ours or not theirs:
                continue  # the best token ends inside a character
            judged += 1
            # llama.cpp rounds activations to 8 bits for quantized weights; logits spread by about 10, and
            # rows in a wrong order leave two or three tokens of twenty in common.
            shared = ours.keys() & theirs.keys()
            assert len(shared) >= 12
            differences = np.array([ours[token] - theirs[token] for token in shared])
            assert np.abs(differences - differences.mean()).mean() < 2.0
        assert judged >= 2
        assert len(first.greedy(ids, 8)) == 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_runs_every_family(arch: str, tmp_path: Path) -> None:
    """A folder as Q4_K_M beside the same file decoded to F32 again: row order, norms and metadata hold."""
    require_llama_cpp()
    folder = make_tiny(arch, tmp_path / "m", quantizable=True)
    quantized, dense = tmp_path / "q.gguf", tmp_path / "d.gguf"
    report = write_quantized_gguf(folder, quantized, "Q4_K_M", effort="fast")
    assert not [notice for notice in report.notices if notice.kind == "type_fallback"]
    write_quantized_gguf(quantized, dense, "F32")
    _agree(quantized, dense)


def test_llama_cpp_reads_every_type(tmp_path: Path) -> None:
    """The types of one model: sizes as reported, decoded alike by gguf and by us; llama.cpp loads LOADED."""
    require_llama_cpp()
    import gguf

    folder = make_tiny("llama", tmp_path / "m", quantizable=True, num_hidden_layers=1, dtype="bf16")
    for type_name in (kind for kind in GGUF_TYPES if not kind.endswith(("_S", "F32"))):
        out = tmp_path / f"{type_name}.gguf"
        report = write_quantized_gguf(folder, out, type_name, effort="fast")
        assert report.nbytes == out.stat().st_size
        reader = gguf.GGUFReader(out)
        assert reader.fields["general.file_type"].contents() == FILE_TYPE_IDS[type_name]
        assert reader.fields["general.quantization_version"].contents() == 2
        checkpoint = open_checkpoint(out)
        types = {}
        for tensor in reader.tensors:
            types[tensor.name] = tensor.tensor_type.name
            if len(tensor.shape) != 2 or tensor.tensor_type.name in ("F32", "F16", "BF16"):
                continue
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            weight = checkpoint.weight(tensor.name)
            mine = dequantize(weight.data, weight.layout, int(tensor.shape[0])).numpy()
            assert np.array_equal(mine.view(np.uint32), expected.view(np.uint32)), tensor.name
        checkpoint.close()
        assert types == {tensor.name: tensor.type_name for tensor in report.tensors}
        if type_name in LOADED:
            with LlamaCpp(out, context=64) as judge:
                assert len(judge.greedy(judge.tokenize(PROMPT), 2)) == 2


def test_the_file_says_how_it_was_made(tmp_path: Path) -> None:
    """Recipe, calibration and version lie in the file; progress and errors in the report."""
    folder = make_tiny("qwen3", tmp_path / "m", quantizable=True)
    out = tmp_path / "q.gguf"
    seen: list[QuantizeProgress] = []
    matrix = _imatrix(folder)
    report = write_quantized_gguf(
        folder, out, "Q4_K_S", importance=matrix, overrides=[("ffn_up", "Q6_K")], on_progress=seen.append
    )
    checkpoint = open_checkpoint(out)
    record = json.loads(checkpoint.metadata["edgellm.quantize.recipe"])
    recipe = record["recipe"]
    assert record["source"] == "m" and record["imatrix"] == checkpoint.metadata["quantize.imatrix.dataset"]
    assert recipe["type"] == "Q4_K_S" and recipe["tensor_types"] == [["ffn_up", "Q6_K"]]
    assert checkpoint.metadata["quantize.imatrix.entries_count"] == len(matrix.entries)
    assert checkpoint.metadata["edgellm.version"]
    assert [step.done for step in seen] == sorted(step.done for step in seen) and seen[-1].done == 1.0
    by_name = {tensor.name: tensor for tensor in report.tensors}
    assert by_name["blk.1.ffn_up.weight"].type_name == "Q6_K"
    error = by_name["blk.1.ffn_up.weight"].relative_error
    assert error is not None and 0 < error < 1e-3 < by_name["blk.1.attn_q.weight"].relative_error < 1e-2
    dry = write_quantized_gguf(
        folder,
        tmp_path / "none.gguf",
        "Q4_K_S",
        importance=matrix,
        overrides=[("ffn_up", "Q6_K")],
        dry_run=True,
    )
    assert not (tmp_path / "none.gguf").exists() and dry.dry_run
    assert dry.nbytes == report.nbytes == out.stat().st_size


def test_a_gguf_source_keeps_its_metadata_and_its_blocks(tmp_path: Path) -> None:
    """A Q4_K_M file as Q4_K_M is the same file but for the source that it names."""
    folder = make_tiny("gemma3", tmp_path / "m", quantizable=True)
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_quantized_gguf(folder, first, "Q4_K_M", effort="fast")
    report = write_quantized_gguf(first, second, "Q4_K_M", effort="fast")
    assert not [notice for notice in report.notices if notice.kind == "requantized"]
    assert {tensor.method for tensor in report.tensors} == {"copy"}
    before, after = open_checkpoint(first), open_checkpoint(second)
    records = [json.loads(opened.metadata.pop("edgellm.quantize.recipe")) for opened in (before, after)]
    assert records[0] | {"source": "a.gguf"} == records[1]
    assert before.metadata == after.metadata and before.tensors() == after.tensors()
    for name, info in before.tensors().items():
        if len(info.shape) == 2:
            assert torch.equal(before.weight(name).data, after.weight(name).data), name


def test_metadata_types_are_those_that_gguf_reads(tmp_path: Path) -> None:
    """Every key of a written file, scalars, strings and arrays, against gguf's own reader."""
    import gguf

    folder = make_tiny("gemma3", tmp_path / "m", quantizable=True)
    out = tmp_path / "q.gguf"
    write_quantized_gguf(folder, out, "Q8_0", effort="fast")
    table, notices = read_typed_metadata(out)
    fields = {key: field for key, field in gguf.GGUFReader(out).fields.items() if not key.startswith("GGUF.")}
    assert table.keys() == fields.keys() and not notices
    for key, field in fields.items():
        names = [kind.name for kind in field.types]
        assert [table[key].type_name, *([table[key].item_type] if len(names) > 1 else [])] == names, key
        assert table[key].value == field.contents(), key


def test_a_quantized_source_is_told_of(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", quantizable=True)
    write_quantized_gguf(folder, tmp_path / "a.gguf", "Q4_0", effort="fast")
    report = write_quantized_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0", effort="fast")
    assert "Q4_0" in next(notice for notice in report.notices if notice.kind == "requantized").detail


def test_rows_that_do_not_fit_fall_back(tmp_path: Path) -> None:
    """E13: rows of 96 and 320: types and the summary, and llama.cpp runs the file."""
    require_llama_cpp()
    for width in (96, 320):
        folder = make_tiny(
            "llama", tmp_path / f"m{width}", hidden_size=width, intermediate_size=512, head_dim=width // 4
        )
        out = tmp_path / f"{width}.gguf"
        report = write_quantized_gguf(folder, out, "Q4_K_M", effort="fast")
        types = {tensor.name: tensor.type_name for tensor in report.tensors}
        assert types["blk.0.attn_q.weight"] == "Q5_0" and types["blk.1.ffn_down.weight"] in ("Q4_K", "Q6_K")
        detail = next(notice for notice in report.notices if notice.kind == "type_fallback").detail
        assert f"Q4_K became Q5_0 (rows of {width})" in detail and re.search(r": \+[\d.]+ (kB|MB)$", detail)
        with LlamaCpp(out, context=64) as judge:
            assert judge.greedy(judge.tokenize(PROMPT), 2)


def test_importance_that_is_missing_or_wrong(tmp_path: Path) -> None:
    """E17: a zero vector and a missing tensor are told of and rounded without; another length is refused."""
    folder = make_tiny("llama", tmp_path / "m", quantizable=True)
    entries = dict(_imatrix(folder).entries)
    del entries["blk.0.attn_q.weight"]
    entries["blk.1.attn_k.weight"] = ImportanceEntry(np.zeros(256, np.float32), 512)
    out = tmp_path / "q.gguf"
    report = write_quantized_gguf(folder, out, "Q4_K_M", importance=ImportanceMatrix(entries), effort="fast")
    detail = next(notice for notice in report.notices if notice.kind == "no_importance").detail
    assert "2 tensors" in detail and "blk.0.attn_q.weight" in detail and "blk.1.attn_k.weight" in detail
    plain = write_quantized_gguf(folder, tmp_path / "p.gguf", "Q4_K_M", effort="fast")
    errors = [{t.name: t.relative_error for t in made.tensors} for made in (report, plain)]
    assert errors[0]["blk.0.attn_q.weight"] == errors[1]["blk.0.attn_q.weight"]
    entries["blk.1.attn_k.weight"] = ImportanceEntry(np.ones(128, np.float32), 512)
    with pytest.raises(BadInputError, match=r"blk\.1\.attn_k\.weight has 128 columns, the weight has 256"):
        write_quantized_gguf(folder, tmp_path / "r.gguf", "Q4_K_M", importance=ImportanceMatrix(entries))
    assert not (tmp_path / "r.gguf").exists()


def test_faults_leave_no_file(tmp_path: Path) -> None:
    """E16, E20: a missing folder, a NaN in the source: one line that names the place, nothing on disk."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny("llama", tmp_path / "m", quantizable=True)
    with pytest.raises(OutputError, match="does not exist"):
        write_quantized_gguf(folder, tmp_path / "no" / "q.gguf", "Q4_K_M")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 7] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(BadInputError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .*nan at \[3, 7\]"):
        write_quantized_gguf(folder, tmp_path / "q.gguf", "Q4_K_M", effort="fast")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_huge_weights_are_clipped_and_told(tmp_path: Path) -> None:
    """E09: weights that no f16 scale reaches."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny("llama", tmp_path / "m", quantizable=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][2, 5] = 1e12
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    report = write_quantized_gguf(folder, tmp_path / "q.gguf", "Q4_0", effort="fast")
    detail = next(notice for notice in report.notices if notice.kind == "weights_clipped").detail
    assert "blk.0.ffn_up.weight" in detail and "1 weight is" in detail


def test_codes_that_were_chosen_elsewhere_are_written(tmp_path: Path) -> None:
    """What error feedback has rounded reaches the file in GGUF's row order."""
    folder = make_tiny("llama", tmp_path / "m", quantizable=True)
    model = open_gguf_source(folder)
    name = "blk.1.attn_k.weight"
    weights = model.checkpoint.weight(name).data.float().numpy()
    chosen = encode(weights, "Q4_K", np.linspace(1, 9, weights.shape[1]).astype(np.float32), "best")
    types = {t.name: "Q4_K" if len(t.shape) == 2 else "F32" for t in model.tensors}

    def encoder(tensor, kind):  # type: ignore[no-untyped-def]
        if tensor.name != name:
            return None
        return iter([tensor.arrange(torch.from_numpy(chosen)).numpy()])

    out = tmp_path / "q.gguf"
    plan = QuantizedPlan("Q4_K_M", types, effort="fast", method="gptq", encode=encoder, calibration_hash="ab")
    report = write_planned_gguf(model, out, plan)
    model.close()
    checkpoint = open_checkpoint(out)
    written = checkpoint.weight(name).data.numpy()
    assert sorted(map(bytes, written)) == sorted(map(bytes, chosen)) and not np.array_equal(written, chosen)
    assert checkpoint.metadata["edgellm.quantize.calibration_hash"] == "ab"
    methods = {tensor.name: tensor.method for tensor in report.tensors}
    assert methods[name] == "gptq" and methods["blk.0.attn_k.weight"] == "rtn"
    assert {t.name: t.relative_error for t in report.tensors}[name] < 1e-2


def test_imatrix_files_round_trip(tmp_path: Path) -> None:
    """Ours, and llama.cpp's older form; damaged ones are refused (E17)."""
    entries = {"blk.0.attn_q.weight": ImportanceEntry(np.array([0.5, 0, 2], np.float32), 300)}
    path = tmp_path / "i.gguf"
    write_imatrix(path, ImportanceMatrix(entries, ("text.txt",), 3, 100))
    found = read_imatrix(path)
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("text.txt",), 3, 100)
    assert np.allclose(found.entries["blk.0.attn_q.weight"].mean_square, [0.5, 0, 2])
    assert found.entries["blk.0.attn_q.weight"].count == 300
    name = b"blk.0.ffn_up.weight"
    numbers = np.array([2.0, 8.0], "<f4").tobytes()
    counts = [np.array([value], "<i4").tobytes() for value in (1, len(name), 4, 2, 7, 4)]
    legacy = counts[0] + counts[1] + name + counts[2] + counts[3] + numbers + counts[4] + counts[5] + b"wiki"
    old = tmp_path / "old.dat"
    old.write_bytes(legacy)
    found = read_imatrix(old)
    assert np.allclose(found.entries["blk.0.ffn_up.weight"].mean_square, [0.5, 2])
    assert (found.datasets, found.chunk_count) == (("wiki",), 7)
    for cut in (0, 3, 11, 30, 40):
        old.write_bytes(legacy[:cut])
        with pytest.raises(BadInputError, match="no importance matrix"):
            read_imatrix(old)
    old.write_bytes(legacy.replace(numbers, np.array([np.nan, 1], "<f4").tobytes()))
    with pytest.raises(BadInputError, match="not finite"):
        read_imatrix(old)
    with pytest.raises(BadInputError, match="holds no importance matrix"):
        read_imatrix(real_model("smollm2-135m"))


def test_files_of_another_kind_cost_what_their_beginning_does(tmp_path: Path) -> None:
    """600 MB (sparse) that are no importance matrix, or one with absurd counts, are refused unread."""

    def numbers(*values: int) -> bytes:
        return np.array(values, "<i4").tobytes()

    name = b"blk.0.ffn_up.weight"
    entry = numbers(len(name)) + name + numbers(1, 2) + np.ones(2, "<f4").tobytes()
    beginnings = {
        "zeros": b"",
        "text": b"Once upon a time there was a file of words, and it went on and on. ",
        "safetensors": (1 << 16).to_bytes(8, "little") + b'{"a.weight":{"dtype":"BF16"',
        "many entries": numbers(99_999) + entry,
        "negative entries": numbers(-5) + entry,
        "a long name": numbers(2, 500_000_000),
        "a negative name": numbers(2, -1),
        "many columns": numbers(2, len(name)) + name + numbers(1, 100_000_000),
        "negative columns": numbers(2, len(name)) + name + numbers(1, -4),
        "no columns": numbers(2, len(name)) + name + numbers(1, 0),
        "the same name twice": numbers(2) + entry + entry,
        "a long dataset": numbers(1) + entry + numbers(3, 400_000_000),
    }
    path = tmp_path / "matrix.dat"
    for what, beginning in beginnings.items():
        path.write_bytes(beginning)
        os.truncate(path, 600 << 20)
        tracemalloc.start()
        try:
            with pytest.raises(BadInputError, match="no importance matrix") as raised:
                read_imatrix(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20, (what, peak)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    path.write_bytes(numbers(1_000) + entry)  # more entries than there are bytes
    with pytest.raises(BadInputError, match="claims 1000 entries"):
        read_imatrix(path)
