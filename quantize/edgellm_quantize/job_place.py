"""Whether a job's outputs and its work folder can be put where they are to go: asked before it begins."""

from __future__ import annotations

from pathlib import Path

from edgellm_models.errors import OutputError
from edgellm_quantize.estimates import tokens_of
from edgellm_quantize.output_place import check_place, check_space, remove_stale_partials
from edgellm_quantize.provenance import readable_name
from edgellm_quantize.recipe import QuantizeJob
from edgellm_quantize.work_folder import check_work_folder

_STREAM_STATES = 2
"""The stream behind a layer is written before that behind the layer before it is removed."""


def work_folder_of(job: QuantizeJob) -> Path:
    """Where finished layers lie."""
    return job.work_dir or job.out.with_name(f"{job.out.name}.work")


def check_places(job: QuantizeJob, nbytes: int, layer_bytes: int = 0, hidden_size: int = 0) -> None:
    """Remove what killed runs of this job left of its outputs, then refuse what could not be written later.

    Args:
        nbytes: of the output, nearly.
        layer_bytes: what the rounded linears take in the work folder; only a calibrated job has one.
        hidden_size: columns of the calibration's stream, which lies there too.

    Raises:
        OutputError: a place that is missing, taken, closed or too small.
        BadInputError: a work folder that is not this job's to use, or holds nothing to resume.
    """
    remove_stale_partials(job.out)
    check_place(job.out, 0)
    needs = [(job.out, nbytes)]
    imatrix = job.save_imatrix
    # A folder that is an output takes the matrix in once it is there.
    if imatrix is not None and imatrix.parent.resolve() != job.out.resolve():
        remove_stale_partials(imatrix)
        check_place(imatrix, 0)
    if job.calibration.source != "none":
        work = work_folder_of(job)
        _check_utf8(work)
        check_work_folder(work, resume=job.resume)
        state = _STREAM_STATES * _streams(job) * _most_tokens(job) * hidden_size * 4
        needs.append((work / "layer", max(0, layer_bytes + state - _bytes_there(work))))
    check_space(job.out, needs, " with the work folder" if len(needs) > 1 else "")


def _check_utf8(work: Path) -> None:
    """The safetensors library, which keeps finished layers, takes no other path."""
    try:
        str(work.absolute()).encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"{readable_name(work)}: calibration keeps finished layers in a folder whose path must be UTF-8: "
            "name another one with --work-dir"
        ) from None


def _streams(job: QuantizeJob) -> int:
    """Streams at least: with little memory the second is left out."""
    both = job.recipe.preset.asymmetric_calibration and job.recipe.method != "rtn"
    return 2 if both and job.max_memory is None else 1


def _most_tokens(job: QuantizeJob) -> int:
    spec = job.calibration
    most = tokens_of(spec)
    if spec.path is not None and spec.path.is_file():
        return min(most, spec.path.stat().st_size + spec.samples)  # a token has a byte at least
    return most


def _bytes_there(work: Path) -> int:
    """What lies in the folder already: gone on with, or replaced."""
    if not work.is_dir():
        return 0
    return sum(path.stat().st_size for path in work.iterdir() if path.is_file())
