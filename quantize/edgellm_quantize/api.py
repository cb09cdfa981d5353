"""The front door of the toolkit: one job in, one report out."""

from __future__ import annotations

from edgellm_quantize.recipe import QuantizeJob, QuantizeReport


def quantize_model(job: QuantizeJob) -> QuantizeReport:
    """Quantize a model as the job says, or with ``dry_run`` say what would come out.

    The output appears under its name only when it is whole and has been read back. Raises UsageError for a
    job that makes no sense, BadInputError for a damaged source, NotFoundError for a missing one,
    ResourceError where the memory does not suffice, OutputError where the output cannot be written, where a
    file or folder is in its way, and where a new run would throw finished layers away.
    """
    from edgellm_quantize.given_paths import check_given_paths
    from edgellm_quantize.kept_work import refuse_to_discard, telling_what_is_kept

    check_given_paths(job)
    refuse_to_discard(job)
    with telling_what_is_kept(job):
        return _run(job)


def _run(job: QuantizeJob) -> QuantizeReport:
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network import read_spec
    from edgellm_quantize.folder_job import run_folder_job

    if job.recipe.format == "gguf":
        from edgellm_quantize.gguf_job import run_gguf_job

        return run_gguf_job(job)
    checkpoint = open_checkpoint(job.source)
    try:
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
        return run_folder_job(job, checkpoint, spec)
    finally:
        checkpoint.close()
