"""Checksums of files, in pieces, with progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 1 << 20


def sha256_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file in hexadecimal; ``on_bytes`` is called with the bytes read so far."""
    return _digest(path, hashlib.sha256(), on_bytes)


def git_blob_id(path: Path) -> str:
    """The id under which git, and the hub for small files, knows a content: SHA-1 over header and file."""
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(b"blob %d\0" % path.stat().st_size)
    return _digest(path, digest, lambda count: None)


def _digest(path: Path, digest: hashlib._Hash, on_bytes: Callable[[int], None]) -> str:
    done = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()
