"""Which files of a hub repository make a model: one GGUF with its shards, or a safetensors folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_models.catalog.store import MANIFEST
from edgellm_models.errors import BadInputError, NotFoundError, Notice

MAX_FILES = 2000
_SAFE_PART = re.compile(r"[A-Za-z0-9_][\w.+() -]{0,199}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_FOLDER_SUFFIXES = (".json", ".safetensors", ".jinja", ".model")
_FOLDER_NAMES = frozenset({"merges.txt", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"})
_PREFERRED = "q4_k_m"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class RemoteFile:
    """One file as the hub lists it."""

    name: str
    size: int | None
    sha256: str | None
    """For files in large file storage; small ones have their git id only."""
    blob_id: str | None = None


@dataclass(frozen=True)
class Choice:
    """What to fetch."""

    files: tuple[RemoteFile, ...]
    main: str
    """The GGUF file to open (the first shard), or ``.`` for a folder."""
    notices: tuple[Notice, ...] = ()


def choose_files(repo: str, files: Sequence[RemoteFile], wanted: str | None) -> Choice:
    """The files of ``hf:repo[:wanted]``.

    NotFoundError (exit 66) names the nearest files; BadInputError when the repository holds no model that is
    read, or several of which none is the obvious one.
    """
    files = [file for file in files[:MAX_FILES] if is_safe_name(file.name)]
    by_name = {file.name: file for file in files}
    if wanted is not None:
        return _named(repo, by_name, wanted)
    weights = [f for f in files if f.name.endswith(".safetensors") and "/" not in f.name]
    if weights and "config.json" in by_name:
        return Choice(tuple(f for f in files if _belongs_to_folder(f.name)), ".")
    ggufs = [name for name in by_name if _is_first_gguf(name)]
    if len(ggufs) == 1:
        return _named(repo, by_name, ggufs[0])
    if not ggufs:
        pickled = any(file.name.endswith(PICKLES) for file in files)
        why = (
            "only pickled weights, which are never read"
            if pickled
            else "no GGUF file and no safetensors model"
        )
        raise BadInputError(f"hf:{repo} holds {why}")
    preferred = [name for name in ggufs if _PREFERRED in name.lower()]
    if len(preferred) != 1:
        raise BadInputError(
            f"hf:{repo} holds {len(ggufs)} models; name one, such as hf:{repo}:{_some(ggufs)}"
        )
    chosen = _named(repo, by_name, preferred[0])
    notice = Notice("file_chosen", f"hf:{repo} holds {len(ggufs)} models; taking {preferred[0]}")
    return Choice(chosen.files, chosen.main, (notice,))


def is_safe_name(name: str) -> bool:
    """A relative path of ordinary names, so that it cannot leave the folder that it is stored in."""
    parts = name.split("/")
    return len(parts) <= 8 and all(_SAFE_PART.fullmatch(part) and ".." not in part for part in parts)


def _named(repo: str, by_name: dict[str, RemoteFile], wanted: str) -> Choice:
    if wanted not in by_name:
        models = [name for name in by_name if _is_first_gguf(name)]
        near = difflib.get_close_matches(wanted, models, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {_some(models) or 'no GGUF file'}"
        raise NotFoundError(f"hf:{repo} has no file {wanted!r}; {hint}")
    if not wanted.endswith(".gguf"):
        raise BadInputError(f"{wanted} is no GGUF file; hf:{repo} alone takes the whole model folder")
    shard = _SHARD.fullmatch(wanted)
    if shard is None:
        return Choice((by_name[wanted],), wanted)
    count = int(shard["count"])
    if not 1 <= count <= MAX_FILES:
        raise BadInputError(f"{wanted} claims {count} shards")
    names = [f"{shard['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise NotFoundError(f"hf:{repo} lacks {len(missing)} of {count} shards, the first is {missing[0]}")
    return Choice(tuple(by_name[name] for name in names), names[0])


def _is_first_gguf(name: str) -> bool:
    if not name.endswith(".gguf") or "mmproj" in name.lower():
        return False
    shard = _SHARD.fullmatch(name)
    return shard is None or int(shard["index"]) == 1


def _belongs_to_folder(name: str) -> bool:
    if "/" in name or name.startswith("consolidated"):  # a second copy of the weights in another layout
        return False
    if name == MANIFEST:  # ours, which is written beside the files
        return False
    return name.endswith(_FOLDER_SUFFIXES) or name in _FOLDER_NAMES


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(list(names)[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
