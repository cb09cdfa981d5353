"""Finds the weight files of a Hugging Face folder and checks that index, files and names agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgellm_models.checkpoint.json_files import read_json_object
from edgellm_models.checkpoint.mapped_file import MappedFile
from edgellm_models.checkpoint.safetensors_header import SafeTensor, read_safetensors_header
from edgellm_models.checkpoint.sniff import PICKLE_ADVICE, FileKind, sniff_file
from edgellm_models.errors import BadInputError, NotFoundError
from edgellm_models.metadata_values import shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILES = 1000


@dataclass(frozen=True)
class WeightFile:
    """One mapped safetensors file with its checked header."""

    mapped: MappedFile
    tensors: dict[str, SafeTensor]


def open_weight_files(folder: Path) -> tuple[WeightFile, ...]:
    """The weight files of a folder: model.safetensors, or the shards that its index lists.

    BadInputError for pickle weights, a stale index and names that are not where the index says; NotFoundError
    for shards that are missing.
    """
    if (folder / SINGLE).exists():
        return (_open_file(folder / SINGLE),)
    if (folder / INDEX).exists():
        return _open_indexed(folder)
    raise BadInputError(_no_weights(folder))


def _open_file(path: Path) -> WeightFile:
    looks = sniff_file(path)
    # a file with a damaged length field looks like nothing: the header check states both sizes
    if looks.kind not in (FileKind.SAFETENSORS, FileKind.UNKNOWN):
        raise BadInputError(f"{path}: not a safetensors file; this looks like {looks.text}")
    mapped = MappedFile(path)
    return WeightFile(mapped, read_safetensors_header(mapped.buffer, mapped.size, str(path)))


def _open_indexed(folder: Path) -> tuple[WeightFile, ...]:
    index_path = folder / INDEX
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(f"{index_path}: it has no weight_map")
    for name, file_name in weight_map.items():
        # a name from a downloaded file must not lead out of the folder
        if (
            not isinstance(file_name, str)
            or file_name != Path(file_name).name
            or file_name in ("", "..")
            or "\\" in file_name
            or not file_name.isprintable()
        ):
            raise BadInputError(
                f"{index_path}: {name[:80]!r} is said to lie in {str(file_name)[:80]!r}, no file name"
            )
    named = sorted(set(weight_map.values()))
    if len(named) > MAX_FILES:
        raise BadInputError(f"{index_path}: it names {len(named):,} files (at most {MAX_FILES})")
    _refuse_missing(folder, named)
    files = {name: _open_file(folder / name) for name in named}
    _check_names(index_path, weight_map, files)
    return tuple(files.values())


def _refuse_missing(folder: Path, named: list[str]) -> None:
    missing = [name for name in named if not (folder / name).exists()]
    if not missing:
        return
    others = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.suffix == ".safetensors" and entry.name not in set(named)
    )
    if others:
        raise BadInputError(
            f"{folder / INDEX}: the index does not match the files: it names {shown(missing)}, which are not "
            "there, "
            f"while the folder holds {shown(others)}; fetch the index and the weights again from one place"
        )
    raise NotFoundError(
        f"{folder}: {len(missing)} of {len(named)} weight files that the index names are missing: "
        f"{shown(missing)}"
    )


def _check_names(index_path: Path, weight_map: dict[str, str], files: dict[str, WeightFile]) -> None:
    owner: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if name in owner:
                raise BadInputError(
                    f"{index_path}: the tensor {name!r} lies in both {owner[name]} and {file_name}"
                )
            owner[name] = file_name
    for name, file_name in weight_map.items():
        if owner.get(name) != file_name:
            where = f"it is in {owner[name]}" if name in owner else "no file has it"
            raise BadInputError(
                f"{index_path}: the index does not match the files: it says that {name[:120]!r} is in "
                f"{file_name}, {where}"
            )


def _no_weights(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if safetensors:
        return (
            f"{folder}: neither {SINGLE} nor {INDEX} is there, only {shown(safetensors)}; the index tells "
            "which belong together: fetch it too"
        )
    if pickles:
        return f"{folder}: the weights are in {shown(pickles)}: {PICKLE_ADVICE}"
    return f"{folder}: config.json is there, but no weights ({SINGLE} or {INDEX})"
