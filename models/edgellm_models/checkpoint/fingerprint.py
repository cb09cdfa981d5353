"""A short name for a model's content: which files hold the same weights, wherever they lie."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from edgellm_models.checkpoint.mapped_file import file_error

SAMPLE_BYTES = 4096
SAMPLE_EVERY = 1 << 20
"""A sample per megabyte: a model of 5 GB takes 20 MB of reads, which were just made to load it."""
_SHARD = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


def fingerprint(path: Path) -> str:
    """32 hex digits of a GGUF file with its shards, or of a folder's config.json and safetensors files.

    Of sizes, of every header's beginning and of a sample of each megabyte. Two quantizations or two trainings
    of a model differ in almost every byte of their weights; who changes less than a sample sees keeps the
    name, so this is no protection against somebody who wants that. NotFoundError, PermissionDeniedError.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(path):
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, 2)
                digest.update(f"{size}\n".encode())
                for start in range(0, size, SAMPLE_EVERY):
                    opened.seek(start)
                    digest.update(opened.read(16 * SAMPLE_BYTES if start == 0 else SAMPLE_BYTES))
                opened.seek(max(0, size - SAMPLE_BYTES))
                digest.update(opened.read(SAMPLE_BYTES))
        except OSError as error:
            raise file_error(file, error) from error
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    return sorted(path.parent.glob(f"{_escape(match['stem'])}-?????-of-{match['count']}.gguf"))


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
