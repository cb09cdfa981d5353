"""GGUF weights against gguf's own reader and decoder: real models, tiny files, rare types, views and
lifetimes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.ggml_types import GGML_TYPES, TypeRole
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, DenseWeight
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.gguf_reader import GGUFCheckpoint, open_gguf
from edgellm_models.errors import BadInputError
from tests.support import ggufmut as mut
from tests.support.real_models import real_model


def values(weight: DenseWeight | BlockQuantWeight) -> torch.Tensor:
    if isinstance(weight, BlockQuantWeight):
        return dequantize(weight.data, weight.layout, weight.in_features)
    return weight.data.float()


def open_document(tmp_path: Path, document: mut.Document) -> GGUFCheckpoint:
    (tmp_path / "m.gguf").write_bytes(mut.write(document))
    return open_gguf(tmp_path / "m.gguf")


def theirs(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """gguf's own f32 of a tensor, [N, K] or [N]."""
    raw = np.ascontiguousarray(tensor.data)
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        raw = raw.view(np.uint8)
    decoded = gguf.quants.dequantize(raw, tensor.tensor_type).astype(np.float32)
    return torch.from_numpy(decoded.reshape(tuple(int(n) for n in reversed(tensor.shape))))


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_every_tensor_of_the_real_models_equals_ggufs(name: str) -> None:
    """Names, shapes, types, bytes, and the decoded bits of every tensor; the metadata too."""
    path = real_model(name)
    opened = open_checkpoint(path)
    reader = _reader_without_vocabulary(path)
    assert list(opened.tensors()) == [tensor.name for tensor in reader.tensors]
    assert opened.file_bytes == path.stat().st_size and opened.notices == ()
    for tensor in reader.tensors:
        info = opened.tensors()[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.type_name == tensor.tensor_type.name and info.nbytes == tensor.n_bytes
        if len(info.shape) == 1:
            assert torch.equal(opened.vector(tensor.name), theirs(tensor))
            continue
        weight = opened.weight(tensor.name)
        assert isinstance(weight, BlockQuantWeight) and weight.nbytes == info.nbytes
        rows = slice(
            0, 4096
        )  # an embedding of 262,144 rows: its bytes are compared whole, its values in part
        assert np.array_equal(weight.data.numpy().reshape(-1), tensor.data.reshape(-1))
        part = dequantize(weight.data[rows], weight.layout, weight.in_features)
        expected = gguf.quants.dequantize(np.ascontiguousarray(tensor.data[rows]), tensor.tensor_type)
        assert np.array_equal(part.numpy().view(np.int32), expected.view(np.int32))


def _reader_without_vocabulary(path: Path) -> gguf.GGUFReader:
    """gguf's reader, spared the objects it makes of each token (16 s for Gemma 3)."""

    class Reader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int):  # type: ignore[no-untyped-def]
            size, parts, indices, types = 0, [], [], []
            if raw_type == gguf.GGUFValueType.ARRAY:
                item_type = int(self._get(orig_offs, np.uint32)[0])
                count = int(self._get(orig_offs + 4, np.uint64)[0])
                if item_type == gguf.GGUFValueType.STRING and count > 1000:
                    position = orig_offs + 12
                    raw = memoryview(self.data)
                    for _ in range(count):
                        position += 8 + int.from_bytes(raw[position : position + 8], "little")
                    return position - orig_offs, parts, indices, types
                width = self.gguf_scalar_to_np.get(gguf.GGUFValueType(item_type))
                if width is not None:
                    return 12 + count * np.dtype(width).itemsize, parts, indices, types
            size, parts, indices, types = super()._get_field_parts(orig_offs, raw_type)
            return size, parts, indices, types

    return Reader(path)


def test_metadata_equals_ggufs(tmp_path: Path) -> None:
    """Every key of a tiny file with every value type, through gguf's independent reader."""
    document = mut.tiny_document()
    opened = open_document(tmp_path, document)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {key: item.contents() for key, item in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(opened.metadata) == found


def test_llama_cpps_split_writer_and_ours_agree(tmp_path: Path) -> None:
    """gguf's own writer makes the shards; every tensor is found in whichever it lies."""
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=7)
    document = mut.tiny_document()
    writer.add_block_count(2)
    for tensor in document.tensors:
        writer.add_tensor(tensor.name, np.frombuffer(tensor.data, "<f4").reshape(tensor.ne[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) == 3
    opened = open_checkpoint(shards[1])
    for tensor in document.tensors:
        got = opened.vector(tensor.name) if len(tensor.ne) == 1 else opened.weight(tensor.name).data
        assert got.numpy().tobytes() == tensor.data


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_file_types_are_views_of_the_file(tmp_path: Path, type_name: str) -> None:
    """C17: no copy is made and torch does not warn; the values are gguf's."""
    document = mut.tiny_document(hidden=256, ffn=512, matrix_type=type_name)
    opened = open_document(tmp_path, document)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for info in opened.tensors().values():
            if len(info.shape) == 1:
                assert torch.equal(opened.vector(info.name), theirs(reader[info.name]))
            else:
                weight = opened.weight(info.name)
                assert weight.shape == info.shape and weight.nbytes == info.nbytes
                assert torch.equal(values(weight), theirs(reader[info.name]))
        first, again = opened.weight("blk.1.ffn_up.weight"), opened.weight("blk.1.ffn_up.weight")
    assert first.data.data_ptr() == again.data.data_ptr()


def test_a_mixed_file_loads(tmp_path: Path) -> None:
    """C17: Q4_0, Q6_K, BF16, F16 and F32 weights beside an I32 table, each by its own type."""
    document = mut.tiny_document(layers=1, hidden=256, ffn=256)
    types = {"attn_q": "Q4_0", "attn_k": "Q6_K", "attn_v": "BF16", "attn_output": "F16", "ffn_up": "Q4_K"}
    for stem, type_name in types.items():
        ne = (256, 128) if stem in ("attn_k", "attn_v") else (256, 256)
        document = document.with_tensor(mut.random_tensor(f"blk.0.{stem}.weight", ne, type_name))
    opened = open_document(tmp_path, document.with_tensor(mut.random_tensor("a.table", (8,), "I32")))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for stem, type_name in types.items():
        name = f"blk.0.{stem}.weight"
        assert opened.tensors()[name].type_name == type_name
        assert torch.equal(values(opened.weight(name)), theirs(reader[name]))
    assert opened.notices == ()


CONVERTED = [entry for entry in GGML_TYPES.values() if entry.role is TypeRole.CONVERTED]
NEAR_LOSSLESS = {"TQ1_0", "TQ2_0", "MXFP4", "IQ4_NL"}
F16_AT = {"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": ()}
"""Byte offsets of halves in a block where they are not just at 0."""


def _converted_tensor(type_name: str, rows: int, in_features: int) -> mut.Tensor:
    """Random codes under finite scales near 0.01."""
    kind = next(entry for entry in CONVERTED if entry.name == type_name)
    rng = np.random.default_rng(11)
    blocks = rng.integers(
        0, 256, (rows * in_features // kind.block_elements, kind.block_bytes), dtype=np.uint8
    )
    for offset in F16_AT.get(type_name, (0,)):
        halves = rng.uniform(0.005, 0.02, len(blocks)).astype("<f2")
        blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))  # exponents 2**-9 to 2**-4
    if type_name == "NVFP4":
        blocks[:, :4] = rng.integers(0x20, 0x38, (len(blocks), 4))
    if type_name == "IQ1_M":  # the half's nibbles lie in the top of four u16 scales: 0x2100 is 0.0098
        scales = blocks[:, 48:56].copy().view("<u2")
        scales = (scales & 0x0FFF) | (np.array([0x0, 0x0, 0x1, 0x2], "<u2") << 12)
        blocks[:, 48:56] = scales.view(np.uint8)
    return mut.Tensor("blk.0.ffn_up.weight", (in_features, rows), kind.type_id, blocks.tobytes())


@pytest.mark.parametrize("type_name", [entry.name for entry in CONVERTED])
def test_further_types_are_held_as_q8_0_with_a_notice(
    tmp_path: Path, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every type that gguf decodes: within a step of Q8_0, without loss where the grid allows; memory is
    stated."""
    document = mut.tiny_document(layers=1, hidden=256, ffn=300)
    tensor = _converted_tensor(type_name, 300, 256)
    opened = open_document(tmp_path, document.with_tensor(tensor))
    (notice,) = opened.notices
    assert (
        notice.kind == "held_as_q8_0" and type_name in notice.detail and "0.1 MB of memory" in notice.detail
    )
    monkeypatch.setattr("edgellm_models.checkpoint.ggml_conversion._CHUNK_ELEMENTS", 256 * 7)
    weight = opened.weight(tensor.name)
    assert isinstance(weight, BlockQuantWeight) and weight.layout is BlockLayout.Q8_0
    assert weight.shape == (300, 256) and weight.nbytes == 300 * 272
    reader = {item.name: item for item in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    expected = theirs(reader[tensor.name])
    assert bool(torch.isfinite(expected).all()) and float(expected.abs().max()) > 0
    error = (values(weight) - expected).view(-1, 32)
    largest = expected.view(-1, 32).abs().amax(dim=1, keepdim=True)
    assert bool((error.abs() <= largest * (0.5 / 127 + 2**-11)).all())
    if type_name in NEAR_LOSSLESS:
        exact = (error == 0).all(dim=1).float().mean()
        assert float(exact) > (0.95 if type_name != "IQ4_NL" else 0.9)


def test_a_scale_beside_an_fp4_weight_is_applied(tmp_path: Path) -> None:
    """NVFP4 files keep one factor per tensor; a scale that is not applied is refused, never ignored."""
    document = mut.tiny_document(layers=1, hidden=256, ffn=300)
    tensor = _converted_tensor("NVFP4", 300, 256)
    plain = values(open_document(tmp_path, document.with_tensor(tensor)).weight(tensor.name))
    factor = mut.Tensor("blk.0.ffn_up.scale", (1,), 0, np.float32(0.5).tobytes())
    scaled = open_document(tmp_path, document.with_tensor(tensor).with_tensor(factor))
    assert torch.equal(values(scaled.weight(tensor.name)), plain * 0.5)
    assert [notice.kind for notice in scaled.notices] == ["held_as_q8_0"]
    with pytest.raises(BadInputError, match=r"scaled by 'blk\.0\.ffn_up\.scale'"):
        open_document(tmp_path, document.with_tensor(factor))


def test_values_that_do_not_fit_q8_0_are_an_error(tmp_path: Path) -> None:
    document = mut.tiny_document(layers=1, hidden=256, ffn=300)
    tensor = _converted_tensor("IQ4_NL", 300, 256)
    broken = bytearray(tensor.data)
    broken[1] = 0x7E  # the first scale is NaN
    opened = open_document(
        tmp_path, document.with_tensor(mut.Tensor(tensor.name, tensor.ne, 20, bytes(broken)))
    )
    with pytest.raises(BadInputError, match=r"'blk\.0\.ffn_up\.weight'.*not finite"):
        opened.weight(tensor.name)


def test_wrong_ranks_and_missing_tensors_are_named(tmp_path: Path) -> None:
    opened = open_document(tmp_path, mut.tiny_document())
    with pytest.raises(BadInputError, match=r"'blk\.9\.attn_q\.weight' is missing"):
        opened.weight("blk.9.attn_q.weight")
    with pytest.raises(BadInputError, match="a matrix is needed"):
        opened.weight("output_norm.weight")
    with pytest.raises(BadInputError, match="a vector is needed"):
        opened.vector("token_embd.weight")


def test_an_untied_head_is_offered_beside_the_embedding(tmp_path: Path) -> None:
    """C11: a file without output.weight opens, and one with it offers it, different from the embedding."""
    document = mut.tiny_document()
    assert not open_document(tmp_path, document).has("output.weight")
    both = document.with_tensor(mut.random_tensor("output.weight", (64, 32), "F32"))
    opened = open_document(tmp_path, both)
    assert opened.has("output.weight") and opened.notices == ()
    assert not torch.equal(opened.weight("output.weight").data, opened.weight("token_embd.weight").data)


def test_weights_outlive_the_checkpoint(tmp_path: Path) -> None:
    """A mapping goes with the last tensor made from it, not with the checkpoint; the file is never written
    to."""
    document = mut.tiny_document()
    opened = open_document(tmp_path, document)
    weight = opened.weight("token_embd.weight").data
    expected = weight.clone()
    opened.close()
    del opened
    gc.collect()
    assert torch.equal(weight, expected)
    before = (tmp_path / "m.gguf").read_bytes()
    weight.zero_()
    assert (tmp_path / "m.gguf").read_bytes() == before


def test_opening_loads_no_torch(tmp_path: Path) -> None:
    """Headers are enough to show or plan a model: importing torch would take longer than everything else."""
    (tmp_path / "m.gguf").write_bytes(mut.write(mut.tiny_document()))
    code = (
        "import sys; from pathlib import Path; from edgellm_models.checkpoint import open_checkpoint; "
        f"c = open_checkpoint(Path({str(tmp_path / 'm.gguf')!r})); assert len(c.tensors()) == 20; "
        "assert not {'torch', 'gguf', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.real_model
def test_opening_touches_only_the_header() -> None:
    """Peak memory of opening Gemma 3 is its vocabulary, not its 250 MB."""
    code = (
        "from pathlib import Path; from edgellm_models.checkpoint import open_checkpoint; "
        f"c = open_checkpoint(Path({str(real_model('gemma3-270m'))!r})); "
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, timeout=60, capture_output=True, text=True
    )
    assert int(done.stdout) < 120_000  # KiB
