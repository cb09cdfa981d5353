"""What a MODEL argument means: a catalog name, a file, a folder, or hf:owner/repo[:file]."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.catalog.catalog import HUB_PREFIX, Entry, hub_entry, load_catalog
from edgellm_models.catalog.store import find_local, list_local
from edgellm_models.errors import BadInputError, NotFoundError

_MODEL_SUFFIXES = (".gguf", ".safetensors")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_SIZED = re.compile(r"[A-Za-z][\w.]*([-_:][\w.]+)*[-_:]\d+(\.\d+)?[mMbB]?")
"""The form of a model's name: words, then a size, such as smollm2-135m or mistral:7b."""
_FILE = re.compile(
    r"\S+\.(gguf|ggml|safetensors|bin|pt|pth|onnx|json|jsonl|txt|md|csv|tsv|log|toml|yaml|yml|xml|html|pdf)",
    re.IGNORECASE,
)
NEAR = 0.7
"""The likeness (difflib) from which a word counts as a mistyped name; sentences' first words stay below."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model argument, understood."""

    name: str
    """The catalog name, ``hf:...``, or for a path its last part without ``.gguf`` and shard number."""
    path: Path | None
    """What to open; None when the model was not pulled yet (``catalog.pull_model`` fetches it)."""
    entry: Entry | None
    """Licence, sampling defaults and sources; None for a path."""


def resolve_model(argument: str, models_folder: Path) -> ResolvedModel:
    """Finds what ``argument`` names. Reads no weights and asks no network.

    NotFoundError (exit 66) names the nearest models and files; BadInputError is a malformed ``hf:`` argument.
    """
    catalog = load_catalog()
    if argument in catalog:
        local = find_local(argument, models_folder)
        return ResolvedModel(argument, local.path if local else None, catalog[argument])
    if argument.startswith(HUB_PREFIX):
        entry = hub_entry(argument)
        local = find_local(entry.name, models_folder)
        return ResolvedModel(entry.name, local.path if local else None, entry)
    path = Path(os.path.expanduser(argument)) if argument else Path(os.devnull)
    try:
        exists = path.exists() and bool(argument)
    except (OSError, ValueError):  # a name that is too long, or one with a NUL
        exists = False
    if exists:
        if path.is_dir() and not (path / "config.json").is_file():
            inside = _files_in(path)
            raise BadInputError(
                f"the folder {path} has no config.json, so it is no Hugging Face model"
                + (f"; name one of its files: {', '.join(inside[:5])}" if inside else "")
            )
        return ResolvedModel(_name_of(path), path, None)
    raise NotFoundError(_missing(argument, catalog, models_folder))


def is_model_argument(word: str, models_folder: Path, *, more_words: bool = False) -> bool:
    """Whether the first word of ``chat [MODEL] [PROMPT...]`` is a model rather than the begin of a prompt.

    A word that looks like a path, a file or a mistyped name is NotFoundError: a typing error never becomes a
    prompt for another model. ``more_words`` says that a prompt follows, so that the word may well be a model.
    """
    if word in load_catalog() or word.startswith(HUB_PREFIX):
        return True
    try:
        if word and Path(os.path.expanduser(word)).exists():
            return True
    except (OSError, ValueError):
        return False
    if looks_like_path(word) or _FILE.fullmatch(word) or is_mistyped(word, models_folder, more_words):
        raise NotFoundError(_missing(word, load_catalog(), models_folder) + "; a prompt goes after -p")
    return False


def is_mistyped(word: str, models_folder: Path, more_words: bool = False) -> bool:
    """Whether a word, which names no model, was meant to: a known name in other letters' case; one near to
    it or of its form.

    Near counts for a word that a prompt follows or that has the form of a name and size; one that ends in a
    size (``x-7b``) always counts, since no other model may answer for it.
    """
    if not word or len(word) > 100 or any(map(str.isspace, word)):
        return False
    names = known_names(models_folder)
    lower = word.lower()
    if lower in map(str.lower, names):
        return True
    sized = _SIZED.fullmatch(word) is not None
    if sized and lower[-1] in "mb":
        return True
    return (sized or more_words) and bool(difflib.get_close_matches(lower, names, n=1, cutoff=NEAR))


def looks_like_path(word: str) -> bool:
    """Has the form of a path or model file: a separator or a model's suffix, no white space, no scheme."""
    if not word or "://" in word:
        return False
    if word.startswith(("./", "../", "~/", ".\\", "..\\")):
        return True
    if word.lower().endswith(_MODEL_SUFFIXES):
        return "\n" not in word
    return not any(c.isspace() for c in word) and ("/" in word or "\\" in word)


def known_names(models_folder: Path) -> list[str]:
    """Every name that resolves without a path: the catalog's and those of pulled hub models."""
    return list(dict.fromkeys([*load_catalog(), *(model.name for model in list_local(models_folder))]))


def _missing(argument: str, catalog: dict[str, Entry], models_folder: Path) -> str:
    local = [model.name for model in list_local(models_folder)]
    names = list(dict.fromkeys([*catalog, *local]))
    near = difflib.get_close_matches(argument.lower(), names, n=3, cutoff=0.5)
    path = Path(os.path.expanduser(argument or "."))
    # Only names of models: nearest means nearest model, and a home folder may hold anything.
    siblings = _files_in(path.parent)
    near += [
        str(path.parent / name) for name in difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    ]
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:.+)?", argument) and not argument.startswith("."):
        near.append(f"{HUB_PREFIX}{argument}")
    shown = argument if len(argument) <= 200 else argument[:200] + "..."
    hint = f"nearest: {', '.join(near)}" if near else f"the catalog has {', '.join(names)}"
    return f"no model or file {shown!r}; {hint}"


def _files_in(folder: Path) -> list[str]:
    """Model files and model folders directly in a folder, at most a thousand entries looked at."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(1000), entries, strict=False):
                if entry.name.lower().endswith(_MODEL_SUFFIXES) or (
                    entry.is_dir() and os.path.isfile(os.path.join(entry.path, "config.json"))
                ):
                    found.append(entry.name)
    except (OSError, ValueError):
        return []
    return sorted(found)


def _name_of(path: Path) -> str:
    name = path.resolve().name
    if not name.lower().endswith(".gguf"):
        return name
    return _SHARD.sub("", name) if _SHARD.search(name) else name[: -len(".gguf")]
