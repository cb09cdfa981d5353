"""Quantizes a model into a Hugging Face folder: settles the recipe, rounds linear by linear, writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import BadInputError, Notice, UsageError
from edgellm_quantize.advice import few_bits_notice
from edgellm_quantize.calibrated_run import (
    CORE_SHARE,
    CalibratedRun,
    core_estimate,
    refuse_without_calibration,
    run_calibrated,
    save_importance,
)
from edgellm_quantize.estimates import check_memory
from edgellm_quantize.hf_folder import (
    FolderPlan,
    copy_side_files,
    f16_notice,
    plan_folder,
    report_of,
    write_folder,
)
from edgellm_quantize.hf_tensors import HFTensors, is_block_linear
from edgellm_quantize.imatrix_file import no_importance_notice
from edgellm_quantize.job_place import check_places
from edgellm_quantize.layer_rounding import uniform_grids
from edgellm_quantize.packed_layouts import quantization_config, vllm_refusals
from edgellm_quantize.process_memory import peak_memory
from edgellm_quantize.provenance import recipe_record
from edgellm_quantize.recipe import (
    LayerOutcome,
    QuantizedLinear,
    QuantizeJob,
    QuantizeProgress,
    QuantizeRecipe,
    QuantizeReport,
)
from edgellm_quantize.source_check import requantized_notice, tokenizer_notice

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec
    from edgellm_quantize.grids import Grid, IntegerGrid

_PROBE_WEIGHTS = 1 << 18
"""Weights that a dry run rounds to learn how long the rest takes."""
_BASE_BYTES = 350 << 20
"""Interpreter and torch, as measured."""
_BYTES_PER_WEIGHT = 16
"""Scratch of rounding one linear: weights, values and codes as f32, packed tensors."""


@dataclass(frozen=True)
class Rounding:
    """Where the linears of a folder come from."""

    outcome: Callable[[str], LayerOutcome]
    """Called once for each linear in the order of the model; the weight's rows in Hugging Face's order."""
    method: str
    calibration_hash: str | None = None
    calibration_tokens: int = 0


def settle_recipe(recipe: QuantizeRecipe, tensors: HFTensors, calibrated: bool) -> QuantizeRecipe:
    """The recipe with its group size and method chosen. UsageError for what cannot be."""
    method = recipe.method
    if method == "auto":
        method = ("awq" if recipe.format == "awq" else "gptq") if calibrated else "rtn"
    if method in ("gptq", "awq") and not calibrated:
        raise UsageError(f"method {method} needs calibration: a text file or self, or take the method rtn")
    group = recipe.group_size
    widths = {info.shape[1] for name, info in tensors.infos.items() if is_block_linear(name)}
    if group is None:
        fits = [size for size in (128, 64, 32) if not any(width % size for width in widths)]
        if not fits:
            raise BadInputError(
                f"no group of 128, 64 or 32 divides the input columns {sorted(widths)}: give a group size"
            )
        group = fits[0]
    symmetric = recipe.symmetric and recipe.format != "awq"
    return replace(recipe, group_size=group, method=method, symmetric=symmetric)


def _grid(recipe: QuantizeRecipe) -> IntegerGrid:
    from edgellm_quantize.grids import IntegerGrid

    assert recipe.group_size is not None
    v1 = recipe.format == "gptq" and recipe.checkpoint_format == "gptq"
    return IntegerGrid(recipe.bits, recipe.group_size, recipe.symmetric, min_zero=1 if v1 else 0)


def round_without_calibration(
    tensors: HFTensors, recipe: QuantizeRecipe, importance: Mapping[str, torch.Tensor] | None = None
) -> Rounding:
    """Round to nearest with the search of scales: needs nothing but the weights.

    ``importance`` [K] of some linears weighs the errors of their columns.
    """
    from edgellm_quantize.grids import clipped_notice, within_reach
    from edgellm_quantize.rounding import output_error, round_nearest

    by_name = importance or {}

    grid = _grid(recipe)

    def outcome(name: str) -> LayerOutcome:
        start = time.perf_counter()
        weight = tensors.dense(name).float()
        rounded = round_nearest(weight, grid, by_name.get(name), recipe.preset.scale_candidates)
        error = output_error(weight, rounded.values, None)
        _, clipped = within_reach(weight, grid)
        notices = [clipped_notice(name, clipped, grid.label)] if clipped else []
        seconds = time.perf_counter() - start
        return LayerOutcome(
            name, rounded.weight, error, seconds, rounded.method, (*rounded.notices, *notices)
        )

    return Rounding(outcome, "rtn")


def _column_weights(job: QuantizeJob, tensors: HFTensors) -> tuple[dict[str, torch.Tensor], list[Notice]]:
    """What the job's importance matrix says of each linear [K], and of how many it says nothing."""
    import torch

    from edgellm_quantize.imatrix_file import read_imatrix
    from edgellm_quantize.rounding import importance_of

    if job.imatrix is None:
        return {}, []
    matrix, found, without = read_imatrix(job.imatrix), {}, []
    for name, info in tensors.infos.items():
        if not is_block_linear(name):
            continue
        seen = matrix.column_weights(name, info.shape[1])
        if seen is None:
            without.append(name)
        else:
            found[name] = importance_of(torch.tensor(seen))
    return found, no_importance_notice(without)


def run_folder_job(job: QuantizeJob, checkpoint: Checkpoint, spec: ModelSpec) -> QuantizeReport:
    """Everything behind ``api.quantize_model`` for the formats that are folders."""
    started = time.perf_counter()
    tensors = HFTensors(checkpoint, spec)
    calibrated = job.calibration.source != "none"
    recipe = job.recipe
    if recipe.format != "hf":
        recipe = settle_recipe(recipe, tensors, calibrated)
    if recipe.format == "hf" and (calibrated or job.imatrix is not None):
        raise UsageError("a dense folder rounds nothing that calibration or importance could help")
    if calibrated and job.imatrix is not None:
        raise UsageError("calibration measures what an importance matrix states: give one of them")
    importance, without = _column_weights(job, tensors)
    notices = [*checkpoint.notices, *tensors.notices, *without]
    notices += [*requantized_notice(tensors.infos.values()), *f16_notice(recipe, tensors)]
    notices += few_bits_notice(job)
    check_memory(memory_needed(tensors), job.max_memory, "the largest tensor of this model")
    rounding = Rounding(_no_rounding, "copy")
    finished: dict[str, LayerOutcome] = {}
    refuse_without_calibration(job, calibrated)
    run: CalibratedRun | None = None
    if not job.dry_run:
        _check_places(job, recipe, tensors)
    if recipe.format != "hf":
        if calibrated and not job.dry_run:
            rounding, tensors, run = _calibrated(job, recipe, checkpoint, tensors)
            notices += [*run.core.notices, *run.calibration.notices]
        else:
            rounding = round_without_calibration(tensors, recipe, importance)
            rounding = replace(rounding, method=recipe.method)
    plan = plan_folder(recipe, tensors, rounding.outcome, finished)
    meta = recipe_record(job, recipe, rounding.calibration_hash, rounding.calibration_tokens)
    if recipe.format != "hf":
        section = quantization_config(recipe, meta)
        refusals = vllm_refusals(section, plan.linears)
        notices += [Notice("vllm_refuses", f"for vLLM: {why}") for why in refusals]
    untold = tokenizer_notice(checkpoint)
    notices += untold
    config, side_files = _small_files(checkpoint, spec, has_tokenizer=not untold)
    estimated = sum(item.nbytes for item in plan.items)
    if job.dry_run:
        seconds, memory = _probe_seconds(tensors, recipe, plan), memory_needed(tensors)
        if calibrated:
            grids = _core_grids(checkpoint, tensors, recipe)
            seconds, core, more = core_estimate(job, recipe, checkpoint, spec, grids, recipe.method)
            memory = max(memory, core)
            notices += more
        return _report(job, recipe, plan, rounding, {}, estimated, seconds, memory, notices)
    total = write_folder(
        job.out,
        recipe,
        plan,
        config,
        side_files,
        meta,
        _byte_progress(job, max(1, estimated), CORE_SHARE if run is not None else 0.0),
    )
    if run is not None:
        save_importance(job, run, checkpoint)
        run.clean_up()
    for outcome in finished.values():
        notices += outcome.notices
    if job.on_progress is not None:
        job.on_progress(QuantizeProgress("checking", 1.0))
    seconds = time.perf_counter() - started
    return _report(job, recipe, plan, rounding, finished, total, seconds, peak_memory(), notices)


def _check_places(job: QuantizeJob, recipe: QuantizeRecipe, tensors: HFTensors) -> None:
    """Errors as job_place.check_places; BadInputError names a linear that does not fit the recipe."""
    plan = plan_folder(recipe, tensors, _no_rounding, {})
    layers = 0
    for rows, columns in plan.linears.values():
        # Unpacked: a byte for each code, and for each group an f32 scale and a zero.
        layers += rows * columns + 5 * rows * (columns // _grid(recipe).span(columns))
    check_places(job, sum(item.nbytes for item in plan.items), layers, tensors.spec.hidden_size)


def _core_grids(checkpoint: Checkpoint, tensors: HFTensors, recipe: QuantizeRecipe) -> dict[str, Grid]:
    """The recipe's grid for every linear of the model: a file may hold more layers than it has."""
    grids = uniform_grids(checkpoint, _grid(recipe))
    return {name: grid for name, grid in grids.items() if name in tensors.infos}


def _no_rounding(name: str) -> LayerOutcome:
    raise AssertionError(name)


def _calibrated(
    job: QuantizeJob, recipe: QuantizeRecipe, checkpoint: Checkpoint, source: HFTensors
) -> tuple[Rounding, HFTensors, CalibratedRun]:
    """The core's linears, and the other tensors as folding left them."""
    from edgellm_quantize.overlay import OverlayCheckpoint

    spec, grids = source.spec, _core_grids(checkpoint, source, recipe)
    run = run_calibrated(job, recipe, checkpoint, spec, grids, recipe.method)
    overlay = OverlayCheckpoint(checkpoint)
    for index in range(run.core.num_layers):
        changed = run.layer(index).changed
        overlay.replaced.update({name: value.clone() for name, value in changed.items()})
    tensors = HFTensors(overlay, spec)

    def outcome(name: str) -> LayerOutcome:
        found = run.outcome(name)
        assert found is not None and isinstance(found.weight, QuantizedLinear), name
        return replace(found, weight=tensors.reorder(name, found.weight))

    calibration = run.calibration
    return Rounding(outcome, recipe.method, calibration.hash, calibration.num_tokens), tensors, run


def _small_files(
    checkpoint: Checkpoint, spec: ModelSpec, *, has_tokenizer: bool
) -> tuple[Mapping[str, Any], Callable[[Path], None]]:
    """config.json, and what writes the files beside it; a GGUF's tokenizer may be of no use."""
    if checkpoint.file_format == "safetensors":
        return checkpoint.metadata, lambda folder: copy_side_files(checkpoint.path, folder)
    from edgellm_quantize.hf_from_gguf import config_from_gguf, write_tokenizer_files

    config = config_from_gguf(checkpoint, spec)
    return config, lambda folder: write_tokenizer_files(checkpoint, folder) if has_tokenizer else None


def _byte_progress(job: QuantizeJob, total: int, begin: float) -> Callable[[int], None] | None:
    if job.on_progress is None:
        return None
    report, done = job.on_progress, 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        report(QuantizeProgress("writing", begin + (1.0 - begin) * min(1.0, done / total)))

    return on_bytes


def _probe_seconds(tensors: HFTensors, recipe: QuantizeRecipe, plan: FolderPlan) -> float:
    """Rounds a few rows and scales up; writing is counted at 200 MB/s."""
    written = sum(item.nbytes for item in plan.items) / 200e6
    if recipe.format == "hf" or not plan.linears:
        return written
    from edgellm_quantize.rounding import round_nearest

    name = next(name for name in tensors.infos if is_block_linear(name))
    rows = tensors.dense(name).float()
    rows = rows[: max(1, _PROBE_WEIGHTS // rows.shape[1])]
    start = time.perf_counter()
    round_nearest(rows, _grid(recipe), None, recipe.preset.scale_candidates)
    each = (time.perf_counter() - start) / rows.numel()
    return written + each * sum(height * width for height, width in plan.linears.values())


def memory_needed(tensors: HFTensors) -> int:
    """Bytes that a job without calibration takes: the largest tensor's scratch beside the program."""
    largest = 0
    for name, info in tensors.infos.items():
        count = 1
        for extent in info.shape:
            count *= extent
        largest = max(largest, count * (_BYTES_PER_WEIGHT if is_block_linear(name) else 8))
    return _BASE_BYTES + largest


def _report(
    job: QuantizeJob,
    recipe: QuantizeRecipe,
    plan: FolderPlan,
    rounding: Rounding,
    finished: Mapping[str, LayerOutcome],
    nbytes: int,
    seconds: float,
    peak: int,
    notices: list[Notice],
) -> QuantizeReport:
    weights = 0
    for tensor in plan.reports:
        count = 1
        for extent in tensor.shape:
            count *= extent
        weights += count
    kind = recipe.dtype
    if recipe.format != "hf":
        group = "per row" if recipe.group_size == -1 else f"g{recipe.group_size}"
        kind = f"{recipe.bits} bit {group} {'symmetric' if recipe.symmetric else 'asymmetric'}"
    return QuantizeReport(
        out=job.out,
        format=recipe.format,
        type_name=kind,
        tensors=report_of(plan, finished),
        nbytes=nbytes,
        num_weights=weights,
        method=rounding.method,
        calibration_hash=rounding.calibration_hash,
        calibration_tokens=rounding.calibration_tokens,
        seconds=seconds,
        peak_bytes=peak,
        dry_run=job.dry_run,
        notices=tuple(notices),
    )
