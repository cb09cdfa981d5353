"""Writes a Hugging Face folder, dense or quantized, whole or not at all: a folder beside it, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_models.errors import BadInputError, EdgeLLMError, Notice, OutputError
from edgellm_quantize.hf_tensors import HFTensors, is_block_linear
from edgellm_quantize.output_place import check_place, output_error, partial_of, remove_stale_partials
from edgellm_quantize.packed_layouts import check_shape, pack_linear, packed_shapes, quantization_config
from edgellm_quantize.recipe import LayerOutcome, QuantizedLinear, QuantizeRecipe, TensorReport
from edgellm_quantize.safetensors_file import SHARD_BYTES, PlannedItem, write_shards

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SIDE_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"),
)
"""What goes along from a source folder, where it is there."""
_OLD_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
_F16_MAX = 65504.0
_CHUNK_WEIGHTS = 4 << 20
"""Weights of a dense tensor that are cast at once."""


@dataclass(frozen=True)
class FolderPlan:
    """What a folder will hold."""

    items: tuple[PlannedItem, ...]
    reports: tuple[TensorReport, ...]
    """One per weight or vector of the model; errors and seconds are filled in while writing."""
    linears: dict[str, tuple[int, int]]
    """Quantized linears by Hugging Face name, [N, K]."""
    torch_dtype: str
    """What config.json says that the model computes in."""


OUTGROW_F16 = ("gemma2", "gemma3")
"""Families whose activations have values above 65,504: in f16 they end in infinity and NaN."""


def torch_dtype(recipe: QuantizeRecipe, tensors: HFTensors, dense: str) -> str:
    """What a reader is to compute in: the type of what is not quantized, but bf16 where f16 cannot hold what
    the model computes. A dense folder has the type that was asked for."""
    if recipe.format != "hf" and dense == "F16" and tensors.spec.architecture in OUTGROW_F16:
        return "bfloat16"
    return _TORCH_NAMES[dense]


def f16_notice(recipe: QuantizeRecipe, tensors: HFTensors) -> list[Notice]:
    """Said of a dense folder in f16 that will overflow where it is computed in f16."""
    family = tensors.spec.architecture
    if recipe.format != "hf" or recipe.dtype != "f16" or family not in OUTGROW_F16:
        return []
    detail = f"what {family} models compute outgrows f16: load this folder in bf16 or f32, or write bf16"
    return [Notice("outgrows_f16", detail)]


def dense_dtype(recipe: QuantizeRecipe, tensors: HFTensors) -> str:
    """The safetensors type of what is not quantized."""
    if recipe.format == "hf":
        return recipe.dtype.upper()
    if recipe.format in ("gptq", "awq"):
        return "F16"
    return "BF16" if any(info.type_name == "BF16" for info in tensors.infos.values()) else "F16"


def plan_folder(
    recipe: QuantizeRecipe,
    tensors: HFTensors,
    outcome: Callable[[str], LayerOutcome],
    finished: dict[str, LayerOutcome],
) -> FolderPlan:
    """The tensors of the folder, in the order in which a model runs.

    ``outcome`` is asked while they are written. ``finished`` takes what it returned, without the weight.
    UsageError or BadInputError names a linear that does not fit, as packed_layouts.check_shape.
    """
    dtype = dense_dtype(recipe, tensors)
    items, reports, linears = [], [], {}
    for canonical, info in tensors.infos.items():
        name = tensors.name(canonical)
        shape = info.shape
        if recipe.format != "hf" and is_block_linear(canonical):
            assert len(shape) == 2
            pair = (shape[0], shape[1])
            check_shape(recipe, pair, name)
            stem = name.removesuffix(".weight")
            shapes = packed_shapes(recipe, pair)
            linears[name] = pair
            rows = tuple((f"{stem}.{suffix}", kind, dims) for suffix, (kind, dims) in shapes.items())
            make = partial(_packed, recipe, tensors, canonical, outcome, finished)
            items.append(PlannedItem(rows, make))
            group = "" if recipe.group_size == -1 else f" g{recipe.group_size}"
            kind_name = f"int{recipe.bits}{group}"
        else:
            shape = _flat(shape)
            items.append(
                PlannedItem(((name, dtype, shape),), partial(_dense, tensors, canonical, dtype, shape))
            )
            kind_name = dtype
        reports.append(TensorReport(canonical, kind_name, tuple(info.shape), items[-1].nbytes))
    return FolderPlan(tuple(items), tuple(reports), linears, torch_dtype(recipe, tensors, dtype))


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Vectors that a file stores with more dimensions."""
    wide = tuple(extent for extent in shape if extent != 1)
    return shape if len(wide) == 2 else (int(np.prod(shape)),)


def _packed(
    recipe: QuantizeRecipe,
    tensors: HFTensors,
    canonical: str,
    outcome: Callable[[str], LayerOutcome],
    finished: dict[str, LayerOutcome],
) -> list[np.ndarray[Any, Any]]:
    from dataclasses import replace

    from edgellm_kernels.weights import DenseWeight

    found = outcome(canonical)
    assert isinstance(found.weight, QuantizedLinear), type(found.weight)
    packed = pack_linear(recipe, found.weight, tensors.name(canonical))
    tensors.checkpoint.release_pages()  # what was read would count as memory until the folder is written
    # The weight itself is not kept: a folder may be larger than memory.
    finished[canonical] = replace(found, weight=DenseWeight(_nothing()))
    return list(packed.values())


def _nothing() -> torch.Tensor:
    import torch

    return torch.empty((0, 0))


def _dense(
    tensors: HFTensors, canonical: str, dtype: str, shape: tuple[int, ...]
) -> Iterator[np.ndarray[Any, Any]]:
    """Some rows at a time."""
    import torch

    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    values = tensors.dense(canonical).reshape(shape)
    step = max(1, _CHUNK_WEIGHTS // max(1, values[:1].numel()))
    for start in range(0, len(values), step):
        rows = values[start : start + step]
        largest = float(rows.abs().max()) if dtype == "F16" and rows.numel() else 0.0
        if largest > _F16_MAX:
            raise BadInputError(
                f"tensor {tensors.name(canonical)} has the value {largest:g}, too large for f16: "
                "write another type"
            )
        cast = rows.to(kind).contiguous()
        if dtype == "BF16" and not bool(torch.isfinite(cast).all()):
            raise BadInputError(f"tensor {tensors.name(canonical)} has a value too large for bf16: write f32")
        yield cast.view(torch.int16).numpy() if kind is torch.bfloat16 else cast.numpy()
        tensors.checkpoint.release_pages()


def write_folder(
    out: Path,
    recipe: QuantizeRecipe,
    plan: FolderPlan,
    config: Mapping[str, Any],
    write_side_files: Callable[[Path], None],
    meta: Mapping[str, Any],
    on_bytes: Callable[[int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the folder ``out``, which must not exist, and return the bytes of its weights.

    Args:
        config: config.json of the model, without quantization.
        write_side_files: puts tokenizer, templates and generation settings into a folder.
        meta: recipe, tool version and calibration hash, kept in config.json and in the weight files.

    OutputError for a missing folder, a full disk and everything else that keeps it from being written; then,
    and when interrupted, nothing is left behind.
    """
    nbytes = sum(item.nbytes for item in plan.items)
    remove_stale_partials(out)
    check_place(out, nbytes)
    temporary = partial_of(out)
    try:
        temporary.mkdir()
        total = write_shards(
            temporary,
            plan.items,
            {"format": "pt", "edgellm": json.dumps(dict(meta), sort_keys=True)},
            on_bytes,
            shard_bytes,
        )
        section = None if recipe.format == "hf" else quantization_config(recipe, meta)
        written = {key: value for key, value in config.items() if key not in _OLD_QUANTIZATION}
        for key in ("torch_dtype", "dtype"):
            written.pop(key, None)
        written["torch_dtype"] = plan.torch_dtype
        if section is not None:
            written["quantization_config"] = section
            if recipe.format == "gptq":
                _write_json(temporary / "quantize_config.json", section)
        else:
            written["edgellm"] = dict(meta)
        _write_json(temporary / "config.json", written)
        write_side_files(temporary)
        _check_reads(temporary, plan)
        os.rename(temporary, out)
    except OSError as error:
        raise output_error(out, error) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
    return total


def copy_side_files(source: Path, folder: Path) -> None:
    """Tokenizer, templates, generation settings and licence of a Hugging Face folder."""
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_reads(folder: Path, plan: FolderPlan) -> None:
    """Open the folder as a user's program will, and decode every quantized linear."""
    from edgellm_models.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(folder)
        try:
            found = checkpoint.tensors()
            for report in plan.reports:
                info = found.get(report.name)
                if info is None or _flat(info.shape) != _flat(report.shape):
                    raise OutputError(f"{report.name} does not read back")
                if report.type_name.startswith("int"):
                    checkpoint.weight(report.name)
                    checkpoint.release_pages()
        finally:
            checkpoint.close()
    except OutputError:
        raise
    except EdgeLLMError as error:
        raise OutputError(f"the folder that was written does not read back: {error}") from error


def report_of(plan: FolderPlan, finished: Mapping[str, LayerOutcome]) -> tuple[TensorReport, ...]:
    """The plan's reports with what rounding said."""
    from dataclasses import replace

    reports = []
    for report in plan.reports:
        outcome = finished.get(report.name)
        if outcome is not None:
            report = replace(
                report,
                relative_error=outcome.relative_error,
                seconds=outcome.seconds,
                method=outcome.method,
                error_measure=outcome.error_measure,
            )
        reports.append(report)
    return tuple(reports)


__all__ = [
    "FolderPlan",
    "copy_side_files",
    "f16_notice",
    "plan_folder",
    "report_of",
    "write_folder",
]
