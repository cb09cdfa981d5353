"""GPTQ, AWQ and compressed-tensors folders as others write them: values, models that run, refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgellm_kernels.int_groups import dequantize_groups
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.bit_packing import (
    pack_awq,
    pack_words,
    unpack_awq,
    unpack_words,
    zeros_from_v1,
    zeros_to_v1,
)
from edgellm_models.checkpoint.tensor_names import hf_name
from edgellm_models.errors import BadInputError
from tests.support.native_cases import needs_native
from tests.support.packed_folders import (
    all_tensors,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    pack_folder,
)
from tests.support.tiny_models import make_tiny


def tiny(folder: Path, arch: str = "llama", **overrides: Any) -> Path:
    overrides = {"num_hidden_layers": 1} | overrides
    return make_tiny(arch, folder, **overrides)


def check_values(folder: Path, values: dict[str, np.ndarray]) -> None:
    opened = open_checkpoint(folder)
    seen = 0
    for name, info in opened.tensors().items():
        theirs = hf_name(opened.architecture, name)
        if theirs in values:
            weight = opened.weight(name)
            assert info.type_name.startswith("INT") and info.shape == values[theirs].shape == weight.shape
            assert np.array_equal(dequantize_groups(weight).numpy(), values[theirs]), name
            seen += 1
    assert seen == len(values) > 0


def compressed_section(bits: int, *, asym: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": not asym, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_is_a_round_trip(bits: int) -> None:
    """E02, E06: random codes of every width come back, and so do zero points of 0 in v1 words."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 96)).astype(np.uint8)
    codes[0, 0] = 0
    words = pack_words(codes, bits)
    assert words.shape == (5, 96 * bits // 32)
    assert np.array_equal(unpack_words(words, bits), codes)
    assert np.array_equal(zeros_from_v1(zeros_to_v1(codes, bits), bits), codes) and 0 in codes
    if bits == 4:
        assert np.array_equal(unpack_awq(pack_awq(codes)), codes)
        assert pack_awq(np.arange(8, dtype=np.uint8)).tolist() == [0x75316420]
        assert zeros_to_v1(np.full(8, 8, np.uint8), 4).tolist() == [0x77777777]
    if bits == 3:
        assert pack_words(np.eye(32, dtype=np.uint8)[10] * np.uint8(7), 3).tolist() == [3 << 30, 1, 0]
        assert pack_words(np.eye(32, dtype=np.uint8)[21] * np.uint8(7), 3).tolist() == [0, 1 << 31, 3]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_values(tmp_path: Path, bits: int, version: int, asym: bool, shuffled: bool) -> None:
    """E04, E06, E07: all widths, both zero point versions, with and without act-order, to the last bit."""
    folder = tiny(tmp_path)
    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": shuffled,
        "sym": not asym,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    make = partial(gptq_tensors, bits=bits, version=version)
    values = pack_folder(
        folder, section, make, bits=bits, group=32, asym=asym, shuffled=shuffled, least_zero=version == 1
    )
    check_values(folder, values)


@pytest.mark.parametrize("name", ["zero index", "no index", "one group", "shuffled without desc_act"])
def test_gptq_group_indices(tmp_path: Path, name: str) -> None:
    """E04: sequential, absent and all-zero indices are no act-order; a real order always counts."""
    folder = tiny(tmp_path)
    group = 256 if name == "one group" else 32
    section = {"quant_method": "gptq", "bits": 4, "group_size": -1 if group == 256 else 32, "sym": True}
    section["desc_act"] = name == "one group"

    def make(stem: str, grid: Any) -> dict[str, torch.Tensor]:
        tensors = gptq_tensors(stem, grid, 4, version=1, with_index=name != "no index")
        if name == "zero index":
            tensors[f"{stem}.g_idx"].zero_()
        return tensors

    shuffled = name.startswith("shuffled")
    check_values(
        folder, pack_folder(folder, section, make, bits=4, group=group, asym=False, shuffled=shuffled)
    )
    if name in ("zero index", "no index"):
        section["desc_act"] = True
        edit_config(folder, quantization_config=section)
        with pytest.raises(BadInputError, match="desc_act is true, but g_idx"):
            open_checkpoint(folder).weight("blk.0.attn_q.weight")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_three_bits_of_gptqmodel(tmp_path: Path) -> None:
    """Old GPTQModels take another constant off v1 words of 3 bits than one per field: both are read."""
    folder = tiny(tmp_path)
    constant = np.array([0x24924924, 0x92492492, 0x49249249], dtype=np.uint32)

    def make(stem: str, grid: Any) -> dict[str, torch.Tensor]:
        tensors = gptq_tensors(stem, grid, 3, version=2)
        words = tensors[f"{stem}.qzeros"].numpy().view(np.uint32)
        words -= np.resize(constant, words.shape[1])
        return tensors

    section: dict[str, Any] = {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True}
    dense = all_tensors(folder)
    check_values(folder, pack_folder(folder, section, make, bits=3, group=32, asym=False))
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    section |= {"sym": False, "meta": {"quantizer": ["gptqmodel:4.2.5"]}}
    check_values(folder, pack_folder(folder, section, make, bits=3, group=32, asym=True))
    edit_config(folder, quantization_config=section | {"meta": {"quantizer": ["gptqmodel:6.0.0"]}})
    with pytest.raises(BadInputError, match="two ways; gptq_v2 has one"):
        open_checkpoint(folder).weight("blk.0.attn_q.weight")


def test_gptq_modules_of_other_bits(tmp_path: Path) -> None:
    """Rules for single modules (dynamic) are honoured: the tensors tell bits and groups."""
    folder = tiny(tmp_path)
    section = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "dynamic": {"+:x": {"bits": 8}},
    }
    dense = all_tensors(folder)
    values = pack_folder(
        folder, section, partial(gptq_tensors, bits=4, version=1), bits=4, group=32, asym=False
    )
    tensors = all_tensors(folder)
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    eight = pack_folder(
        folder, section, partial(gptq_tensors, bits=8, version=1), bits=8, group=16, asym=False
    )
    down = "model.layers.0.mlp.down_proj"
    tensors |= {name: tensor for name, tensor in all_tensors(folder).items() if name.startswith(down)}
    values[f"{down}.weight"] = eight[f"{down}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_values(folder, values)
    edit_config(folder, quantization_config=section | {"dynamic": {}})
    with pytest.raises(BadInputError, match=r"down_proj.*8 bits, but quantization_config says 4"):
        open_checkpoint(folder)


@pytest.mark.parametrize("group", [32, -1])
def test_awq_values(tmp_path: Path, group: int) -> None:
    """Interleaved nibbles along the outputs, true zero points, the other spelling of the config keys."""
    folder = tiny(tmp_path)
    section = {
        "quant_method": "awq",
        "w_bit": 4,
        "q_group_size": group,
        "zero_point": True,
        "version": "GEMM",
    }
    values = pack_folder(folder, section, awq_tensors, bits=4, group=group if group > 0 else 256, asym=True)
    check_values(folder, values)


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_values(tmp_path: Path, bits: int, asym: bool) -> None:
    folder = tiny(tmp_path)
    make = partial(compressed_tensors, bits=bits, asym=asym)
    section = compressed_section(bits, asym=asym)
    check_values(folder, pack_folder(folder, section, make, bits=bits, group=32, asym=asym))


def test_int_quantized_values(tmp_path: Path) -> None:
    """Plain int8 codes with a scale per row."""
    folder = tiny(tmp_path)

    def make(stem: str, grid: Any) -> dict[str, torch.Tensor]:
        codes = torch.from_numpy((grid.codes - 128).astype(np.int8))
        return {f"{stem}.weight": codes, f"{stem}.weight_scale": torch.from_numpy(grid.scales)}

    section = compressed_section(8, asym=False) | {"format": "int-quantized"}
    check_values(folder, pack_folder(folder, section, make, bits=8, group=256, asym=False))


def compressed_with_order(stem: str, grid: Any, *, asym: bool) -> dict[str, torch.Tensor]:
    tensors = compressed_tensors(stem, grid, 4, asym=asym)
    return tensors | {f"{stem}.weight_g_idx": torch.from_numpy(grid.index.astype(np.int32))}


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("actorder", ["group", "GROUP", "dynamic", True])
def test_compressed_order_is_told_or_refused(tmp_path: Path, actorder: object, asym: bool) -> None:
    """E04: an order of the columns needs its index; a file without one is not read as if it had no order."""
    folder = tiny(tmp_path)
    section = compressed_section(4, asym=asym)
    section["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    make = partial(compressed_with_order, asym=asym)
    check_values(folder, pack_folder(folder, section, make, bits=4, group=32, asym=asym, shuffled=True))
    tensors = all_tensors(folder)
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        BadInputError, match=r"_proj': actorder is group, but weight_g_idx.* is missing"
    ) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_compressed_without_order(tmp_path: Path, actorder: object) -> None:
    """What orders only how the codes were chosen leaves columns as they are and needs no index."""
    folder = tiny(tmp_path)
    section = compressed_section(4, asym=False)
    section["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    make = partial(compressed_tensors, bits=4, asym=False)
    check_values(folder, pack_folder(folder, section, make, bits=4, group=32, asym=False))


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_compressed_zero_points_are_there_or_refused(tmp_path: Path, layout: str) -> None:
    """Asymmetric codes without zero points are not read as symmetric ones; a missing key means symmetric."""
    folder = tiny(tmp_path)
    section = compressed_section(8, asym=True) | {"format": layout}

    def make(stem: str, grid: Any) -> dict[str, torch.Tensor]:
        if layout == "pack-quantized":
            return compressed_tensors(stem, grid, 8, asym=False)
        codes = torch.from_numpy((grid.codes - 128).astype(np.int8))
        return {f"{stem}.weight": codes, f"{stem}.weight_scale": torch.from_numpy(grid.scales)}

    values = pack_folder(folder, section, make, bits=8, group=256, asym=False)
    with pytest.raises(BadInputError, match=r"symmetric is false, but weight_zero_point.* is missing"):
        open_checkpoint(folder)
    del section["config_groups"]["group_0"]["weights"]["symmetric"]
    edit_config(folder, quantization_config=section)
    check_values(folder, values)


def test_compressed_groups_that_differ(tmp_path: Path) -> None:
    """A linear is of one of the groups: it may lack what the other speaks of, not what its own does."""
    folder = tiny(tmp_path)
    section = compressed_section(4, asym=False)
    weights = section["config_groups"]["group_0"]["weights"]
    other = {"targets": ["re:.*down_proj"], "weights": weights | {"symmetric": False}}
    section["config_groups"]["group_1"] = other

    def make(stem: str, grid: Any) -> dict[str, torch.Tensor]:
        return compressed_tensors(stem, grid, 4, asym=stem.endswith("down_proj"))

    check_values(folder, pack_folder(folder, section, make, bits=4, group=32, asym=False))
    weights["num_bits"] = 8
    edit_config(folder, quantization_config=section)
    with pytest.raises(BadInputError, match="symmetric is false"):
        open_checkpoint(folder)


def edit_gptq(tensors: dict[str, torch.Tensor], change: str) -> None:
    stem = "model.layers.0.self_attn.o_proj"
    if change == "index too large":
        tensors[f"{stem}.g_idx"][3] = 99
    elif change == "index negative":
        tensors[f"{stem}.g_idx"][3] = -1
    elif change == "scales of other groups":
        tensors[f"{stem}.scales"] = tensors[f"{stem}.scales"][:1].contiguous()
    elif change == "no zeros":
        del tensors[f"{stem}.qzeros"]
    elif change == "scale not finite":
        tensors[f"{stem}.scales"][0, 0] = float("inf")
    elif change == "words of another dtype":
        tensors[f"{stem}.qweight"] = tensors[f"{stem}.qweight"].to(torch.int64)
    elif change == "dense too":
        tensors[f"{stem}.weight"] = torch.zeros(64, 64)
    else:
        tensors[f"{stem}.qweight"] = tensors[f"{stem}.qweight"][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("index too large", "group index names groups 0 to 99"),
        ("index negative", "group index names groups -1"),
        ("scales of other groups", "qzeros has the shape"),
        ("no zeros", "lacks qzeros"),
        ("scale not finite", "a scale is not finite"),
        ("words of another dtype", "qweight is I64"),
        ("dense too", "there twice"),
        ("rows missing", "does not fit a g_idx"),
    ],
)
def test_damaged_linears_are_named(tmp_path: Path, change: str, words: str) -> None:
    """Every part is checked before it is used; the message names the linear."""
    folder = tiny(tmp_path)
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    pack_folder(folder, section, partial(gptq_tensors, bits=4, version=1), bits=4, group=32, asym=False)
    tensors = all_tensors(folder)
    edit_gptq(tensors, change)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInputError, match=words) as error:
        open_checkpoint(folder).weight("blk.0.attn_output.weight")
    assert "o_proj" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "5 bits are not read"),
        ({"quant_method": "gptq", "bits": "4"}, "'bits' must be an integer"),
        ({"quant_method": "gptq"}, "lacks the key 'bits'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size of 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "8 bits are not read; 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "'gemv_fast'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quantized'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "actorder": "sideways"}}},
            },
            "actorder 'sideways'",
        ),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, section: dict[str, Any], words: str) -> None:
    """An unsupported combination is named before any weight is read, never ignored."""
    folder = tiny(tmp_path)
    edit_config(folder, quantization_config=section)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kernels", "hold"),
    [("torch", "dense"), ("torch", "blocks"), pytest.param("native", "auto", marks=needs_native)],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "phi3"])
def test_packed_models_run(tmp_path: Path, arch: str, kernels: str, hold: str) -> None:
    """The logits are those of the dense model with the same values; q, k and v have orders of their own."""
    from edgellm_models.network.build import build_decoder
    from tests.support.paged import relative_error, run_whole

    folder = tiny(tmp_path / "packed", arch)
    dense = tiny(tmp_path / "dense", arch)
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    make = partial(gptq_tensors, bits=4, version=1)
    values = pack_folder(folder, section, make, bits=4, group=32, asym=True, shuffled=True, least_zero=1)
    tensors = all_tensors(dense)
    tensors |= {name: torch.from_numpy(value) for name, value in values.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    prompt = [5, 9, 2, 7]
    theirs = run_whole(build_decoder(open_checkpoint(dense), kernels="torch"), prompt)
    # 16-bit activations are off by more than sums in another order.
    for activations, bound in (("exact", 1e-5), ("auto", 2e-4 if kernels == "native" else 1e-5)):
        decoder = build_decoder(open_checkpoint(folder), hold=hold, kernels=kernels, activations=activations)
        assert relative_error(run_whole(decoder, prompt), theirs) < bound, activations
