"""Hugging Face folders: every tensor against safetensors' own loader, and every kind of damage as one clear
error."""

from __future__ import annotations

import json
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.safetensors_header import read_safetensors_header
from edgellm_models.checkpoint.tensor_names import hf_name
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    NotFoundError,
    PermissionDeniedError,
    TransferError,
)
from tests.support.tiny_models import ARCHITECTURES, make_tiny

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tiny(tmp_path: Path, arch: str = "llama", **options: Any) -> Path:
    return make_tiny(arch, tmp_path / "model", **options)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors through safetensors' own loader, as copies: tests overwrite the file in place."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refused(folder: Path, *words: str, kind: type[EdgeLLMError] = BadInputError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_equals_safetensors_own(tmp_path: Path, arch: str, shards: int) -> None:
    folder = tiny(tmp_path, arch, shards=shards)
    expected = stored(folder)
    opened = open_checkpoint(folder)
    assert opened.architecture == arch and opened.notices == () and opened.file_format == "safetensors"
    assert opened.metadata == json.loads((folder / "config.json").read_text())
    assert {info.file_name for info in opened.tensors().values()} == set(expected)
    assert opened.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for name, info in opened.tensors().items():
        assert hf_name(arch, name) == info.file_name
        theirs = expected[info.file_name]
        assert info.shape == tuple(theirs.shape) and info.nbytes == theirs.nbytes
        ours = opened.vector(name) if theirs.ndim == 1 else opened.weight(name).data
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_weights_are_views_in_the_dtype_of_the_file(tmp_path: Path, dtype: str) -> None:
    """D13: half precision stays as it is in the file, vectors are f32, and torch does not warn."""
    folder = tiny(tmp_path, dtype=dtype)
    opened = open_checkpoint(folder)
    expected = stored(folder)["model.layers.0.mlp.up_proj.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = opened.weight("blk.0.ffn_up.weight").data
        gain = opened.vector("output_norm.weight")
    assert (
        weight.dtype
        == expected.dtype
        == {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    )
    assert torch.equal(weight, expected) and gain.dtype == torch.float32
    assert weight.data_ptr() == opened.weight("blk.0.ffn_up.weight").data.data_ptr()
    opened.close()
    del opened
    assert torch.equal(weight, expected)


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    """The format does not ask for alignment: such tensors are copied rather than read unaligned."""
    folder = tiny(tmp_path)
    expected = stored(folder)
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = raw[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - len(header) % 2)
    assert (8 + len(header)) % 2 == 1
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    opened = open_checkpoint(folder)
    weight = opened.weight("blk.1.attn_k.weight").data
    assert torch.equal(weight, expected["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model."], ids=["before 4.52", "since 4.52"]
)
def test_the_text_part_of_a_multimodal_gemma_is_found(tmp_path: Path, prefix: str) -> None:
    """Nested config and prefixed names; vision tensors are ignored with a notice."""
    folder = tiny(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    tensors = stored(folder)
    nested = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    nested["vision_tower.vision_model.head.weight"] = torch.zeros(2, 2)
    nested["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(2, 2)
    rewrite(folder, nested)
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    opened = open_checkpoint(folder)
    assert opened.architecture == "gemma3"
    assert [notice.kind for notice in opened.notices] == ["vision_ignored"] and "2 vision" in opened.notices[
        0
    ].detail
    for name, tensor in tensors.items():
        info = next(
            info for info in opened.tensors().values() if info.file_name == name.replace("model.", prefix, 1)
        )
        assert hf_name("gemma3", info.name) == name and info.shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba9"}, "'mamba9'"),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "'mixtral'"),
        ({"model_type": ..., "architectures": ["Mamba9ForCausalLM"]}, "'mamba9'"),
        ({"model_type": ..., "architectures": ...}, "names no architecture"),
        ({"model_type": "gemma3", "text_config": {"model_type": "t5"}}, "t5"),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_unknown_architectures_list_the_supported_ones(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """C15: never loaded as another family."""
    folder = tiny(tmp_path)
    edit_json(folder / "config.json", **changes)
    message = refused(folder, words)
    if "must be" not in message:
        assert all(family in message for family in ARCHITECTURES)


def test_a_class_name_stands_in_for_model_type(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen2")
    edit_json(folder / "config.json", model_type=...)
    assert open_checkpoint(folder).architecture == "qwen2"


@pytest.mark.parametrize("cut", [1, 1024, 100_000])
def test_a_shard_shorter_than_its_header_says_is_refused(tmp_path: Path, cut: int) -> None:
    """D03: the declared and the real size are stated; nothing reads as zeros."""
    folder = tiny(tmp_path, shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    refused(folder, path.name, f"declares {len(raw):,} bytes", f"it has {len(raw) - cut:,}", "truncated")


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        (b"not json", 8, "not valid JSON"),
        (b"[1]", 8, "not a JSON object"),
        (b"\xff\xfe{}", 8, "not valid JSON"),
        (b"[" * 100_000, 8, "header"),
        (b'{"a":' * 100_000, 8, "header"),
        (b'{"a":' + b"9" * 5000 + b"}", 8, "not valid JSON"),
        (b'{"a":{},"a":{}}', 8, "'a' occurs twice"),
        ({"a": 3}, 8, "not described"),
        ({"a": entry("Q9")}, 8, "unknown dtype 'Q9'"),
        ({"a": {}}, 8, "unknown dtype"),
        ({"a": entry(shape=[-2])}, 8, "impossible shape"),
        ({"a": entry(shape=[True])}, 8, "impossible shape"),
        ({"a": entry(shape=[1.5])}, 8, "impossible shape"),
        ({"a": entry(shape=[1 << 60])}, 8, "impossible shape"),
        ({"a": entry(shape=[1] * 9)}, 8, "impossible shape"),
        ({"a": entry(offsets=[0, 1 << 60])}, 8, "impossible data_offsets"),
        ({"a": entry(offsets=[8, 0])}, 8, "span"),
        ({"a": entry(offsets=[0, 4])}, 8, "needs 8 bytes"),
        ({"a": entry(shape=[1 << 40, 1 << 40])}, 8, "needs"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "overlaps 'a'"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "leaves a hole"),
        ({"a": entry(offsets=[4, 12])}, 12, "leaves a hole after the header"),
        ({"a": entry()}, 4, "truncated"),
        ({"a": entry()}, 16, "longer than its header says"),
    ],
)
def test_damaged_headers_are_refused(header: Any, data_bytes: int, words: str) -> None:
    """D03: header length, JSON, dtypes, shapes, offsets, overlaps and holes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)
    with pytest.raises(BadInputError) as caught:
        read_safetensors_header(data, len(data), "f")
    assert words in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 1 << 33])
def test_impossible_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    """D03: before anything is read."""
    folder = tiny(tmp_path)
    raw = bytearray((folder / SINGLE).read_bytes())
    struct.pack_into("<Q", raw, 0, length)
    (folder / SINGLE).write_bytes(raw)
    refused(folder, f"{length:,}", f"{len(raw):,}")


def test_a_stale_index_lists_both_sides(tmp_path: Path) -> None:
    """D05: the shards were renamed, the index was not."""
    folder = tiny(tmp_path, shards=2)
    for number in (1, 2):
        old = folder / f"model-0000{number}-of-00002.safetensors"
        old.rename(folder / f"weights-{number}.safetensors")
    refused(folder, "does not match", "model-00001-of-00002.safetensors", "weights-1.safetensors")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    """D05: exit 66 where nothing else is there to be meant."""
    folder = tiny(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors", "1 of 3", kind=NotFoundError)


def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path: Path) -> None:
    """D05: names that no shard has, or that lie in another shard or in two."""
    folder = tiny(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    good = dict(index["weight_map"])
    first, second = sorted(set(good.values()))
    edit_json(folder / INDEX, weight_map=good | {"model.ghost.weight": first})
    refused(folder, "'model.ghost.weight'", "no file has it")
    moved = next(name for name, file in good.items() if file == first)
    edit_json(folder / INDEX, weight_map=good | {moved: second})
    refused(folder, repr(moved), f"it is in {first}")
    edit_json(folder / INDEX, weight_map=good)
    with safe_open(folder / first, framework="pt") as file:
        doubled = {moved: file.get_tensor(moved)}
    with safe_open(folder / second, framework="pt") as file:
        doubled |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(doubled, folder / second)
    refused(folder, repr(moved), "in both")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", "..", "", 5, "a\0b"]
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    folder = tiny(tmp_path, shards=2)
    (tmp_path / "x.safetensors").write_bytes(b"")
    edit_json(folder / INDEX, weight_map={"model.norm.weight": name})
    refused(folder, "no file name")


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"x", b'{"weight_map": []}', b'{"weight_map": {}}', b"[" * 99_999]
)
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = tiny(tmp_path, shards=2)
    (folder / INDEX).write_bytes(content)
    refused(folder, INDEX)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"{", b"[" * 99_999, b"\xff\xfe", b'{"a": ' + b"1" * 5000 + b"}"]
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = tiny(tmp_path)
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json")


def test_a_config_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    (folder / "config.json").write_bytes(b" " * ((16 << 20) + 1))
    refused(folder, "config.json", "too large")


def test_missing_tensors_are_named_quickly(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    tensors = stored(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, tensors)
    refused(folder, "'model.layers.1.mlp.up_proj.weight' is missing")
    edit_json(folder / "config.json", num_hidden_layers=10**9)
    refused(folder, "'model.layers.1.mlp.up_proj.weight' is missing")
    edit_json(folder / "config.json", num_hidden_layers="2")
    refused(folder, "num_hidden_layers", "the string '2'")


@pytest.mark.parametrize("head", ["present", "absent"])
@pytest.mark.parametrize("tied", [True, False, None])
def test_the_head_is_offered_when_it_is_in_the_file(tmp_path: Path, head: str, tied: bool | None) -> None:
    """D06, C11: the reader opens every combination and says what is there; the network decides which is
    used."""
    folder = tiny(tmp_path, "qwen2", head=head, tie_word_embeddings=tied)
    if tied is None:
        edit_json(folder / "config.json", tie_word_embeddings=...)
    opened = open_checkpoint(folder)
    assert opened.has("output.weight") == (head == "present") and opened.notices == ()


def test_unknown_tensors_are_a_notice_and_old_buffers_are_not(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    tensors = stored(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    rewrite(folder, tensors)
    assert open_checkpoint(folder).notices == ()
    tensors["model.strange.weight"] = torch.ones(8)
    rewrite(folder, tensors)
    (notice,) = open_checkpoint(folder).notices
    assert notice.kind == "unknown_tensors" and "model.strange.weight" in notice.detail


def test_the_same_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    tensors = stored(folder)
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    refused(rewrite(folder, tensors), "norm.weight", "the same weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8])
def test_other_dtypes_are_refused_by_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny(tmp_path)
    tensors = stored(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    refused(rewrite(folder, tensors), repr(name), "not read as a weight", "F32, F16, BF16")


SCALES = {
    "scalar": ((), "_scale"),
    "one": ((1,), "_scale"),
    "rows": ((256, 1), "_scale"),
    "rows flat": ((256,), "_scale"),
    "blocks of 128": ((2, 2), "_scale_inv"),
    "blocks of 32 by 64": ((8, 4), "_scale_inv"),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_f8_with_scales_becomes_bf16(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    """Scalar, per row and per block; the value is the f32 product, rounded once, and the memory is stated."""
    shape, suffix = SCALES[kind]
    folder = tiny(tmp_path, quantizable=True)
    tensors = stored(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].shape == (256, 256)
    packed = tensors[name].to(dtype)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    rewrite(folder, tensors | {name: packed, name + suffix: scale})
    opened = open_checkpoint(folder)
    (notice,) = opened.notices
    assert notice.kind == "f8_held_as_bf16" and "1 F8 tensors" in notice.detail
    expected = packed.float()
    for row in range(0, 256, 16):
        for column in range(0, 256, 16):
            if scale.numel() == 1:
                factor = scale.reshape(())
            elif scale.numel() == 256:
                factor = scale.reshape(-1)[row : row + 16, None]
            else:
                factor = scale[row * shape[0] // 256, column * shape[1] // 256]
            expected[row : row + 16, column : column + 16] *= factor
    assert torch.equal(opened.weight("blk.0.attn_q.weight").data, expected.to(torch.bfloat16))


def test_f8_blocks_that_do_not_divide_the_weight(tmp_path: Path) -> None:
    """The last blocks of 128 are cut off by the weight's edge."""
    folder = tiny(tmp_path, hidden_size=192, intermediate_size=320)
    tensors = stored(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    packed = tensors[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    rewrite(folder, tensors | {name: packed, name + "_scale_inv": scale})
    weight = open_checkpoint(folder).weight("blk.0.ffn_up.weight").data
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:320, :192]
    assert torch.equal(weight, (packed.float() * wide).to(torch.bfloat16))


def test_f8_without_a_fitting_scale_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    tensors = stored(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    packed = tensors[name].to(torch.float8_e4m3fn)
    refused(rewrite(folder, tensors | {name: packed}), repr(name), "without a scale")
    wrong = {name: packed, name + "_scale": torch.ones(3, 5)}
    refused(rewrite(folder, tensors | wrong), "[3, 5]", "does not fit")
    integer = {name: packed, name + "_scale": torch.ones(1, dtype=torch.int32)}
    refused(rewrite(folder, tensors | integer), "I32 scales")
    scaled = {name + "_scale": torch.ones(1)}
    refused(rewrite(folder, tensors | scaled), "supported for F8 only")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes NF4",
        ),
        ({"load_in_8bit": True}, "bitsandbytes INT8"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "exl3"}, "EXL3"),
        ({"quant_method": "exl2"}, "EXL2"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "brand-new"}, "brand-new"),
        ({"producer": {"name": "modelopt"}}, "NVIDIA ModelOpt"),
        ({}, "unnamed"),
        ([], "unnamed"),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_quantized_folders_are_refused_by_method(
    tmp_path: Path, section: Any, words: str, place: str
) -> None:
    """Before any weight is read: the folder's weight file is not even there."""
    folder = tiny(tmp_path)
    (folder / SINGLE).unlink()
    nested = {"model_type": "llama", "quantization_config": section}
    edit_json(folder / "config.json", **{place: section if place == "quantization_config" else nested})
    refused(folder, f"quantized with {words}", "what is read", "GGUF", "convert")


@pytest.mark.parametrize(
    ("file_name", "content", "words"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "said to be gptq, but no"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "said to be awq, but no"),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {}}, "NVIDIA ModelOpt"),
    ],
)
def test_a_side_file_alone_gives_the_method(tmp_path: Path, file_name: str, content: Any, words: str) -> None:
    folder = tiny(tmp_path)
    edit_json(folder / file_name, **content)
    refused(folder, words)


def test_mlx_folders_are_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    edit_json(folder / "config.json", quantization={"group_size": 64, "bits": 4})
    refused(folder, "MLX")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    folder = tiny(tmp_path)
    (folder / SINGLE).rename(folder / name)
    refused(folder, name, "save_pretrained")
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    refused(tmp_path / name, "pickle", "save_pretrained")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git-LFS"),
        (b"", "empty"),
        (b"<!doctype html><p>404", "HTML"),
        (b"GGUF" + bytes(100), "GGUF"),
    ],
)
def test_weight_files_of_other_kinds_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    """C08 within a folder: a clone without Git LFS is the usual one."""
    folder = tiny(tmp_path)
    (folder / SINGLE).write_bytes(content)
    refused(folder, SINGLE, words)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError(13, "no"), PermissionDeniedError), (OSError(5, "I/O error"), TransferError)],
)
def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[EdgeLLMError]
) -> None:
    folder = tiny(tmp_path)
    (folder / SINGLE).unlink()

    def refuse(_: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "iterdir", refuse)
    refused(folder, str(folder), kind=kind)


def test_folders_without_a_model_say_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "LoRA adapter")
    folder = tiny(tmp_path)
    (folder / SINGLE).rename(folder / "other.safetensors")
    refused(folder, "other.safetensors")
    refused(folder / "other.safetensors", "safetensors file", "folder")
    (folder / "other.safetensors").unlink()
    refused(folder, "no weights")


def _good_file() -> bytes:
    tensors = {"a": entry(), "b": entry("BF16", (2, 3), (8, 20)), "c": entry("I64", (), (20, 28))}
    raw = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(28)


@settings(max_examples=400, deadline=20_000)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(_good_file()) - 29), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, len(_good_file()))),
)
def test_random_damage_gives_an_error_or_a_valid_header(
    flips: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(_good_file())
    for position, value in flips:
        data[position] = value
    raw = bytes(data[:cut])
    try:
        tensors = read_safetensors_header(raw, len(raw), "f")
    except EdgeLLMError as error:
        assert "\n" not in str(error)
        return
    for tensor in tensors.values():
        assert 8 <= tensor.start <= tensor.start + tensor.nbytes <= len(raw)
        assert tensor.nbytes >= math.prod(tensor.shape) // 2
