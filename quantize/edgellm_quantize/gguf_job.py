"""Quantizes a model into a GGUF file: the way from a job to the writer and its report."""

from __future__ import annotations

from edgellm_models.errors import UsageError
from edgellm_quantize.recipe import GGUF_DENSE_TYPES, QuantizeJob, QuantizeReport


def run_gguf_job(job: QuantizeJob) -> QuantizeReport:
    """Everything behind ``api.quantize_model`` for the format gguf."""
    from edgellm_quantize.imatrix_file import read_imatrix
    from edgellm_quantize.quantized_gguf import write_quantized_gguf

    recipe = job.recipe
    calibrated = job.calibration.source != "none"
    if recipe.type in GGUF_DENSE_TYPES and (calibrated or job.imatrix is not None):
        raise UsageError(
            f"type {recipe.type} rounds nothing that calibration or an importance matrix could help"
        )
    if recipe.method == "gptq" and not calibrated:
        raise UsageError("method gptq needs calibration: a text file or self, or take the method rtn")
    if calibrated or recipe.target_bpw is not None:
        raise UsageError("calibration and a target of bits per weight are not in this version for GGUF files")
    importance = None if job.imatrix is None else read_imatrix(job.imatrix)
    return write_quantized_gguf(
        job.source,
        job.out,
        recipe.type,
        importance=importance,
        overrides=recipe.tensor_types,
        effort=recipe.effort,
        on_progress=job.on_progress,
        dry_run=job.dry_run,
    )
