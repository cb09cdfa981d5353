"""The folder of a job in work: finished layers and the stream's state, each whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.errors import BadInputError, OutputError

if TYPE_CHECKING:
    import torch

_MANIFEST = "manifest.json"
_VERSION = 2


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
        if resume:
            self._resume(manifest)
        else:
            if path.is_dir() and any(path.iterdir()) and not manifest.is_file():
                raise BadInputError(f"{path}: the work folder holds other files: name an empty or a new one")
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
        if not manifest.is_file():
            raise BadInputError(f"{self.path}: there is no work to resume: leave out the resume option")
        found = read_json_object(manifest)
        if found.get("version") != _VERSION:
            raise BadInputError(f"{manifest}: made by another version: begin anew without resuming")
        theirs = found.get("fingerprint")
        if theirs != self.fingerprint:
            differing = sorted(
                key
                for key in {*self.fingerprint, *(theirs if isinstance(theirs, dict) else {})}
                if not isinstance(theirs, dict) or theirs.get(key) != self.fingerprint.get(key)
            )
            raise BadInputError(
                f"{self.path}: the work that lies there is of another job (differing: "
                f"{', '.join(differing)}): give the same options, or begin anew without resuming"
            )
        done = found.get("layers_done")
        if not isinstance(done, int) or done < 0:
            raise BadInputError(f"{manifest}: layers_done is {done!r}")
        for layer in range(done):
            if not self._layer_path(layer).is_file():
                raise BadInputError(f"{self._layer_path(layer)} is missing: begin anew without resuming")
        if not self._state_path(done).is_file() and done:
            raise BadInputError(f"{self._state_path(done)} is missing: begin anew without resuming")
        self.num_done = done

    def _layer_path(self, layer: int) -> Path:
        return self.path / f"layer-{layer:05d}.safetensors"

    def _state_path(self, layer: int) -> Path:
        return self.path / f"state-{layer:05d}.safetensors"

    def add(
        self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any], state: Mapping[str, torch.Tensor]
    ) -> None:
        """The next layer is done: its tensors and notes, and where the stream is behind it. OutputError."""
        layer = self.num_done
        try:
            self._write(self._layer_path(layer), tensors, {"notes": json.dumps(notes, sort_keys=True)})
            self._write(self._state_path(layer + 1), state, {})
            self.num_done += 1
            self._write_manifest()
            with contextlib.suppress(OSError):
                self._state_path(layer).unlink(missing_ok=True)
        except OSError as error:
            self.num_done = layer
            raise _output_error(self.path, error) from error

    def layer(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors and notes of a finished layer."""
        from safetensors import safe_open

        with safe_open(self._layer_path(layer), framework="pt") as stored:
            notes = json.loads((stored.metadata() or {}).get("notes", "{}"))
            return {name: stored.get_tensor(name) for name in stored.keys()}, notes  # noqa: SIM118

    def state(self) -> dict[str, torch.Tensor]:
        """The stream behind the last finished layer."""
        from safetensors.torch import load_file

        return load_file(self._state_path(self.num_done))

    def remove(self) -> None:
        """Take the folder away with all that lies in it: the output is written."""
        shutil.rmtree(self.path, ignore_errors=True)

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
        partial = manifest.with_name(f".{_MANIFEST}.partial")
        content = {"version": _VERSION, "fingerprint": self.fingerprint, "layers_done": self.num_done}
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        _flush(partial)
        os.replace(partial, manifest)


def _flush(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _output_error(path: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = 0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path).free
        return OutputError(
            f"{path}: no space left ({free:,} bytes are free): make room and resume, what is finished is kept"
        )
    return OutputError(f"{path}: the work folder cannot be written: {error.strerror or error}")
