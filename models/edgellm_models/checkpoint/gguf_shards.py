"""Opens a GGUF file with all its shards: finds them by name, and checks that they are one complete model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_models.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from edgellm_models.checkpoint.mapped_file import MappedFile
from edgellm_models.checkpoint.sniff import FileKind, sniff_file
from edgellm_models.errors import BadInputError, NotFoundError
from edgellm_models.metadata_values import metadata_int, shown

MAX_SHARDS = 1000
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.[^.]+)?", re.DOTALL)


@dataclass(frozen=True)
class Shard:
    """One mapped file with its checked header."""

    file: MappedFile
    header: GGUFHeader


def open_shard(path: Path) -> Shard:
    """Map one file and check its header. BadInputError says what a file that is no GGUF looks like."""
    looks = sniff_file(path)
    if looks.kind is not FileKind.GGUF:
        raise BadInputError(f"{path}: not a GGUF file; this looks like {looks.text}")
    mapped = MappedFile(path)
    return Shard(mapped, read_gguf_header(mapped.buffer, mapped.size, str(path)))


def open_shards(path: Path) -> tuple[Shard, ...]:
    """All shards in order, whichever one ``path`` names; a file that is not split gives one.

    Raises NotFoundError naming the shards that are missing, BadInputError for shards that do not belong
    together.
    """
    opened = open_shard(path)
    count = _split_value(opened, "split.count", 1, 0, MAX_SHARDS)
    if count <= 1:
        return (opened,)
    paths = _shard_paths(path, opened, count)
    missing = [shard_path.name for shard_path in paths if not shard_path.exists()]
    if missing:
        raise NotFoundError(
            f"{path}: this model is split into {count} files; missing from {path.parent}: {shown(missing)}"
        )
    shards = tuple(opened if shard_path == path else open_shard(shard_path) for shard_path in paths)
    _check_belong_together(shards, count)
    return shards


def _split_value(shard: Shard, key: str, default: int, minimum: int, maximum: int) -> int:
    try:
        return metadata_int(shard.header.metadata, key, default, minimum=minimum, maximum=maximum)
    except BadInputError as error:
        raise BadInputError(f"{shard.file.path}: {error}") from None


def _shard_paths(path: Path, opened: Shard, count: int) -> list[Path]:
    number = _split_value(opened, "split.no", 0, 0, count - 1) + 1
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number:
        raise BadInputError(
            f"{path}: inside, this is shard {number} of {count}, so its name must end in "
            f"-{number:05d}-of-{count:05d}.gguf for the other shards to be found: give the files their names "
            "back"
        )
    ending = match["ending"] or ""
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{ending}") for i in range(1, count + 1)]


def _check_belong_together(shards: tuple[Shard, ...], count: int) -> None:
    for index, shard in enumerate(shards):
        where = f"{shard.file.path}: the shards do not belong to one model"
        own_count = _split_value(shard, "split.count", 1, 0, MAX_SHARDS)
        own_number = _split_value(shard, "split.no", 0, 0, MAX_SHARDS)
        if own_count != count or own_number != index:
            raise BadInputError(
                f"{where}: by its name this is number {index + 1} of {count}, inside it is number "
                f"{own_number + 1} of {own_count}"
            )
    first = shards[0]
    total = sum(len(shard.header.tensors) for shard in shards)
    owner: dict[str, Path] = {}
    for shard in shards:
        where = f"{shard.file.path}: the shards do not belong to one model"
        declared = _split_value(shard, "split.tensors.count", total, 0, 1 << 31)
        if declared != total:
            raise BadInputError(
                f"{where}: it declares {declared} tensors for the whole model, the {count} shards hold "
                f"{total}"
            )
        for key in ("general.architecture", "general.name", "general.file_type"):
            ours, theirs = first.header.metadata.get(key), shard.header.metadata.get(key)
            if theirs is not None and theirs != ours:
                raise BadInputError(
                    f"{where}: {key} is {_short(theirs)} here and {_short(ours)} in the first shard"
                )
        for tensor in shard.header.tensors:
            if tensor.name in owner:
                raise BadInputError(
                    f"{where}: the tensor {tensor.name!r} is also in {owner[tensor.name].name}"
                )
            owner[tensor.name] = shard.file.path


def _short(value: Any) -> str:
    return repr(value)[:60]
