"""The folder of a job in work: finished layers and the stream's state, each whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.errors import BadInputError, OutputError

if TYPE_CHECKING:
    import torch

_MANIFEST = "manifest.json"
_KEPT = "kept-{}.json"
_MOST_KEPT_BYTES = 1 << 30
_VERSION = 2


def check_work_folder(path: Path, *, resume: bool) -> None:
    """Refuse early what ``WorkFolder`` refuses: OutputError where ``path`` is no folder, BadInputError where
    it holds anything else than a job's work, or nothing to resume."""
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: this is no folder: name another place for unfinished work")
    if (path / _MANIFEST).is_file():
        return
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    kept = {name for name in names if fnmatch(name, _KEPT.format("*"))}
    if resume and not kept:
        raise BadInputError(f"{path}: there is no work to resume: leave out the resume option")
    begun = (f".{_MANIFEST}.partial", f".{_KEPT.format('*')}.partial")
    others = {name for name in names - kept if not any(fnmatch(name, pattern) for pattern in begun)}
    if others and not resume:
        raise BadInputError(f"{path}: the work folder holds other files: name an empty or a new one")


def kept_path(path: Path, name: str) -> Path:
    """Where ``keep`` puts what it is given."""
    return path / _KEPT.format(name)


def keep(path: Path, name: str, depends: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    """Keep in the work folder ``path`` what a job found out before its first layer.

    ``depends`` are plain values that say what it follows from. OutputError.
    """
    target = kept_path(path, name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_json(target, {"depends": depends, "value": value})
    except OSError as error:
        raise _output_error(path, error) from error


def read_kept(path: Path, name: str, depends: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``keep`` was given; None where nothing is kept.

    BadInputError where it follows from other values, or is damaged.
    """
    target = kept_path(path, name)
    if not target.is_file():
        return None
    try:
        found = read_json_object(target, _MOST_KEPT_BYTES)
    except BadInputError as error:
        raise damaged(target) from error
    refuse_another_job(path, found.get("depends"), json.loads(json.dumps(depends)))
    value = found.get("value")
    if not isinstance(value, dict):
        raise damaged(target)
    return value


def forget(path: Path, name: str) -> None:
    """What was kept is of no use; the folder goes with it where it holds nothing else."""
    with contextlib.suppress(OSError):
        kept_path(path, name).unlink(missing_ok=True)
        path.rmdir()


def damaged(path: Path) -> BadInputError:
    """Of a file in a work folder that does not hold what it should."""
    return BadInputError(f"{path}: this file of unfinished work is damaged: remove its folder to begin anew")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Whatever goes wrong with the content of ``path`` inside is BadInputError that names it."""
    from safetensors import SafetensorError

    try:
        yield path
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, BadInputError):
            raise
        raise damaged(path) from error


def refuse_another_job(path: Path, theirs: Any, ours: Mapping[str, Any]) -> None:
    """BadInputError where what lies in the folder ``path`` follows from other values: says which."""
    if theirs == ours:
        return
    given = theirs if isinstance(theirs, dict) else {}
    differing = sorted(key for key in {*ours, *given} if given.get(key) != ours.get(key))
    raise BadInputError(
        f"{path}: the work that lies there is of another job (differing: "
        f"{', '.join(differing)}): give the same options, or remove that folder to begin anew"
    )


class WorkFolder:
    """Layers are added in order. A process that dies at any moment leaves a folder that can be gone on with:

    a file gets its name when it is complete, and the manifest counts a layer only after its files.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], *, resume: bool) -> None:
        """Open or make the folder.

        Args:
            fingerprint: plain values that say what is computed; a resumed job must have the same.
            resume: go on with what is there; otherwise an old folder of ours is begun anew.

        Raises:
            BadInputError: there is nothing to resume, it belongs to another job, or the folder holds
                anything else than a job's work.
            OutputError: the folder cannot be made.
        """
        self.path = path
        self.fingerprint = json.loads(json.dumps(fingerprint, sort_keys=True))
        self.num_done = 0
        manifest = path / _MANIFEST
        check_work_folder(path, resume=resume)
        if resume and manifest.is_file():
            self._resume(manifest)
        else:
            try:
                if manifest.is_file():
                    manifest.unlink()  # first: without it the rest means nothing
                    for name in ("layer-*.safetensors", "state-*.safetensors", ".*.partial"):
                        for old in path.glob(name):
                            old.unlink()
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _output_error(path, error) from error
            self._write_manifest()

    def _resume(self, manifest: Path) -> None:
        found = read_json_object(manifest)
        if found.get("version") != _VERSION:
            raise BadInputError(f"{manifest}: made by another version: remove its folder to begin anew")
        refuse_another_job(self.path, found.get("fingerprint"), self.fingerprint)
        done = found.get("layers_done")
        if not isinstance(done, int) or done < 0:
            raise BadInputError(f"{manifest}: layers_done is {done!r}")
        for layer in range(done):
            if not self.layer_path(layer).is_file():
                raise BadInputError(f"{self.layer_path(layer)} is missing: remove its folder to begin anew")
        if not self.state_path(done).is_file() and done:
            raise BadInputError(f"{self.state_path(done)} is missing: remove its folder to begin anew")
        self.num_done = done

    def layer_path(self, layer: int) -> Path:
        """Where a finished layer lies."""
        return self.path / f"layer-{layer:05d}.safetensors"

    def state_path(self, layer: int) -> Path:
        """Where the stream before a layer lies."""
        return self.path / f"state-{layer:05d}.safetensors"

    def add(
        self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any], state: Mapping[str, torch.Tensor]
    ) -> None:
        """The next layer is done: its tensors and notes, and where the stream is behind it. OutputError."""
        layer = self.num_done
        try:
            self._write(self.layer_path(layer), tensors, {"notes": json.dumps(notes, sort_keys=True)})
            self._write(self.state_path(layer + 1), state, {})
            self.num_done += 1
            self._write_manifest()
            with contextlib.suppress(OSError):
                self.state_path(layer).unlink(missing_ok=True)
        except OSError as error:
            self.num_done = layer
            raise _output_error(self.path, error) from error

    def layer(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors and notes of a finished layer. BadInputError for a damaged file."""
        from safetensors import safe_open

        with whole(self.layer_path(layer)) as path, safe_open(path, framework="pt") as stored:
            notes = json.loads((stored.metadata() or {})["notes"])
            return {name: stored.get_tensor(name) for name in stored.keys()}, notes  # noqa: SIM118

    def state(self) -> dict[str, torch.Tensor]:
        """The stream behind the last finished layer. BadInputError for a damaged file."""
        from safetensors.torch import load_file

        with whole(self.state_path(self.num_done)) as path:
            return load_file(path)

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        partial = path.with_name(f".{path.name}.partial")
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if needed > shutil.disk_usage(self.path).free:
            raise OSError(errno.ENOSPC, "no space")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
            _flush(partial)
            os.replace(partial, path)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _write_manifest(self) -> None:
        manifest = self.path / _MANIFEST
        content = {"version": _VERSION, "fingerprint": self.fingerprint, "layers_done": self.num_done}
        _write_json(manifest, content, indent=1)


def _write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(content, indent=indent, sort_keys=True) + "\n", encoding="utf-8")
        _flush(partial)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _output_error(path: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = 0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path).free
        return OutputError(f"{path}: no space left ({free:,} bytes are free): make room")
    return OutputError(f"{path}: the work folder cannot be written: {error.strerror or error}")
