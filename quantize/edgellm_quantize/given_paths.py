"""Which of a job's paths cannot be meant: outputs over what is there, over each other, or in the source."""

from __future__ import annotations

import os
from pathlib import Path

from edgellm_models.errors import OutputError
from edgellm_quantize.job_place import work_folder_of
from edgellm_quantize.recipe import QuantizeJob

_OF_MODEL_FOLDERS = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".bin", ".pt", ".pth")
"""Ends of the names that readers of Hugging Face folders look for. None of them looks for .gguf."""


def check_given_paths(job: QuantizeJob) -> None:
    """OutputError for an output that is there already, that would be written over another output of the job
    or into its work folder, or that would become a file of the source's folder.

    Names are compared as they resolve: through symbolic links, ``..`` and relative ones.
    """
    _refuse_existing(job.out)
    _refuse_in_source(job.out, job.source)
    out, work = job.out.resolve(), work_folder_of(job).resolve()
    if out == work or work in out.parents:
        raise OutputError(f"{job.out}: this lies in the work folder: choose another place for one of them")
    if out in work.parents:
        raise OutputError(f"{job.work_dir}: the work folder cannot lie in the output: choose another place")
    if job.save_imatrix is not None:
        _check_imatrix(job, job.save_imatrix, out, work)


def _check_imatrix(job: QuantizeJob, given: Path, out: Path, work: Path) -> None:
    _refuse_existing(given)
    _refuse_in_source(given, job.source)
    path = given.resolve()
    if path == out:
        raise OutputError(f"{given}: the importance matrix and the model cannot have one name")
    if path == work or work in path.parents:
        raise OutputError(f"{given}: the importance matrix cannot lie in the work folder, which is emptied")
    if out in path.parents and (job.recipe.format == "gguf" or path.parent != out or path.suffix != ".gguf"):
        # A folder takes the matrix in once it is written; none of its own files ends so.
        raise OutputError(f"{given}: an importance matrix in the output folder needs a name in .gguf")


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):  # links to nothing too: they would be replaced
        raise OutputError(f"{path}: this exists already: choose another name or remove it first")


def _refuse_in_source(path: Path, source: Path) -> None:
    """A name that would make the source another model. A .gguf file or a folder beside its files is none."""
    if path.suffix.lower() not in _OF_MODEL_FOLDERS or not source.is_dir():
        return
    if path.resolve().parent == source.resolve():
        raise OutputError(
            f"{path}: this would become one of the source folder's own files: choose another place, or "
            "another name (a .gguf file may lie there)"
        )
