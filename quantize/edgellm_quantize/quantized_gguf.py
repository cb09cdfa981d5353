"""A quantized GGUF file from a model: types by mixture, rows encoded as they are written, all read back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_models.errors import Notice, OutputError
from edgellm_quantize.dense_gguf import cast_dense
from edgellm_quantize.gguf_file import PlannedTensor, write_gguf_file
from edgellm_quantize.gguf_sizes import file_nbytes, tensor_nbytes
from edgellm_quantize.gguf_source import GGUFSource, SourceTensor, open_gguf_source
from edgellm_quantize.gguf_values import GGUFValue, MetadataTable, text, u32
from edgellm_quantize.grids import clipped_notice
from edgellm_quantize.imatrix_file import ImportanceMatrix, no_importance_notice
from edgellm_quantize.kquant_codec import encode_rows
from edgellm_quantize.kquant_mix import FILE_TYPE_IDS, choose_types, is_quantized
from edgellm_quantize.process_memory import peak_memory
from edgellm_quantize.provenance import recipe_record, tool_version
from edgellm_quantize.recipe import (
    GGUF_DENSE_TYPES,
    OUTPUT_ERROR,
    WEIGHT_ERROR,
    LayerOutcome,
    QuantizeJob,
    QuantizeProgress,
    QuantizeRecipe,
    QuantizeReport,
    TensorReport,
)
from edgellm_quantize.rounding import sum_of_squares

Array = np.ndarray[Any, Any]

Encode = Callable[[SourceTensor, str], "Iterator[Array] | None"]
"""Bytes of a tensor in a type, uint8 [r, row bytes] in the order of ``tensor.rows()``; None leaves it to the
data-free encoder. The chunks must lie as those of ``rows()`` do."""


@dataclass(frozen=True)
class QuantizedPlan:
    """What a file will hold beside the tensors themselves."""

    type_name: str
    """The mixture, for general.file_type and the report."""
    types: Mapping[str, str]
    """Tensor name to type."""
    importance: ImportanceMatrix | None = None
    effort: str = "default"
    method: str = "rtn"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the file as JSON (edgellm.quantize.recipe)."""
    calibration_hash: str | None = None
    calibration_tokens: int = 0
    encode: Encode | None = None
    """Codes that something else has chosen (error feedback)."""
    outcome: Callable[[str], LayerOutcome | None] = lambda name: None
    """What that says of a tensor by name."""
    overridden: frozenset[str] = frozenset()


def write_quantized_gguf(
    source: Path,
    out: Path,
    type_name: str,
    *,
    importance: ImportanceMatrix | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    effort: str = "default",
    on_progress: Callable[[QuantizeProgress], None] | None = None,
    dry_run: bool = False,
) -> QuantizeReport:
    """Quantize a Hugging Face folder or GGUF file without calibration: the mixture's types, searched scales.

    ``importance`` weights errors by column and turns on what mixtures do with one; ``overrides`` are (regular
    expression, type). Errors: UsageError for unknown names, BadInputError for a source that cannot be used,
    OutputError when the file cannot be written; then nothing is left behind. ``dry_run`` writes nothing.
    """
    from edgellm_quantize.type_wishes import check_patterns

    model = open_gguf_source(source)
    try:
        shapes = {tensor.name: tensor.shape for tensor in model.tensors}
        model.notices.extend(check_patterns(overrides, shapes))
        mixture = choose_types(
            type_name,
            shapes,
            model.shape,
            has_imatrix=importance is not None,
            overrides=overrides,
        )
        model.notices.extend(mixture.notices())
        recipe = QuantizeRecipe(
            type=type_name, method="rtn", effort=effort, tensor_types=tuple((a, b) for a, b in overrides)
        )
        job = QuantizeJob(Path(source), Path(out), recipe)
        dataset = None if importance is None else ", ".join(importance.datasets) or "unknown"
        plan = QuantizedPlan(
            type_name,
            mixture.tensors,
            importance,
            effort,
            recipe=recipe_record(job, job.recipe, None, 0) | {"imatrix": dataset},
            overridden=frozenset(mixture.overridden),
        )
        return write_planned_gguf(model, out, plan, on_progress=on_progress, dry_run=dry_run)
    finally:
        model.close()


def write_planned_gguf(
    model: GGUFSource,
    out: Path,
    plan: QuantizedPlan,
    *,
    on_progress: Callable[[QuantizeProgress], None] | None = None,
    dry_run: bool = False,
) -> QuantizeReport:
    """Write ``model`` with the types of ``plan``. The source stays open. Errors as write_quantized_gguf.

    Every block is decoded as it is written, its error measured, and refused if a value is not finite; the
    file is then compared with what was written before it gets its name.
    """
    start = time.perf_counter()
    notices = list(model.notices)
    _say_requantized(model, plan, notices)
    importance = _column_weights(model, plan, notices)
    if dry_run:
        return _report(model, out, plan, notices, {}, _planned_bytes(model, plan), start, dry_run=True)
    total = max(1, model.num_weights)
    done = 0
    outcomes: dict[str, _Outcome] = {}

    def step(tensor: SourceTensor, weights: int) -> None:
        nonlocal done
        done += weights
        if on_progress is not None:
            on_progress(QuantizeProgress("writing", min(1.0, done / total), tensor.name))

    planned = [
        _plan_tensor(tensor, plan, importance.get(tensor.name), outcomes, notices, step)
        for tensor in model.tensors
    ]
    nbytes = write_gguf_file(Path(out), _metadata(model, plan), planned)
    return _report(model, out, plan, notices, outcomes, nbytes, start, dry_run=False)


@dataclass
class _Outcome:
    """What became of one tensor."""

    method: str
    squared_error: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    clipped: int = 0
    output_error: float | None = None
    """Of what the linear computes, where error feedback knows it."""

    @property
    def relative_error(self) -> float | None:
        if self.method == "copy" or self.output_error is not None:
            return self.output_error
        return self.squared_error / self.squares if self.squares > 0 else 0.0

    @property
    def error_measure(self) -> str:
        return WEIGHT_ERROR if self.output_error is None else OUTPUT_ERROR


def _planned_bytes(model: GGUFSource, plan: QuantizedPlan) -> int:
    tensors = ((tensor.name, tensor.shape, plan.types[tensor.name]) for tensor in model.tensors)
    return file_nbytes(_metadata(model, plan), tensors)


def _plan_tensor(
    tensor: SourceTensor,
    plan: QuantizedPlan,
    weights: Array | None,
    outcomes: dict[str, _Outcome],
    notices: list[Notice],
    step: Callable[[SourceTensor, int], None],
) -> PlannedTensor:
    kind = plan.types[tensor.name]
    nbytes = tensor_nbytes(tensor.shape, kind)

    def chunks() -> Iterator[Array]:
        start = time.perf_counter()
        outcome = outcomes[tensor.name] = _Outcome("copy" if kind == tensor.source_type else plan.method)
        if kind in GGUF_DENSE_TYPES:
            outcome.method = "copy"
            stream: Iterator[Array] = (cast_dense(rows, kind, tensor.file_name) for rows in tensor.rows())
        elif kind == tensor.source_type and tensor.raw is not None:
            stream = iter(tensor.raw())
        else:
            stream = _encoded(tensor, kind, plan, weights, outcome, notices)
        for chunk in stream:
            yield chunk
            step(tensor, int(chunk.nbytes * math.prod(tensor.shape) / max(1, nbytes)))
        outcome.seconds += time.perf_counter() - start
        if outcome.clipped:
            notices.append(clipped_notice(tensor.name, outcome.clipped, kind))

    return PlannedTensor(tensor.name, tensor.shape, kind, nbytes, chunks)


def _column_weights(model: GGUFSource, plan: QuantizedPlan, notices: list[Notice]) -> dict[str, Array]:
    """Importance by tensor. What has none is told of, a matrix of another model is BadInputError."""
    if plan.importance is None:
        return {}
    found: dict[str, Array] = {}
    without = []
    for tensor in model.tensors:
        if plan.types[tensor.name] in GGUF_DENSE_TYPES:
            continue
        weights = plan.importance.column_weights(tensor.name, tensor.shape[-1])
        if weights is not None and weights.any():
            found[tensor.name] = weights
        elif tensor.name not in ("token_embd.weight", "output.weight"):  # never in an importance matrix
            without.append(tensor.name)
    notices.extend(no_importance_notice(without))
    return found


def _encoded(
    tensor: SourceTensor,
    kind: str,
    plan: QuantizedPlan,
    weights: Array | None,
    outcome: _Outcome,
    notices: list[Notice],
) -> Iterator[Array]:
    """The rows' bytes in a block type, each chunk decoded again and measured."""
    import torch

    chosen = plan.encode(tensor, kind) if plan.encode is not None else None
    rounded = plan.outcome(tensor.name) if chosen is not None else None
    if rounded is not None:
        outcome.method, outcome.seconds = rounded.method, rounded.seconds
        if rounded.error_measure == OUTPUT_ERROR:
            outcome.output_error = rounded.relative_error
        notices.extend(rounded.notices)
        rounded = None  # its weight is as large as the tensor
    elif chosen is None:
        outcome.method = "rtn"
    for rows in tensor.rows():
        if chosen is None:
            encoded = encode_rows(rows, kind, weights, plan.effort)
            data, outcome.clipped = encoded.data, outcome.clipped + encoded.clipped
        else:
            data = next(chosen)
        outcome.squared_error += _squared_error(tensor, kind, data, rows)
        outcome.squares += sum_of_squares(torch.from_numpy(rows))
        yield data


def _squared_error(tensor: SourceTensor, kind: str, data: Array, rows: Array) -> float:
    """Of the decoded bytes against the rows. OutputError if a decoded value is not finite."""
    import torch

    from edgellm_kernels.ggml_blocks import dequantize
    from edgellm_kernels.weights import BlockLayout

    decoded = dequantize(torch.from_numpy(data), BlockLayout(kind), rows.shape[1]).numpy()
    if not np.isfinite(decoded).all():
        raise OutputError(f"tensor {tensor.name}: its {kind} bytes decode to values that are not finite")
    return sum_of_squares(torch.from_numpy(decoded - rows))


def _say_requantized(model: GGUFSource, plan: QuantizedPlan, notices: list[Notice]) -> None:
    again = [
        tensor
        for tensor in model.tensors
        if tensor.source_type not in GGUF_DENSE_TYPES
        and not tensor.source_type.startswith("INT")  # told of when the source was opened
        and plan.types[tensor.name] not in (tensor.source_type, *GGUF_DENSE_TYPES)
        and is_quantized(tensor.name, tensor.shape)
    ]
    if again:
        kinds = ", ".join(sorted({tensor.source_type for tensor in again}))
        notices.append(
            Notice(
                "requantized",
                f"{len(again)} tensors of the source are quantized already ({kinds}): their errors stay and "
                "new ones are added; a source in bf16 or f16 gives a better file",
            )
        )


def _metadata(model: GGUFSource, plan: QuantizedPlan) -> MetadataTable:
    table = dict(model.metadata)
    own: dict[str, GGUFValue] = {
        "general.file_type": u32(FILE_TYPE_IDS[plan.type_name]),
        "general.quantization_version": u32(2),
        "edgellm.version": text(tool_version()),
        "edgellm.quantize.recipe": text(json.dumps(plan.recipe, sort_keys=True)),
    }
    if plan.calibration_hash is not None:
        own["edgellm.quantize.calibration_hash"] = text(plan.calibration_hash)
        own["edgellm.quantize.calibration_tokens"] = u32(plan.calibration_tokens)
    if plan.importance is not None:
        own["quantize.imatrix.dataset"] = text(", ".join(plan.importance.datasets) or "unknown")
        own["quantize.imatrix.entries_count"] = u32(len(plan.importance.entries))
        own["quantize.imatrix.chunks_count"] = u32(plan.importance.chunk_count)
    return table | own


def _report(
    model: GGUFSource,
    out: Path,
    plan: QuantizedPlan,
    notices: list[Notice],
    outcomes: Mapping[str, _Outcome],
    nbytes: int,
    start: float,
    *,
    dry_run: bool,
) -> QuantizeReport:
    tensors = []
    for tensor in model.tensors:
        kind = plan.types[tensor.name]
        outcome = outcomes.get(tensor.name, _Outcome("copy" if kind in GGUF_DENSE_TYPES else plan.method))
        error = outcome.relative_error if outcomes else None
        tensors.append(
            TensorReport(
                tensor.name,
                kind,
                tensor.shape,
                tensor_nbytes(tensor.shape, kind),
                error,
                outcome.seconds,
                outcome.method,
                None if error is None else outcome.error_measure,
            )
        )
    return QuantizeReport(
        out=Path(out),
        format="gguf",
        type_name=plan.type_name,
        tensors=tuple(tensors),
        nbytes=nbytes,
        num_weights=model.num_weights,
        method=plan.method,
        calibration_hash=plan.calibration_hash,
        calibration_tokens=plan.calibration_tokens,
        seconds=time.perf_counter() - start,
        peak_bytes=peak_memory(),
        dry_run=dry_run,
        notices=tuple(notices),
    )
