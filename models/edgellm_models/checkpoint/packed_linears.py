"""Finds the quantized linears of a Hugging Face folder and checks their tensors before they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.safetensors_header import SafeTensor
from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import metadata_bool, metadata_int, shown

_SCALE_DTYPES = ("F16", "BF16", "F32")
_MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class CompressedScheme:
    """What one group of a compressed-tensors configuration says of the weights that it is for."""

    bits: int
    symmetric: bool
    ordered: bool
    """Groups are of columns in another order (actorder group), which a weight_g_idx tells."""


@dataclass(frozen=True)
class PackedFormat:
    """What a folder's quantization_config says of all its linears."""

    method: str
    """gptq, awq, pack-quantized or int-quantized (the last two of compressed-tensors)."""
    bits: int | None
    """None: only the tensors tell."""
    group_size: int | None
    """-1 is one group per row; None: only the tensors tell."""
    stored_minus_one: bool = False
    """GPTQ v1."""
    symmetric: bool = False
    gptqmodel: int | None = None
    """Major version of the GPTQModel that wrote the file; None: another tool, or not stated."""
    desc_act: bool = False
    mixed: bool = False
    """Single modules may have other bits and groups than the whole."""
    schemes: tuple[CompressedScheme, ...] = ()
    """Of compressed-tensors: each must be one linear's at least; which one's, its tensors tell."""


@dataclass(frozen=True)
class PackedLinear:
    """One quantized linear: its tensors, whose shapes go together."""

    stem: str
    """The name in the file without its last part."""
    form: PackedFormat
    bits: int
    out_features: int
    in_features: int
    tensors: Mapping[str, SafeTensor]
    """By last part of the name: ``qweight``, ``scales`` ..."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "int-quantized": ("weight", "weight_scale", "weight_zero_point"),
}
_VECTORS = ("g_idx", "weight_g_idx", "weight_shape")
_NEEDED = {
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
    "int-quantized": ("weight", "weight_scale"),
}


def find_packed(
    form: PackedFormat,
    tensors: Mapping[str, SafeTensor],
    read_sizes: Callable[[str], list[int]],
    label: str,
) -> dict[str, PackedLinear]:
    """Every quantized linear of the files, by stem. BadInputError names the tensor that does not fit.

    Args:
        tensors: all tensors of the folder by name.
        read_sizes: the values of a small integer tensor (weight_shape) by name.
    """
    main = _NEEDED[form.method][0]
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind != main or not stem or (form.method == "int-quantized" and tensor.dtype != "I8"):
            continue
        parts = {
            suffix: tensors[f"{stem}.{suffix}"]
            for suffix in _SUFFIXES[form.method]
            if f"{stem}.{suffix}" in tensors
        }
        missing = [suffix for suffix in _NEEDED[form.method] if suffix not in parts]
        if missing:
            raise BadInputError(f"{label}: {stem!r} has {main} but lacks {shown(missing)}")
        found[stem] = _check(form, stem, parts, read_sizes, f"{label}: {stem!r}")
    if not found:
        raise BadInputError(
            f"{label}: it is said to be {form.method}, but no tensor of the files ends in .{main}"
        )
    return found


def _check(
    form: PackedFormat,
    stem: str,
    parts: Mapping[str, SafeTensor],
    read_sizes: Callable[[str], list[int]],
    label: str,
) -> PackedLinear:
    for suffix, tensor in parts.items():
        wanted = _wanted_dtypes(form.method, suffix)
        if tensor.dtype not in wanted:
            raise BadInputError(f"{label}: {suffix} is {tensor.dtype}, not {' or '.join(wanted)}")
        if 0 in tensor.shape or len(tensor.shape) != (1 if suffix in _VECTORS else 2):
            raise BadInputError(f"{label}: {suffix} has the shape {list(tensor.shape)}")
    if form.method == "gptq":
        bits, rows, columns = _gptq_sizes(form, parts, label)
    elif form.method == "awq":
        bits, columns, rows = 4, parts["qweight"].shape[0], 8 * parts["qweight"].shape[1]
        _same_shape(parts["qzeros"], (parts["scales"].shape[0], rows // 8), "qzeros", label)
        _same_shape(parts["scales"], (parts["scales"].shape[0], rows), "scales", label)
    else:
        bits, rows, columns = _compressed_sizes(form, parts, read_sizes, label)
    if bits not in (2, 3, 4, 8):
        raise BadInputError(f"{label}: codes of {bits} bits are not read; 2, 3, 4 and 8 are")
    if bits != 8 and columns % 2:
        raise BadInputError(f"{label}: {columns} input columns of {bits} bits: an odd number is not read")
    return PackedLinear(stem, form, bits, rows, columns, parts)


def _wanted_dtypes(method: str, suffix: str) -> tuple[str, ...]:
    if suffix in ("scales", "weight_scale"):
        return _SCALE_DTYPES
    if suffix == "weight_shape":
        return ("I64", "I32")
    if suffix == "weight" or (suffix == "weight_zero_point" and method == "int-quantized"):
        return ("I8",)
    if suffix == "weight_g_idx":
        return ("I32", "I64")
    return ("I32",)


def _same_shape(tensor: SafeTensor, shape: tuple[int, ...], suffix: str, label: str) -> None:
    if tensor.shape != shape:
        raise BadInputError(f"{label}: {suffix} has the shape {list(tensor.shape)}, not {list(shape)}")


def _gptq_sizes(form: PackedFormat, parts: Mapping[str, SafeTensor], label: str) -> tuple[int, int, int]:
    """(bits, rows, columns). The group index, where there is one, tells the columns and so the bits."""
    words, rows = parts["qweight"].shape
    assert form.bits is not None
    bits = form.bits
    if "g_idx" in parts:
        columns = parts["g_idx"].shape[0]
        bits = 32 * words // columns
        if bits * columns != 32 * words:
            raise BadInputError(f"{label}: qweight {[words, rows]} does not fit a g_idx of {columns}")
        if bits != form.bits and not form.mixed:
            raise BadInputError(
                f"{label}: its tensors hold {bits} bits, but quantization_config says {form.bits}"
            )
    elif form.mixed:
        raise BadInputError(
            f"{label}: quantization_config has rules for single modules (dynamic), and without g_idx the "
            "tensors do not tell which bits this one has"
        )
    columns = 32 * words // bits
    if 32 * words % bits or rows * bits % 32:
        raise BadInputError(f"{label}: qweight {[words, rows]} holds no whole codes of {bits} bits")
    groups = parts["scales"].shape[0]
    _same_shape(parts["scales"], (groups, rows), "scales", label)
    _same_shape(parts["qzeros"], (groups, rows * bits // 32), "qzeros", label)
    return bits, rows, columns


def _compressed_sizes(
    form: PackedFormat,
    parts: Mapping[str, SafeTensor],
    read_sizes: Callable[[str], list[int]],
    label: str,
) -> tuple[int, int, int]:
    if form.method == "int-quantized":
        rows, columns = parts["weight"].shape
        bits = 8
    else:
        sizes = read_sizes(parts["weight_shape"].name)
        if len(sizes) != 2 or not all(0 < size < 1 << 31 for size in sizes):
            raise BadInputError(f"{label}: weight_shape is {str(sizes)[:60]}, two sizes are needed")
        rows, columns = sizes
        words = parts["weight_packed"].shape[1]
        fits = [bits for bits in (2, 4, 8) if -(-columns * bits // 32) == words]
        if form.bits in fits:
            fits = [form.bits]
        if parts["weight_packed"].shape[0] != rows or len(fits) != 1:
            found = list(parts["weight_packed"].shape)
            raise BadInputError(
                f"{label}: weight_packed {found} holds no {rows} x {columns} codes of 2, 4 or 8 bits"
            )
        bits = fits[0]
    groups = parts["weight_scale"].shape[1]
    _same_shape(parts["weight_scale"], (rows, groups), "weight_scale", label)
    if "weight_zero_point" in parts:
        packed_rows = rows if form.method == "int-quantized" else -(-rows * bits // 32)
        _same_shape(parts["weight_zero_point"], (packed_rows, groups), "weight_zero_point", label)
    _check_scheme(form, bits, parts, label)
    return bits, rows, columns


def _check_scheme(form: PackedFormat, bits: int, parts: Mapping[str, SafeTensor], label: str) -> None:
    """A linear without zero points or an order that its configuration speaks of would decode to other values.

    Where groups of the configuration differ, it must lack nothing of one of them.
    """
    lacking = []
    for scheme in form.schemes:
        if scheme.bits != bits and len(form.schemes) > 1:
            continue
        if not scheme.symmetric and "weight_zero_point" not in parts:
            lacking.append("symmetric is false, but weight_zero_point, which holds the zero points,")
        elif scheme.ordered and "weight_g_idx" not in parts:
            lacking.append("actorder is group, but weight_g_idx, which tells the order of the columns,")
        else:
            return
    if lacking:
        raise BadInputError(f"{label}: {lacking[0]} is missing")


def group_size_of(linear: PackedLinear, groups: int, label: str) -> int:
    """Columns of a group: what the config says where it gives this many groups, else what divides evenly."""
    columns, size = linear.in_features, linear.form.group_size
    if size is not None:
        size = columns if size == -1 else size
        if -(-columns // size) == groups:
            return size
        if not linear.form.mixed:
            raise BadInputError(
                f"{label}: {groups} scales a row for {columns} input columns, but quantization_config says "
                f"groups of {size}"
            )
    if columns % groups:
        raise BadInputError(f"{label}: {groups} scales a row do not divide {columns} input columns")
    return columns // groups


def gptq_format(section: Mapping[str, Any], folder: Path) -> PackedFormat:
    """From the quantization_config of a GPTQ folder. BadInputError names what is not read."""
    where = f"{folder}: quantization_config"
    bits, group_size = _bits_and_group(section, where, (2, 3, 4, 8))
    layout = section.get("checkpoint_format") or section.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or section.get("is_marlin_format"):
        raise BadInputError(
            f"{where}: GPTQ weights in the layout {str(layout)[:40]!r} are not read; gptq and gptq_v2 are"
        )
    if section.get("pack_dtype", "int32") not in ("int32", None):
        raise BadInputError(f"{where}: pack_dtype {str(section['pack_dtype'])[:20]!r} is not read; int32 is")
    return PackedFormat(
        "gptq",
        bits,
        group_size,
        stored_minus_one=layout == "gptq",
        symmetric=bool(section.get("sym", True)),
        gptqmodel=_gptqmodel_version(section),
        desc_act=bool(section.get("desc_act", False)),
        mixed=bool(section.get("dynamic")),
    )


def _gptqmodel_version(section: Mapping[str, Any]) -> int | None:
    meta = section.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for name in quantizer if isinstance(quantizer, list) else [quantizer]:
        if isinstance(name, str) and (match := re.match(r"gptqmodel:(\d{1,4})\.", name)):
            return int(match[1])
    return None


def awq_format(section: Mapping[str, Any], folder: Path) -> PackedFormat:
    """From the quantization_config of an AWQ folder. BadInputError names what is not read."""
    where = f"{folder}: quantization_config"
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    section = {names.get(key, key): value for key, value in section.items()}
    bits, group_size = _bits_and_group(section, where, (4,))
    version = str(section.get("version") or "gemm").lower()
    if version not in ("gemm", "exllama"):
        raise BadInputError(
            f"{where}: AWQ weights of the version {version[:20]!r} are not read; gemm is (gemv and old "
            "llm-awq files lay their codes out otherwise)"
        )
    return PackedFormat("awq", bits, group_size)


def compressed_format(section: Mapping[str, Any], folder: Path) -> PackedFormat:
    """From the quantization_config of a compressed-tensors folder. BadInputError names what is not read."""
    where = f"{folder}: quantization_config"
    layout = section.get("format")
    if layout not in ("pack-quantized", "int-quantized"):
        raise BadInputError(
            f"{where}: compressed-tensors in the format {str(layout)[:40]!r} is not read; pack-quantized and "
            "int-quantized are"
        )
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise BadInputError(f"{where}: sparse weights ({str(sparsity.get('format'))[:40]}) are not read")
    groups = section.get("config_groups")
    found: list[CompressedScheme] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        if weights.get("type", "int") != "int":
            kind = str(weights.get("type"))[:20]
            raise BadInputError(f"{where}: weights of the type {kind!r} are not read")
        if weights.get("strategy") not in ("group", "channel", "tensor", None):
            raise BadInputError(f"{where}: the strategy {str(weights.get('strategy'))[:20]!r} is not read")
        bits = metadata_int(weights, "num_bits", minimum=1, maximum=16)
        symmetric = metadata_bool(weights, "symmetric", True)
        found.append(CompressedScheme(bits, symmetric, _ordered(weights.get("actorder"), where)))
    widths = {scheme.bits for scheme in found}
    return PackedFormat(layout, widths.pop() if len(widths) == 1 else None, None, schemes=tuple(found))


def _ordered(actorder: object, where: str) -> bool:
    """Whether groups are of columns in another order: ``weight`` (static) says only how codes were chosen."""
    if actorder is None or isinstance(actorder, bool):
        return bool(actorder)
    name = str(actorder).lower()
    if name not in ("group", "dynamic", "weight", "static"):
        raise BadInputError(f"{where}: actorder {name[:20]!r} is not read; group and weight are")
    return name in ("group", "dynamic")


def _bits_and_group(section: Mapping[str, Any], where: str, allowed: Iterable[int]) -> tuple[int, int]:
    try:
        bits = metadata_int(section, "bits")
        group_size = metadata_int(section, "group_size", -1, minimum=-1, maximum=_MAX_GROUP)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None
    if bits not in allowed:
        known = ", ".join(map(str, allowed))
        raise BadInputError(f"{where}: codes of {bits} bits are not read; {known} are")
    if group_size == 0:
        raise BadInputError(f"{where}: a group_size of 0 is impossible")
    return bits, group_size
