"""The models folder: what was pulled, where it lies and what it was, one folder with a manifest per model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgellm_models.catalog.catalog import HUB_PREFIX
from edgellm_models.catalog.locking import model_lock
from edgellm_models.errors import NotFoundError, OutputError, UnavailableError

MANIFEST = "edgellm-model.json"
MAX_MANIFEST_BYTES = 1 << 20
PARTIAL = ".partial"
LOCKS = ".locks"


@dataclass(frozen=True)
class StoredFile:
    """One file of a pulled model, relative to the model's folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class LocalModel:
    """A model that was pulled whole and verified."""

    name: str
    folder: Path
    files: tuple[StoredFile, ...]
    main: str
    """What to open, relative to the folder: a GGUF file (the first shard), or ``.`` for a model folder."""
    source: str
    licence: str
    pulled: str
    """Date, UTC, ISO 8601."""

    @property
    def path(self) -> Path:
        return self.folder if self.main == "." else self.folder / self.main

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def key_of(name: str) -> str:
    """The folder name of a model: ``hf:owner/repo:file`` gives ``hf--owner--repo@file``."""
    if not name.startswith(HUB_PREFIX):
        return name
    key = "hf--" + name.removeprefix(HUB_PREFIX).replace(":", "@").replace("/", "--")
    # File systems end names at 255 bytes.
    return key if len(key) <= 200 else f"{key[:180]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def lock_path(name: str, models_folder: Path) -> Path:
    """The lock file of a model; it stays when the model goes, since another process may hold it open."""
    return models_folder / LOCKS / f"{key_of(name)}.lock"


def find_local(name: str, models_folder: Path) -> LocalModel | None:
    """The pulled model of that name, or None; files that are gone or changed in size count as not pulled."""
    model = _read(models_folder / key_of(name))
    return model if model is not None and model.name == name else None


def list_local(models_folder: Path) -> list[LocalModel]:
    """Every pulled model, by name."""
    try:
        folders = sorted(path for path in models_folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [model for folder in folders if (model := _read(folder)) is not None]
    return sorted(found, key=lambda model: model.name)


def write_manifest(model: LocalModel) -> None:
    """Writes the manifest into the model's folder, which is not yet at its final place."""
    record = asdict(model)
    del record["folder"]
    path = model.folder / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def move_into_place(prepared: LocalModel, models_folder: Path) -> LocalModel:
    """Renames a whole prepared folder to its final name: a model is either there whole or not at all."""
    final = models_folder / key_of(prepared.name)
    if final.exists():
        _delete(final)
    try:
        os.rename(prepared.folder, final)
    except OSError as error:
        raise OutputError(f"cannot move the model to {final}: {error.strerror}") from None
    sync_folder(models_folder)
    return replace(prepared, folder=final)


def remove_local(name: str, models_folder: Path) -> int:
    """Deletes a pulled model and what is left of an unfinished pull; returns the bytes freed.

    NotFoundError when there is neither; UnavailableError while a pull of it is running.
    """
    places = [models_folder / key_of(name), models_folder / PARTIAL / key_of(name)]
    places = [place for place in places if place.is_dir()]
    if not places:
        have = ", ".join(model.name for model in list_local(models_folder))
        raise NotFoundError(f"{name} is not among the pulled models ({have or 'none'})")

    def busy() -> None:
        raise UnavailableError(f"a pull of {name} is running; stop it first")

    with model_lock(lock_path(name, models_folder), busy):
        places = [place for place in places if place.is_dir()]
        freed = sum(folder_bytes(place) for place in places)
        for place in places:
            _delete(place)
    return freed


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder; files that vanish meanwhile count as nothing."""
    return sum(_size(path) for path in _walk(folder))


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(folder: Path) -> LocalModel | None:
    try:
        with (folder / MANIFEST).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        record: dict[str, Any] = json.loads(data)
        files = tuple(StoredFile(**file) for file in record.pop("files"))
        model = LocalModel(folder=folder, files=files, **record)
        whole = bool(files) and all(os.path.getsize(folder / file.name) == file.bytes for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return model if whole and key_of(model.name) == folder.name else None


def _walk(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _delete(folder: Path) -> None:
    # Renamed first: a deletion that is interrupted must not leave half a model under its name.
    hidden = folder.with_name(f".deleting-{folder.name}")
    try:
        if hidden.exists():
            shutil.rmtree(hidden)
        os.rename(folder, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise OutputError(f"cannot delete {folder}: {error.strerror}") from None
