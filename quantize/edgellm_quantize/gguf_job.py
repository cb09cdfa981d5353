"""Quantizes a model into a GGUF file: the way from a job to the writer and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_models.errors import UsageError
from edgellm_quantize.calibrated_run import (
    CORE_SHARE,
    CalibratedRun,
    calibration_name,
    importance_of_run,
    refuse_without_calibration,
    run_calibrated,
)
from edgellm_quantize.recipe import GGUF_DENSE_TYPES, QuantizeJob, QuantizeProgress, QuantizeReport

if TYPE_CHECKING:
    from edgellm_quantize.gguf_source import GGUFSource, SourceTensor
    from edgellm_quantize.grids import Grid
    from edgellm_quantize.kquant_mix import Mixture


def run_gguf_job(job: QuantizeJob) -> QuantizeReport:
    """Everything behind ``api.quantize_model`` for the format gguf."""
    from edgellm_quantize.imatrix_file import read_imatrix
    from edgellm_quantize.quantized_gguf import write_quantized_gguf

    recipe = job.recipe
    calibrated = job.calibration.source != "none"
    refuse_without_calibration(job, calibrated)
    if recipe.type in GGUF_DENSE_TYPES and (calibrated or job.imatrix is not None):
        raise UsageError(f"type {recipe.type} rounds nothing that calibration or importance could help")
    if recipe.method == "gptq" and not calibrated:
        raise UsageError("method gptq needs calibration: a text file or self, or take the method rtn")
    if recipe.target_bpw is not None:
        raise UsageError("a target of bits per weight is not in this version: choose a type")
    if calibrated and job.imatrix is not None:
        raise UsageError("calibration measures what an importance matrix states: give one of them")
    if calibrated and not job.dry_run:
        return _with_core(job)
    return write_quantized_gguf(
        job.source,
        job.out,
        recipe.type,
        importance=None if job.imatrix is None else read_imatrix(job.imatrix),
        overrides=recipe.tensor_types,
        effort=recipe.effort,
        on_progress=job.on_progress,
        dry_run=job.dry_run,
    )


def _with_core(job: QuantizeJob) -> QuantizeReport:
    """The mixture's types, with codes that error feedback chose (method rtn: with measured importance)."""
    from edgellm_models.network import read_spec
    from edgellm_quantize.folder_job import recipe_record
    from edgellm_quantize.gguf_source import open_gguf_source
    from edgellm_quantize.imatrix_file import write_imatrix
    from edgellm_quantize.kquant_mix import choose_types
    from edgellm_quantize.quantized_gguf import QuantizedPlan, write_planned_gguf

    recipe = replace(job.recipe, method="rtn" if job.recipe.method == "rtn" else "gptq")
    model = open_gguf_source(job.source)
    try:
        checkpoint = model.checkpoint
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
        mixture = choose_types(
            recipe.type,
            {tensor.name: tensor.shape for tensor in model.tensors},
            model.shape,
            has_imatrix=True,
            overrides=recipe.tensor_types,
        )
        model.notices.extend(mixture.notices())
        grids = _grids(model, mixture, recipe.effort)
        run = run_calibrated(job, recipe, checkpoint, spec, grids, recipe.method)
        model.notices.extend((*run.core.notices, *run.calibration.notices))
        importance = importance_of_run(run, calibration_name(job))
        record = recipe_record(job, recipe, run.calibration.hash, run.calibration.num_tokens)
        plan = QuantizedPlan(
            recipe.type,
            mixture.tensors,
            importance,
            recipe.effort,
            recipe.method,
            record,
            run.calibration.hash,
            run.calibration.num_tokens,
            encode=_Encoder(run),
            overridden=frozenset(mixture.overridden),
        )
        report = write_planned_gguf(model, job.out, plan, on_progress=_writing_progress(job))
        if job.save_imatrix is not None:
            write_imatrix(job.save_imatrix, importance)
        run.clean_up()
        return report
    finally:
        model.close()


def _grids(model: GGUFSource, mixture: Mixture, effort: str) -> Mapping[str, Grid]:
    """The block type of every linear that gets one; those that the source holds so already are copied."""
    from edgellm_quantize.grids import BlockTypeGrid
    from edgellm_quantize.hf_tensors import is_block_linear

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


def _writing_progress(job: QuantizeJob) -> Any:
    if job.on_progress is None:
        return None
    tell = job.on_progress

    def on_progress(progress: QuantizeProgress) -> None:
        done = CORE_SHARE + (1.0 - CORE_SHARE) * progress.done
        tell(QuantizeProgress(progress.phase, done, progress.detail))

    return on_progress
