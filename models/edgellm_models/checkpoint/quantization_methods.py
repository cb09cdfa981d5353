"""Which quantization methods of Hugging Face folders are known, how they are packed, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.checkpoint.packed_linears import (
    PackedFormat,
    awq_format,
    compressed_format,
    gptq_format,
)
from edgellm_models.errors import BadInputError

READ_METHODS = frozenset({"gptq", "awq", "compressed-tensors"})
"""quant_method values that have a reader."""

_LABELS: dict[str, str] = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ INT8",
    "exl2": "EXL2 (ExLlamaV2)",
    "exl3": "EXL3 (ExLlamaV3)",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "mlx": "MLX",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""How messages call a quant_method; one that is not listed is named as the file spells it."""

_SIDE_FILES: dict[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that say so where config.json does not, and the method when the file itself names none."""

_ADVICE = (
    "what is read: dense safetensors in F32, F16 or BF16, GPTQ, AWQ and compressed-tensors folders, and GGUF "
    "files; fetch the original or a GGUF of this model, "
    "or convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER), then .dequantize() and "
    ".save_pretrained(OUT)"
)


def quantization_section(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """What a folder says of its quantization: (method, the section that says it); None for a dense model.

    The method is such as ``gptq`` or ``bitsandbytes NF4``.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None:
                return _named(part[key], "unnamed"), _mapping(part[key])
        if part.get("quantization") is not None:
            return _named(part["quantization"], "mlx"), _mapping(part["quantization"])
    for name, method in _SIDE_FILES.items():
        if (folder / name).is_file():
            section = read_json_object(folder / name)
            return _named(section, method), section
    return None


def quantization_method(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The method that a folder names; None for a dense model."""
    found = quantization_section(folder, config)
    return None if found is None else found[0]


def packed_format(folder: Path, config: Mapping[str, Any]) -> PackedFormat | None:
    """How the linears of a folder are packed; None for a dense model.

    BadInputError names a method that is not read, and what of one that is read is not, before any weight is
    looked at.
    """
    found = quantization_section(folder, config)
    if found is None:
        return None
    method, section = found
    if method not in READ_METHODS:
        raise BadInputError(_refusal(folder, method))
    parse = {"gptq": gptq_format, "awq": awq_format, "compressed-tensors": compressed_format}[method]
    return parse(section, folder)


def _mapping(section: object) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {}


def _refusal(folder: Path, method: str) -> str:
    label, _, variant = method.partition(" ")
    label = _LABELS.get(label, label)
    return (
        f"{folder}: this model is quantized with {label}{' ' + variant if variant else ''}, which is not "
        f"read here; {_ADVICE}"
    )


def _named(section: object, default: str) -> str:
    """quant_method of a quantization_config, with what tells the variants of bitsandbytes apart."""
    if not isinstance(section, Mapping):
        return default
    method = section.get("quant_method") or section.get("method")
    if not isinstance(method, str) or not method:
        if section.get("load_in_4bit") or section.get("load_in_8bit"):
            method = "bitsandbytes"
        else:
            producer = section.get("producer")
            named = producer.get("name") if isinstance(producer, Mapping) else None
            method = named if isinstance(named, str) else default
    method = method[:40].lower() if method[:40].isprintable() else repr(method[:40])
    if method.startswith("bitsandbytes"):
        kind = (
            str(section.get("bnb_4bit_quant_type", "4-bit"))[:10].upper()
            if section.get("load_in_4bit")
            else "INT8"
        )
        return f"bitsandbytes {kind}"
    return method
