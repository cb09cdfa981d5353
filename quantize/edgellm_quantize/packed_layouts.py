"""Quantized linears as the tensors of GPTQ, AWQ and compressed-tensors folders, with their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm_models.checkpoint.bit_packing import pack_awq, pack_words, zeros_to_v1
from edgellm_models.errors import BadInputError, EngineError, UsageError
from edgellm_quantize.recipe import QuantizedLinear, QuantizeRecipe

TensorShapes = dict[str, tuple[str, tuple[int, ...]]]
"""Last part of the name -> (safetensors dtype, shape)."""


def check_shape(recipe: QuantizeRecipe, shape: tuple[int, int], name: str) -> None:
    """UsageError for a group size that does not divide a linear of this shape [N, K], BadInputError where the
    format cannot hold one whatever the options are."""
    rows, columns = shape
    group = _group(recipe, columns)
    if columns % group:
        fits = [size for size in (128, 64, 32) if not columns % size]
        way_out = f"--group-size {' or '.join(map(str, fits)) or -1}"
        raise UsageError(f"{name}: groups of {group} do not divide {columns} input columns; take {way_out}")
    need = {"gptq": (_per_words(recipe.bits), _per_words(recipe.bits)), "awq": (8, 1)}
    row_unit, column_unit = need.get(recipe.format, (1, _per_words(recipe.bits)))
    if rows % row_unit or columns % column_unit:
        raise BadInputError(
            f"{name}: {rows} x {columns} weights cannot be packed as {recipe.format} of {recipe.bits} bits: "
            f"the outputs must be a multiple of {row_unit} and the inputs of {column_unit}"
        )


def _per_words(bits: int) -> int:
    """Codes after which a bit stream ends at a word again."""
    return 32 if bits == 3 else 32 // bits


def _group(recipe: QuantizeRecipe, columns: int) -> int:
    assert recipe.group_size is not None
    return columns if recipe.group_size == -1 else recipe.group_size


def packed_shapes(recipe: QuantizeRecipe, shape: tuple[int, int]) -> TensorShapes:
    """The tensors of a linear of this shape [N, K], before there are codes."""
    rows, columns = shape
    groups, bits = columns // _group(recipe, columns), recipe.bits
    if recipe.format == "gptq":
        return {
            "qweight": ("I32", (columns * bits // 32, rows)),
            "qzeros": ("I32", (groups, rows * bits // 32)),
            "scales": ("F16", (groups, rows)),
            "g_idx": ("I32", (columns,)),
        }
    if recipe.format == "awq":
        return {
            "qweight": ("I32", (columns, rows // 8)),
            "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows)),
        }
    shapes: TensorShapes = {
        "weight_packed": ("I32", (rows, columns * bits // 32)),
        "weight_scale": ("F16", (rows, groups)),
        "weight_shape": ("I64", (2,)),
    }
    if not recipe.symmetric:
        shapes["weight_zero_point"] = ("I32", (-(-rows * bits // 32), groups))
    return shapes


def pack_linear(
    recipe: QuantizeRecipe, linear: QuantizedLinear, name: str
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of ``packed_shapes``. EngineError names a linear that readers would not read as meant."""
    _check_values(recipe, linear, name)
    codes = linear.codes.numpy()
    rows, columns = codes.shape
    scales = linear.scales.numpy().astype(np.float16)
    middle = 1 << (linear.bits - 1)
    zeros = (
        np.full(scales.shape, middle, dtype=np.uint8) if linear.zeros is None else linear.zeros.numpy()
    ).astype(np.uint8)
    if recipe.format == "gptq":
        across = np.ascontiguousarray(zeros.T)
        v1 = recipe.checkpoint_format == "gptq"
        return {
            "qweight": pack_words(codes, linear.bits).T,
            "qzeros": zeros_to_v1(across, linear.bits) if v1 else pack_words(across, linear.bits),
            "scales": scales.T,
            "g_idx": (np.arange(columns) // linear.group_size).astype(np.int32),
        }
    if recipe.format == "awq":
        return {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T), "scales": scales.T}
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "weight_packed": pack_words(codes, linear.bits),
        "weight_scale": scales,
        "weight_shape": np.array([rows, columns], dtype=np.int64),
    }
    if not recipe.symmetric:
        padded = np.zeros((zeros.shape[1], -(-rows * linear.bits // 32) * 32 // linear.bits), dtype=np.uint8)
        padded[:, :rows] = zeros.T
        tensors["weight_zero_point"] = pack_words(padded, linear.bits).T
    return tensors


def _check_values(recipe: QuantizeRecipe, linear: QuantizedLinear, name: str) -> None:
    import torch

    scales = linear.scales
    high = (1 << linear.bits) - 1
    if linear.bits != recipe.bits or (recipe.symmetric and linear.zeros is not None):
        raise EngineError(
            f"{name}: {linear.bits} bits {'with' if linear.zeros is not None else 'without'} zeros"
        )
    if not bool(torch.isfinite(scales).all()) or not bool((scales.to(torch.float16).float() == scales).all()):
        raise EngineError(f"{name}: a scale is no finite f16 number")
    if bool((scales == 0).any()) or int(linear.codes.max()) > high:
        raise EngineError(f"{name}: a scale is 0, or a code is above {high}")
    lowest = 1 if recipe.format == "gptq" and recipe.checkpoint_format == "gptq" else 0
    if linear.zeros is not None and not lowest <= int(linear.zeros.min()) <= int(linear.zeros.max()) <= high:
        raise EngineError(f"{name}: zero points must be from {lowest} to {high} in this format")


def quantization_config(recipe: QuantizeRecipe, meta: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of config.json."""
    if recipe.format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "desc_act": False,
            "sym": recipe.symmetric,
            "lm_head": False,
            "checkpoint_format": recipe.checkpoint_format,
            "format": recipe.checkpoint_format,
            "pack_dtype": "int32",
            "damp_percent": recipe.damping,
            "true_sequential": True,
            "static_groups": False,
            "meta": dict(meta),
        }
    if recipe.format == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": recipe.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
            "meta": dict(meta),
        }
    channel = recipe.group_size == -1
    weights = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": recipe.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else recipe.group_size,
        "actorder": None,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "meta": dict(meta),
    }


def vllm_refusals(section: Mapping[str, Any], linears: Mapping[str, tuple[int, int]]) -> list[str]:
    """Why vLLM would not load this, one sentence each; empty where it does.

    Its published rules (auto_gptq.py, auto_awq.py and the Marlin kernels), as a function of the
    quantization_config and the shapes [N, K] of the quantized linears by Hugging Face name.
    """
    method, bits, group = section.get("quant_method"), section.get("bits"), section.get("group_size")
    found = []
    if method == "gptq":
        missing = [key for key in ("bits", "group_size", "desc_act", "sym") if key not in section]
        if missing:
            found.append(f"GPTQ needs the keys {', '.join(missing)}")
        if bits not in (4, 8) or not section.get("sym"):
            kind = "symmetric" if section.get("sym") else "asymmetric"
            found.append(f"GPTQ of {bits} bits, {kind}: vLLM has 4 and 8 bits, symmetric")
    elif method == "awq":
        if bits != 4 or "zero_point" not in section:
            found.append(f"AWQ of {bits} bits: vLLM has 4 bits with the key zero_point")
    else:
        return []
    if group not in (-1, 32, 64, 128):
        found.append(f"groups of {group}: vLLM has 32, 64, 128 and whole rows")
    odd = [name for name, (rows, columns) in linears.items() if rows % 64 or columns % 128]
    if odd and method == "gptq":
        found.append(
            f"{len(odd)} linears ({odd[0]} ...) are no multiple of 64 x 128: older vLLM refuses them"
        )
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        found += _split_fusions(linears, parts)
    return found


def _split_fusions(linears: Mapping[str, Any], parts: tuple[str, ...]) -> list[str]:
    """Linears that vLLM joins must all be quantized, or none."""
    seen: dict[str, set[str]] = {}
    for name in linears:
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if last in parts:
            seen.setdefault(stem, set()).add(last)
    broken = [stem for stem, found in seen.items() if len(found) != len(parts)]
    if not broken:
        return []
    return [f"{broken[0]}: only {', '.join(sorted(seen[broken[0]]))} of {', '.join(parts)} are quantized"]
