"""Unfinished work of calibrated jobs: what of it is kept, who is told so, and when it is taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.errors import EdgeLLMError, OutputError
from edgellm_quantize.job_place import work_folder_of
from edgellm_quantize.recipe import QuantizeJob

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class KeptWork:
    """The finished layers that a work folder holds."""

    folder: Path
    layers_done: int
    num_layers: int | None
    """None where the manifest does not say."""
    written: tuple[int, int]
    """Inode and time of the manifest, which is replaced with every layer."""

    @property
    def layers(self) -> str:
        """``3 of 30 layers``."""
        if self.num_layers is None:
            return f"{self.layers_done} layers"
        return f"{self.layers_done} of {self.num_layers} layers"


def kept_work(folder: Path) -> KeptWork | None:
    """What lies in a work folder; None where there is nothing that a job could go on with."""
    manifest = folder / _MANIFEST
    try:
        state = manifest.stat()
        found = read_json_object(manifest)
    except (OSError, EdgeLLMError):
        return None
    done, named = found.get("layers_done"), found.get("fingerprint")
    if not isinstance(done, int) or done < 0:
        return None
    total = named.get("layers") if isinstance(named, dict) else None
    return KeptWork(
        folder, done, total if isinstance(total, int) else None, (state.st_ino, state.st_mtime_ns)
    )


def refuse_to_discard(job: QuantizeJob) -> None:
    """OutputError where the job would begin anew in a folder that holds finished layers."""
    if job.resume or job.dry_run or job.calibration.source == "none":
        return
    kept = kept_work(work_folder_of(job))
    if kept is not None and kept.layers_done:
        raise OutputError(
            f"{kept.folder}: {kept.layers} of an unfinished job lie there, which a new run would throw away: "
            "go on with --resume, or remove that folder first"
        )


@contextlib.contextmanager
def telling_what_is_kept(job: QuantizeJob) -> Iterator[None]:
    """Whatever stops the job inside says what can be gone on with.

    An OutputError says it in its message, an interruption (KeyboardInterrupt and other exceptions that are no
    Exception) in a note (PEP 678), which the command shows.
    """
    folder = work_folder_of(job)
    before = kept_work(folder)
    try:
        yield
    except OutputError as error:
        sentence = _sentence(job, before, kept_work(folder))
        if sentence is None:
            raise
        raise OutputError(f"{error}; {sentence}") from error
    except Exception:
        raise
    except BaseException as error:
        sentence = _sentence(job, before, kept_work(folder))
        if sentence is not None:
            error.add_note(f"stopped: {sentence}")
        raise


def _sentence(job: QuantizeJob, before: KeptWork | None, now: KeptWork | None) -> str | None:
    if job.dry_run or now is None or (now == before and not job.resume):
        return None  # what lies there is of an earlier run, which this one may not be able to go on with
    if job.out.exists():
        if job.save_imatrix is None:
            return f"{job.out} is whole; {now.folder} is of no use any more"
        return (
            f"{job.out} is whole, but not the importance matrix; {now.layers} are kept in {now.folder}: "
            f"move {job.out} away, and --resume writes both"
        )
    return f"{now.layers} are kept in {now.folder}: the same command with --resume goes on from there"


def clear_work(folder: Path, *, named: bool) -> None:
    """Take away what a job made in its work folder, and the folder too where it is empty then.

    Files that no job of ours makes stay. ``named``: the user named the folder: it stays, empty.
    """
    with contextlib.suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)  # first: without it the rest means nothing
        for name in ("layer-*.safetensors", "state-*.safetensors", "kept-*.json", ".*.partial"):
            for path in folder.glob(name):
                path.unlink(missing_ok=True)
        if not named:
            folder.rmdir()
