"""Runs the core for a job: tokenizer, calibration, work folder and progress around ``job.run_core``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_models.errors import BadInputError, Notice, UsageError
from edgellm_quantize.job_place import work_folder_of
from edgellm_quantize.kept_work import clear_work
from edgellm_quantize.provenance import calibration_name, source_identity
from edgellm_quantize.recipe import LayerOutcome, QuantizeJob, QuantizeProgress, QuantizeRecipe

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec
    from edgellm_quantize.calibration import CalibrationTokens
    from edgellm_quantize.grids import Grid
    from edgellm_quantize.imatrix_file import ImportanceMatrix
    from edgellm_quantize.job import CoreResult
    from edgellm_quantize.kept_writing import KeptWriting
    from edgellm_quantize.layer_rounding import CorePlan, LayerResult

CORE_SHARE = 0.9
"""Of a calibrated job's time; the rest is writing."""
_ASYMMETRIC_SHARE = 0.25


@dataclass
class CalibratedRun:
    """What the core made of a model; layers are read from the work folder when they are asked for."""

    core: CoreResult
    calibration: CalibrationTokens
    work_dir: Path
    named: bool
    """The user named the work folder: it stays, without what the job made in it."""
    _layer: tuple[int, LayerResult] | None = None

    def outcome(self, name: str) -> LayerOutcome | None:
        """One linear, rows in the order of the source; None for one that was not rounded."""
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk":
            return None
        return self.layer(int(parts[1])).outcomes.get(name)

    def layer(self, index: int) -> LayerResult:
        """The layer, kept until another is asked for."""
        if self._layer is None or self._layer[0] != index:
            self._layer = (index, self.core.layer(index))
        return self._layer[1]

    def clean_up(self) -> None:
        """Take the unfinished work away once the output is there."""
        clear_work(self.work_dir, named=self.named)


def read_calibration(job: QuantizeJob, checkpoint: Checkpoint, spec: ModelSpec) -> CalibrationTokens:
    """The token sequences of the job, none longer than the model's context. Errors as
    calibration.calibration_tokens."""
    from edgellm_models.tokenizer import load_chat_templates, load_tokenizer
    from edgellm_quantize.calibration import calibration_tokens, within_context

    form, metadata = checkpoint.file_format, checkpoint.metadata
    if job.on_progress is not None:
        job.on_progress(QuantizeProgress("calibrating", 0.0))
    fitting, notices = within_context(job.calibration, spec.context_length)
    generate = _kept_writing(job, checkpoint)
    try:
        tokens = calibration_tokens(
            fitting,
            load_tokenizer(checkpoint.path, form, metadata),
            spec.vocab_size,
            load_chat_templates(checkpoint.path, form, metadata),
            generate,
        )
    except BadInputError:
        if generate is not None and not job.resume:
            generate.forget()
        raise
    assert tokens is not None
    return replace(tokens, notices=(*notices, *tokens.notices))


def _kept_writing(job: QuantizeJob, checkpoint: Checkpoint) -> KeptWriting | None:
    """What continues prompts for ``self`` calibration; its answers lie in the work folder."""
    from edgellm_quantize.kept_writing import KeptWriting

    if job.generate is None or job.calibration.source != "self":
        return None
    asked = job.calibration
    depends = source_identity(checkpoint) | {
        "samples": asked.samples,
        "sequence_length": asked.sequence_length,
        "seed": asked.seed,
    }
    return KeptWriting(job.generate, work_folder_of(job), depends, resume=job.resume)


def run_calibrated(
    job: QuantizeJob,
    recipe: QuantizeRecipe,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    grids: Mapping[str, Grid],
    method: str,
    calibration: CalibrationTokens | None = None,
) -> CalibratedRun:
    """Round the linears of ``grids``; ``method`` is rtn, gptq or awq. Errors as job.run_core.

    ``calibration`` is what was read already.
    """
    from edgellm_quantize.job import run_core

    calibration = calibration or read_calibration(job, checkpoint, spec)
    plan = core_plan(recipe, grids, method)
    work_dir = work_folder_of(job)
    on_progress = None
    if job.on_progress is not None:
        tell = job.on_progress

        def on_progress(progress: QuantizeProgress) -> None:
            tell(QuantizeProgress(progress.phase, CORE_SHARE * progress.done, progress.detail.split(",")[0]))

    core = run_core(
        checkpoint,
        plan,
        work_dir,
        calibration,
        resume=job.resume,
        max_memory=job.max_memory,
        on_progress=on_progress,
    )
    return CalibratedRun(core, calibration, work_dir, job.work_dir is not None)


def core_plan(recipe: QuantizeRecipe, grids: Mapping[str, Grid], method: str) -> CorePlan:
    """What the core does for a recipe."""
    from edgellm_quantize.layer_rounding import CorePlan
    from edgellm_quantize.rounding import RoundingOptions

    preset = recipe.preset
    return CorePlan(
        grids,
        method,
        RoundingOptions(preset.scale_candidates, recipe.damping, descent_passes=preset.descent_passes),
        _ASYMMETRIC_SHARE if preset.asymmetric_calibration else 0.0,
        preset.awq_ratios,
    )


def save_importance(job: QuantizeJob, run: CalibratedRun, checkpoint: Checkpoint) -> None:
    """Write what ``--save-imatrix`` asks for: inputs of the model as it was, as llama-imatrix has them."""
    from edgellm_quantize.imatrix_file import write_imatrix
    from edgellm_quantize.original_importance import original_importance

    if job.save_imatrix is None:
        return
    found = original_importance(checkpoint, run.calibration, calibration_name(job))
    write_imatrix(job.save_imatrix, found)


def core_estimate(
    job: QuantizeJob,
    recipe: QuantizeRecipe,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    grids: Mapping[str, Grid],
    method: str,
    calibration: CalibrationTokens | None = None,
) -> tuple[float, int, list[Notice]]:
    """(seconds, bytes, notices) of ``run_calibrated``, which is not run. Errors as job.run_core.

    ``calibration`` is what was read already, of a file.
    """
    from edgellm_quantize.calibration import within_context
    from edgellm_quantize.estimates import core_seconds, estimate_notice, tokens_of
    from edgellm_quantize.grids import dequantize
    from edgellm_quantize.job import within_memory

    fitting, clipped = within_context(job.calibration, spec.context_length)
    tokens = tokens_of(fitting)
    if job.calibration.source == "file":
        calibration = calibration or read_calibration(job, checkpoint, spec)
        tokens = calibration.num_tokens
    plan = core_plan(recipe, grids, method)
    longest = min(tokens, fitting.sequence_length)
    known = tokens if calibration is None else calibration
    plan, _, memory, notices = within_memory(spec, plan, known, job.max_memory, longest)
    by_grid: dict[Grid, list[str]] = {}
    for name, grid in grids.items():
        by_grid.setdefault(grid, []).append(name)
    counts = {name: math.prod(checkpoint.tensors()[name].shape) for name in grids}
    probes = [
        (grid, dequantize(checkpoint.weight(names[0])), sum(counts[name] for name in names))
        for grid, names in by_grid.items()
    ]
    seconds = core_seconds(spec, plan, tokens, min(tokens, fitting.sequence_length), probes)
    return seconds / CORE_SHARE, memory, [*clipped, *notices, estimate_notice(tokens)]


def importance_expected(job: QuantizeJob, inputs: Mapping[str, int]) -> ImportanceMatrix:
    """A stand-in for ``importance_of_run`` in a dry run: the same entries and names, all columns alike.

    ``inputs`` holds the linears of the blocks and the columns of each.
    """
    import numpy as np

    from edgellm_quantize.imatrix_file import ImportanceEntry, ImportanceMatrix

    entries = {name: ImportanceEntry(np.ones(count, np.float32), 1) for name, count in inputs.items()}
    return ImportanceMatrix(entries, (calibration_name(job),))


def importance_of_run(run: CalibratedRun, source: str) -> ImportanceMatrix:
    """What calibration saw as an importance matrix."""
    from edgellm_quantize.imatrix_file import ImportanceEntry, ImportanceMatrix

    entries = {
        name: ImportanceEntry(seen.imatrix.clone().numpy(), seen.tokens)
        for index in range(run.core.num_layers)
        for name, seen in run.layer(index).imatrix.items()
    }
    lengths = [len(sequence) for sequence in run.calibration.sequences]
    return ImportanceMatrix(entries, (source,), len(lengths), max(lengths))


def refuse_without_calibration(job: QuantizeJob, calibrated: bool) -> None:
    """UsageError for options that only a calibrated job has a use for."""
    if calibrated:
        return
    for given, name in (
        (job.resume, "resume"),
        (job.save_imatrix is not None, "save-imatrix"),
        (job.work_dir is not None, "work-dir"),
    ):
        if given:
            raise UsageError(f"--{name} goes with calibration: without it nothing is kept between layers")
