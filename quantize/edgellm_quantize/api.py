"""The front door of the toolkit: one job in, one report out."""

from __future__ import annotations

from edgellm_models.errors import OutputError
from edgellm_quantize.recipe import QuantizeJob, QuantizeReport


def quantize_model(job: QuantizeJob) -> QuantizeReport:
    """Quantize a model as the job says, or with ``dry_run`` say what would come out.

    The output appears under its name only when it is whole and has been read back. Raises UsageError for a
    job that makes no sense, BadInputError for a damaged source, NotFoundError for a missing one,
    ResourceError where the memory does not suffice, OutputError where the output cannot be written.
    """
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network import read_spec
    from edgellm_quantize.folder_job import run_folder_job

    if job.out.exists() or job.out.is_symlink():
        raise OutputError(f"{job.out}: this exists already: choose another name or remove it first")
    if job.recipe.format == "gguf":
        from edgellm_quantize.gguf_job import run_gguf_job

        return run_gguf_job(job)
    checkpoint = open_checkpoint(job.source)
    try:
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
        return run_folder_job(job, checkpoint, spec)
    finally:
        checkpoint.close()
