"""Reference rows on disk: one checked file per reference model, text and window, within a bound for all.

A file is a line of JSON, then a record per row: best id i32, CRC-32 of the codes u32, codes u16 [vocab], all
little-endian. It is written beside its name and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from edgellm.evaluate.measures import ReferenceRows
from edgellm_models.errors import Notice

FORMAT = 1
SUFFIX = ".rows"
MAX_BYTES = 4 << 30
"""Of all files of the folder; the oldest go first."""
DISK_RESERVE = 1 << 30
"""Bytes of the disk that are left free."""
_MAX_HEADER = 1 << 16
_VERIFY_ROWS = 64


@dataclass(frozen=True)
class CacheKey:
    """What the rows depend on. Everything that changes one must be in ``facts``."""

    facts: Mapping[str, Any]
    num_rows: int
    vocab_size: int

    @property
    def record_bytes(self) -> int:
        return 8 + 2 * self.vocab_size

    def header(self) -> bytes:
        text = {"format": FORMAT, "rows": self.num_rows, "vocab": self.vocab_size, **self.facts}
        return json.dumps(text, sort_keys=True).encode() + b"\n"

    @property
    def total_bytes(self) -> int:
        return len(self.header()) + self.num_rows * self.record_bytes

    @property
    def file_name(self) -> str:
        return hashlib.sha256(self.header()).hexdigest()[:40] + SUFFIX


def fingerprint(path: Path) -> str:
    """SHA-256 of a model: of its file with its shards, or of a folder's files, with their names."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json", ".model", ".gguf"))
    else:
        shards = sorted(path.parent.glob(path.name.split("-00001-of-")[0] + "-*.gguf"))
        files = shards if "-00001-of-" in path.name else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name if path.is_dir() else ''}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


@dataclass
class CachedRows:
    """An open, checked file; rows are read one after the other."""

    key: CacheKey
    stream: BinaryIO

    def read(self, count: int) -> ReferenceRows:
        """The next ``count`` rows."""
        best, _, codes = _split(self.stream.read(count * self.key.record_bytes), self.key)
        assert len(best) == count, "the file was checked when it was opened"
        return ReferenceRows(best, codes)

    def close(self) -> None:
        self.stream.close()


@dataclass
class RowWriter:
    """Writes a file beside its name; ``commit`` gives it its name, leaving without it removes it."""

    key: CacheKey
    target: Path
    stream: BinaryIO
    temporary: Path
    failure: str | None = None
    """Why nothing more is written; the evaluation goes on without the cache."""
    _rows: int = field(default=0, repr=False)

    def append(self, rows: ReferenceRows) -> None:
        if self.failure is not None:
            return
        record = np.zeros(len(rows.best), _record_type(self.key))
        record["best"], record["codes"] = rows.best, rows.codes
        record["crc"] = [zlib.crc32(row.tobytes()) for row in record["codes"]]
        try:
            self.stream.write(record.tobytes())
        except OSError as error:
            self.failure = error.strerror or str(error)
        self._rows += len(rows.best)

    def commit(self) -> None:
        """Keeps the file. Does nothing where writing failed; a file with rows missing is never kept."""
        assert self.failure is not None or self._rows == self.key.num_rows
        if self.failure is not None:
            return
        try:
            self.stream.close()
            self.temporary.replace(self.target)
        except OSError as error:
            self.failure = error.strerror or str(error)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        self.temporary.unlink(missing_ok=True)


class ReferenceCache:
    """The files of one folder. Everything that cannot be cached is a notice, never an error."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def open(self, key: CacheKey) -> tuple[CachedRows | None, Notice | None]:
        """The rows of ``key`` if they are here and whole. A damaged file is removed, with a notice."""
        path = self.folder / key.file_name
        try:
            stream = path.open("rb")
        except OSError:
            return None, None
        problem = _damage(stream, key)
        if problem is None:
            with contextlib.suppress(OSError):
                os.utime(path)  # the oldest go first
            stream.seek(len(key.header()))
            return CachedRows(key, stream), None
        stream.close()
        with contextlib.suppress(OSError):
            path.unlink()
        detail = f"the cached reference {path.name} is damaged ({problem}); it is computed again"
        return None, Notice("reference_cache_damaged", detail)

    def writer(self, key: CacheKey) -> tuple[RowWriter | None, Notice | None]:
        """A writer for rows that are not here, or why they are not kept."""
        size = key.total_bytes
        refusal = None
        if size > self.max_bytes:
            refusal = f"they take {size / 1e9:.1f} GB and the cache at most {self.max_bytes / 1e9:.1f} GB"
        else:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._make_room(size)
                free = shutil.disk_usage(self.folder).free
                if free < size + DISK_RESERVE:
                    refusal = f"they take {size / 1e9:.1f} GB and {free / 1e9:.1f} GB of the disk are free"
                else:
                    handle, name = tempfile.mkstemp(suffix=".part", dir=self.folder)
                    stream = os.fdopen(handle, "wb")
                    stream.write(key.header())
                    return RowWriter(key, self.folder / key.file_name, stream, Path(name)), None
            except OSError as error:
                refusal = f"{self.folder}: {error.strerror}"
        detail = f"the reference's logits are not kept for later runs: {refusal}"
        return None, Notice("reference_not_cached", detail)

    def _make_room(self, size: int) -> None:
        files = sorted(
            (p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.iterdir() if p.suffix == SUFFIX
        )
        total = sum(length for _, length, _ in files)
        for _, length, path in files:
            if total + size <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= length


def _record_type(key: CacheKey) -> np.dtype[Any]:
    return np.dtype([("best", "<i4"), ("crc", "<u4"), ("codes", "<u2", (key.vocab_size,))])


def _split(data: bytes, key: CacheKey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    records = np.frombuffer(data, _record_type(key))
    return records["best"], records["crc"], records["codes"]


def _damage(stream: BinaryIO, key: CacheKey) -> str | None:
    """What is wrong with a file, or None. Reads all of it."""
    size = os.fstat(stream.fileno()).st_size
    if size != key.total_bytes:
        return f"{size} bytes instead of {key.total_bytes}"
    if stream.readline(_MAX_HEADER) != key.header():
        return "its header is another's"
    for start in range(0, key.num_rows, _VERIFY_ROWS):
        count = min(_VERIFY_ROWS, key.num_rows - start)
        best, crc, codes = _split(stream.read(count * key.record_bytes), key)
        for row in range(count):
            if zlib.crc32(codes[row].tobytes()) != crc[row] or not 0 <= best[row] < key.vocab_size:
                return f"row {start + row} does not match its checksum"
    return None
