"""Quantizes a model into a GGUF file: the way from a job to the writer and its report."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_models.errors import UsageError
from edgellm_quantize.advice import few_bits_notice
from edgellm_quantize.calibrated_run import (
    CORE_SHARE,
    CalibratedRun,
    core_estimate,
    core_plan,
    importance_expected,
    importance_of_run,
    read_calibration,
    refuse_without_calibration,
    run_calibrated,
    save_importance,
)
from edgellm_quantize.estimates import (
    ENCODING_BYTES,
    PROGRAM_BYTES,
    check_memory,
    encoding_seconds,
    tokens_of,
)
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.job_place import check_places, work_folder_of
from edgellm_quantize.provenance import calibration_name, recipe_record, source_identity
from edgellm_quantize.recipe import (
    GGUF_DENSE_TYPES,
    QuantizeJob,
    QuantizeProgress,
    QuantizeRecipe,
    QuantizeReport,
)

if TYPE_CHECKING:
    from edgellm_models.network.spec import ModelSpec
    from edgellm_quantize.calibration import CalibrationTokens
    from edgellm_quantize.choosing_memory import Choosing
    from edgellm_quantize.gguf_source import GGUFSource, SourceTensor
    from edgellm_quantize.grids import Grid
    from edgellm_quantize.imatrix_file import ImportanceMatrix
    from edgellm_quantize.kquant_mix import Mixture

_WRITING_BYTES = ENCODING_BYTES + PROGRAM_BYTES
_CHOOSING_SHARE = 0.3
"""Of a job without calibration that chooses types."""


def run_gguf_job(job: QuantizeJob) -> QuantizeReport:
    """Everything behind ``api.quantize_model`` for the format gguf."""
    from edgellm_quantize.gguf_source import open_gguf_source
    from edgellm_quantize.imatrix_file import read_imatrix
    from edgellm_quantize.type_wishes import check_types

    recipe = job.recipe
    calibrated = job.calibration.source != "none"
    refuse_without_calibration(job, calibrated)
    if recipe.type in GGUF_DENSE_TYPES and (calibrated or job.imatrix is not None):
        raise UsageError(f"type {recipe.type} rounds nothing that calibration or importance could help")
    if recipe.method == "gptq" and not calibrated:
        raise UsageError("method gptq needs calibration: a text file or self, or take the method rtn")
    if calibrated and job.imatrix is not None:
        raise UsageError("calibration measures what an importance matrix states: give one of them")
    importance = None if job.imatrix is None else read_imatrix(job.imatrix)
    model = open_gguf_source(job.source)
    try:
        model.notices.extend(check_types(recipe, model))
        if calibrated:
            return _with_core(job, model)
        return _from_weights(job, model, importance)
    finally:
        model.close()


def _from_weights(job: QuantizeJob, model: GGUFSource, importance: ImportanceMatrix | None) -> QuantizeReport:
    """Scales searched for the weights alone, or with the importance that a file states."""
    from edgellm_quantize.quantized_gguf import QuantizedPlan, write_planned_gguf
    from edgellm_quantize.type_wishes import unused_target

    recipe = job.recipe
    if not job.dry_run:
        check_places(job, _planned_bytes(job, model)[0])
    needed = _WRITING_BYTES
    check_memory(needed, job.max_memory, "encoding a few rows at a time")
    model.notices.extend(few_bits_notice(job))
    tell = _phase(job, "reading", 0.0, _CHOOSING_SHARE)
    mixture = _mixture(job, model, importance, None, tell)
    model.notices.extend(unused_target(recipe.target_bpw, mixture.tensors, model))
    record = recipe_record(job, replace(recipe, method="rtn"), None, 0)
    plan = QuantizedPlan(
        mixture.type_name,
        mixture.tensors,
        importance,
        recipe.effort,
        recipe=record,
        overridden=frozenset(mixture.overridden),
    )
    begin = _CHOOSING_SHARE if recipe.target_bpw is not None else 0.0
    report = write_planned_gguf(
        model, job.out, plan, on_progress=_writing_progress(job, begin), dry_run=job.dry_run
    )
    if job.dry_run:
        report = replace(report, seconds=_encoding_seconds(model, mixture, recipe.effort), peak_bytes=needed)
    return _named(job, report)


def _with_core(job: QuantizeJob, model: GGUFSource) -> QuantizeReport:
    """The mixture's types, with codes that error feedback chose (method rtn: with measured importance)."""
    from edgellm_models.network import read_spec
    from edgellm_quantize.quantized_gguf import QuantizedPlan, write_planned_gguf
    from edgellm_quantize.type_wishes import unused_target

    started = time.perf_counter()
    recipe = replace(job.recipe, method="rtn" if job.recipe.method == "rtn" else "gptq")
    checkpoint = model.checkpoint
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    check_memory(_WRITING_BYTES, job.max_memory, "encoding a few rows at a time")
    if not job.dry_run:
        check_places(job, *_planned_bytes(job, model), spec.hidden_size)
    calibration = None if job.dry_run else read_calibration(job, checkpoint, spec)
    choosing = _choosing(job, recipe, spec, calibration)
    mixture = _mixture(job, model, None, calibration, _phase(job, "calibrating", 0.0, 1.0), choosing)
    model.notices.extend(unused_target(recipe.target_bpw, mixture.tensors, model))
    grids = _grids(model, mixture, recipe.effort)
    if calibration is None:
        report = _estimated(job, recipe, model, mixture, grids, spec)
        needed = 0 if choosing is None else choosing.nbytes
        return replace(report, peak_bytes=max(report.peak_bytes, needed, _WRITING_BYTES))
    run = run_calibrated(job, recipe, checkpoint, spec, grids, recipe.method, calibration)
    model.notices.extend((*run.core.notices, *run.calibration.notices))
    importance = importance_of_run(run, calibration_name(job))
    record = recipe_record(job, recipe, run.calibration.hash, run.calibration.num_tokens)
    plan = QuantizedPlan(
        mixture.type_name,
        mixture.tensors,
        importance,
        recipe.effort,
        recipe.method,
        record,
        run.calibration.hash,
        run.calibration.num_tokens,
        encode=_Encoder(run),
        outcome=run.outcome,
        overridden=frozenset(mixture.overridden),
    )
    report = write_planned_gguf(model, job.out, plan, on_progress=_writing_progress(job, CORE_SHARE))
    save_importance(job, run, checkpoint)
    run.clean_up()
    return _named(job, replace(report, seconds=time.perf_counter() - started))


def _estimated(
    job: QuantizeJob,
    recipe: QuantizeRecipe,
    model: GGUFSource,
    mixture: Mixture,
    grids: Mapping[str, Grid],
    spec: ModelSpec,
) -> QuantizeReport:
    """The dry run of a calibrated job. What a text that is not written yet will say in the file has its size
    here."""
    from edgellm_quantize.quantized_gguf import QuantizedPlan, write_planned_gguf

    checkpoint = model.checkpoint
    known = read_calibration(job, checkpoint, spec) if job.calibration.source == "file" else None
    seconds, memory, notices = core_estimate(job, recipe, checkpoint, spec, grids, recipe.method, known)
    model.notices.extend(notices)
    digest, tokens = (known.hash, known.num_tokens) if known else ("0" * 64, tokens_of(job.calibration))
    inputs = {tensor.name: tensor.shape[-1] for tensor in model.tensors if is_block_linear(tensor.name)}
    plan = QuantizedPlan(
        mixture.type_name,
        mixture.tensors,
        importance_expected(job, inputs),
        recipe.effort,
        recipe.method,
        recipe_record(job, recipe, digest, tokens),
        digest,
        tokens,
    )
    report = write_planned_gguf(model, job.out, plan, dry_run=True)
    report = replace(report, calibration_hash=None, calibration_tokens=0)
    return _named(job, replace(report, seconds=seconds, peak_bytes=memory))


def _mixture(
    job: QuantizeJob,
    model: GGUFSource,
    importance: ImportanceMatrix | None,
    calibration: CalibrationTokens | None,
    tell: Callable[[float], None],
    choosing: Choosing | None = None,
) -> Mixture:
    """The types of all tensors: the mixture's, or what the target of bits per weight allows."""
    from edgellm_quantize.target_size import choose_for_size, keep_types, kept_types

    recipe = job.recipe
    mixture = _named_mixture(job, model)
    if recipe.target_bpw is None:
        model.notices.extend(mixture.notices())
        return mixture
    folder = work_folder_of(job)
    depends = None if calibration is None else _choice_depends(job, model, calibration, choosing)
    if job.resume and depends is not None:
        kept = kept_types(folder, depends, {tensor.name: tensor.shape for tensor in model.tensors})
        if kept is not None:
            return kept
    mixture = choose_for_size(
        model,
        recipe.target_bpw,
        pinned={name: mixture.tensors[name] for name in mixture.overridden},
        importance=importance,
        on_progress=lambda done: tell(0.05 * done),
        **_measuring(calibration, choosing),
    )
    model.notices.extend(() if choosing is None else choosing.notices)
    if depends is not None:
        keep_types(folder, depends, mixture)
    return mixture


def _named_mixture(job: QuantizeJob, model: GGUFSource) -> Mixture:
    """The types of the recipe's type and of its exceptions."""
    from edgellm_quantize.kquant_mix import choose_types

    return choose_types(
        job.recipe.type,
        {tensor.name: tensor.shape for tensor in model.tensors},
        model.shape,
        has_imatrix=job.imatrix is not None or job.calibration.source != "none",
        overrides=job.recipe.tensor_types,
    )


def _choice_depends(
    job: QuantizeJob, model: GGUFSource, calibration: CalibrationTokens, choosing: Choosing | None
) -> dict[str, Any]:
    """What chosen types follow from, as plain values."""
    recipe = job.recipe
    return source_identity(model.checkpoint) | {
        "target_bpw": recipe.target_bpw,
        "tensor_types": recipe.tensor_types,
        "method": recipe.method,
        "effort": recipe.effort,
        "calibration": calibration.hash,
        "measured": None if choosing is None else [choosing.measured, choosing.feedback, choosing.rows],
    }


def _planned_bytes(job: QuantizeJob, model: GGUFSource) -> tuple[int, int]:
    """Bytes of the file's tensors and of the blocks' linears among them; with a target, at most."""
    if job.recipe.target_bpw is not None:
        most = math.floor(job.recipe.target_bpw * model.num_weights / 8)
        return most, most
    types = _named_mixture(job, model).tensors
    sizes = {tensor.name: tensor_nbytes(tensor.shape, types[tensor.name]) for tensor in model.tensors}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if is_block_linear(name))


def _choosing(
    job: QuantizeJob, recipe: QuantizeRecipe, spec: ModelSpec, calibration: CalibrationTokens | None
) -> Choosing | None:
    """How types are chosen for a target within the memory that the job has; None without a target.

    ResourceError where the work that follows does not fit: before any is done.
    """
    from edgellm_quantize.choosing_memory import choosing_within_memory
    from edgellm_quantize.job import within_memory

    plan = core_plan(recipe, {}, recipe.method)
    if calibration is not None:
        plan, *_ = within_memory(spec, plan, calibration, job.max_memory)
    if recipe.target_bpw is None:
        return None
    return choosing_within_memory(spec, feedback=plan.method != "rtn", max_memory=job.max_memory)


def _measuring(calibration: CalibrationTokens | None, choosing: Choosing | None) -> dict[str, Any]:
    """What ``choose_for_size`` is to do with the calibration."""
    if choosing is None:
        return {}
    if not choosing.measured:
        return {"lacks_memory": True}
    if calibration is None:
        return {"runs_later": True}
    return {
        "sequences": calibration.sequences,
        "has_feedback": choosing.feedback,
        "feedback_rows": choosing.rows,
    }


def _named(job: QuantizeJob, report: QuantizeReport) -> QuantizeReport:
    """With a target there is no name that says what the file is: the target is the name."""
    if job.recipe.target_bpw is None:
        return report
    return replace(report, type_name=f"target of {job.recipe.target_bpw:g} bits per weight")


def _encoding_seconds(model: GGUFSource, mixture: Mixture, effort: str) -> float:
    """From a few rows of one tensor of each type."""
    import torch

    shown: dict[str, SourceTensor] = {}
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in model.tensors:
        kind = mixture.tensors[tensor.name]
        if kind not in GGUF_DENSE_TYPES and kind != tensor.source_type:
            shown.setdefault(kind, tensor)
            weights[kind] += math.prod(tensor.shape)
        sizes[kind] += tensor_nbytes(tensor.shape, kind)
    seconds = sum(sizes.values()) / 200e6
    for kind, tensor in shown.items():
        rows = torch.from_numpy(next(tensor.rows()))
        seconds += encoding_seconds(rows, kind, effort, weights[kind], 0)
    return seconds


def _phase(job: QuantizeJob, phase: str, begin: float, end: float) -> Callable[[float], None]:
    if job.on_progress is None:
        return lambda done: None
    tell = job.on_progress
    return lambda done: tell(QuantizeProgress(phase, begin + (end - begin) * done, "choosing types"))


def _grids(model: GGUFSource, mixture: Mixture, effort: str) -> Mapping[str, Grid]:
    """The block type of every linear that gets one; those that the source holds so already are copied."""
    from edgellm_quantize.grids import BlockTypeGrid

    grids: dict[str, Grid] = {}
    for tensor in model.tensors:
        kind = mixture.tensors[tensor.name]
        if kind in GGUF_DENSE_TYPES or not is_block_linear(tensor.name):
            continue
        if tensor.rescaled or kind == tensor.source_type:
            continue
        grids[tensor.name] = BlockTypeGrid(kind, effort)
    return grids


class _Encoder:
    """Bytes of the linears that the core rounded, in GGUF's row order."""

    def __init__(self, run: CalibratedRun) -> None:
        self.run = run

    def __call__(self, tensor: SourceTensor, kind: str) -> Iterator[np.ndarray[Any, Any]] | None:
        from edgellm_kernels.weights import BlockQuantWeight
        from edgellm_quantize.gguf_source import CHUNK_WEIGHTS

        found = self.run.outcome(tensor.name)
        if found is None or not isinstance(found.weight, BlockQuantWeight):
            return None
        assert found.weight.layout.value == kind, (tensor.name, kind)
        data = tensor.arrange(found.weight.data).contiguous().numpy()
        step = max(1, CHUNK_WEIGHTS // tensor.shape[-1])
        return (data[start : start + step] for start in range(0, len(data), step))


def _writing_progress(job: QuantizeJob, begin: float) -> Any:
    if job.on_progress is None:
        return None
    tell = job.on_progress

    def on_progress(progress: QuantizeProgress) -> None:
        tell(QuantizeProgress(progress.phase, begin + (1.0 - begin) * progress.done, progress.detail))

    return on_progress
