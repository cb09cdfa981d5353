"""Importance matrices as files: llama.cpp's GGUF form written and read, its older .dat form read."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgellm_models.errors import BadInputError, EdgeLLMError, Notice, OutputError
from edgellm_quantize.gguf_file import PlannedTensor, write_gguf_file
from edgellm_quantize.gguf_values import array, text, u32

Array = np.ndarray[Any, Any]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES, _MAX_NAME, _MAX_DATASET = 100_000, 1024, 1 << 20
_MAX_COLUMNS = 1 << 24
"""Of one entry, over all experts of a layer: 256 of 7,168 are 1.8 million."""
_LEAST_ENTRY = 4 + 1 + 4 + 4 + 4
"""Bytes of an entry with a name of one letter and one column."""


@dataclass(frozen=True)
class ImportanceEntry:
    """What one weight's input looked like."""

    mean_square: Array
    """f32 [K] (or [experts * K]): mean of x^2 of each column, not negative."""
    count: int
    """Tokens that were seen, over all experts."""


@dataclass(frozen=True)
class ImportanceMatrix:
    """The mean squared inputs of a model's weights."""

    entries: Mapping[str, ImportanceEntry]
    """By GGUF tensor name, such as ``blk.0.attn_q.weight``."""
    datasets: tuple[str, ...] = ()
    """What the text was, in words or file names."""
    chunk_count: int = 0
    chunk_size: int = 0
    """Tokens of a chunk."""

    def column_weights(self, name: str, columns: int) -> Array | None:
        """f32 [columns] for a weight, None without an entry. BadInputError for another length."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry.mean_square.shape != (columns,):
            raise BadInputError(
                f"importance matrix: {name} has {entry.mean_square.size} columns, the weight has {columns}: "
                "it was made for another model"
            )
        return entry.mean_square


def no_importance_notice(names: Sequence[str]) -> list[Notice]:
    """Of the tensors that a matrix says nothing of; none where there are none."""
    if not names:
        return []
    detail = f"{len(names)} tensors have no importance and are rounded without: {', '.join(names[:5])}"
    return [Notice("no_importance", detail + (" ..." if len(names) > 5 else ""))]


def write_imatrix(out: Path, matrix: ImportanceMatrix) -> int:
    """Write llama.cpp's GGUF form (sums of x^2 and token counts) and return its bytes.

    OutputError if it cannot be written; then nothing is left behind. Format: llama.cpp,
    tools/imatrix/imatrix.cpp.
    """
    metadata = {
        "general.architecture": text("imatrix"),
        "general.type": text("imatrix"),
        "imatrix.datasets": array("STRING", matrix.datasets or ("unknown",)),
        "imatrix.chunk_count": u32(matrix.chunk_count),
        "imatrix.chunk_size": u32(matrix.chunk_size),
    }
    tensors = []
    for name, entry in sorted(matrix.entries.items()):
        sums = (entry.mean_square.astype(np.float64) * entry.count).astype(np.float32)
        counts = np.array([entry.count], dtype=np.float32)
        for suffix, values in ((_SUMS, sums), (_COUNTS, counts)):
            tensors.append(
                PlannedTensor(name + suffix, (1, values.size), "F32", values.nbytes, partial(_one, values))
            )

    def check(written: Path, *_: object) -> None:
        try:
            found = read_imatrix(written)
        except EdgeLLMError as error:
            raise OutputError(f"the file that was written does not read back: {error}") from error
        if set(found.entries) != set(matrix.entries):
            raise OutputError("the importance matrix that was written lacks entries")

    return write_gguf_file(out, metadata, tensors, check=check)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read a file of llama-imatrix, of ours, or an old .dat one. NotFoundError, BadInputError."""
    from edgellm_models.checkpoint.mapped_file import file_error

    path = Path(path)
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                stream.seek(0)
                return _read_legacy(stream, os.fstat(stream.fileno()).st_size, path)
    except OSError as error:
        raise file_error(path, error) from error
    return _read_gguf(path)


def _read_gguf(path: Path) -> ImportanceMatrix:
    import mmap

    from edgellm_models.checkpoint.gguf_header import read_gguf_header

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        header = read_gguf_header(view, len(view), str(path))
        values = {}
        for tensor in header.tensors:
            if not tensor.name.endswith((_SUMS, _COUNTS)):
                continue
            if tensor.ggml_type.name != "F32":
                raise BadInputError(f"{path}: tensor {tensor.name!r} is {tensor.ggml_type.name}, not F32")
            # A copy: the mapping goes when this returns.
            raw = view[tensor.start : tensor.start + tensor.nbytes]
            values[tensor.name] = np.frombuffer(raw, dtype="<f4")
    entries = {}
    for name, sums in values.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = values.get(weight + _COUNTS)
        if counts is None or counts.size == 0 or sums.size % counts.size:
            raise BadInputError(f"{path}: the sums of {weight!r} have no counts that fit them")
        _check_values(path, weight, sums)
        _check_values(path, weight, counts)
        per_matrix = sums.reshape(counts.size, -1).astype(np.float64)
        safe = np.maximum(counts, 1.0)[:, None]
        means = np.where(counts[:, None] > 0, per_matrix / safe, 1.0)  # an expert that nothing reached
        entries[weight] = ImportanceEntry(means.reshape(-1).astype(np.float32), int(counts.sum()))
    if not entries:
        raise BadInputError(
            f"{path}: this GGUF file holds no importance matrix (no tensor named *{_SUMS}): "
            "give a file of llama-imatrix or of --save-imatrix"
        )
    metadata = header.metadata
    datasets = metadata.get("imatrix.datasets", ())
    return ImportanceMatrix(
        entries,
        tuple(str(entry) for entry in datasets) if isinstance(datasets, list) else (),
        _whole(metadata.get("imatrix.chunk_count")),
        _whole(metadata.get("imatrix.chunk_size")),
    )


def _one(values: Array) -> list[Array]:
    return [values]


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _check_values(path: Path, name: str, values: Array) -> None:
    if not np.isfinite(values).all() or (values < 0).any():
        raise BadInputError(f"{path}: {name!r} holds values that are negative or not finite")


def _read_legacy(stream: BinaryIO, size: int, path: Path) -> ImportanceMatrix:
    """The form before GGUF: count; per entry name, calls, values (means times calls); chunks, dataset.

    Each length is checked against what is left of the file before it is read, so that a file of another kind
    costs as much as its first entry.
    """
    refused = f"{path}: this is no importance matrix"
    left = size

    def take(count: int, what: str) -> bytes:
        nonlocal left
        if not 0 <= count <= left:
            raise BadInputError(f"{refused}: it ends or breaks off in {what}")
        left -= count
        data = stream.read(count)
        if len(data) < count:
            raise BadInputError(f"{refused}: it ends in {what}")
        return data

    def whole(what: str) -> int:
        return int(struct.unpack("<i", take(4, what))[0])

    count = whole("the number of entries")
    if not 1 <= count <= _MAX_ENTRIES or count * _LEAST_ENTRY > left:
        raise BadInputError(f"{refused}: it claims {count} entries")
    entries: dict[str, ImportanceEntry] = {}
    for index in range(count):
        length = whole(f"entry {index}")
        if not 1 <= length <= _MAX_NAME:
            raise BadInputError(f"{refused}: a name of {length} bytes")
        name = take(length, "a name").decode("utf-8", "replace")
        calls, columns = whole(f"entry {name!r}"), whole(f"entry {name!r}")
        if not 1 <= columns <= _MAX_COLUMNS or name in entries:
            raise BadInputError(f"{refused}: {name[:80]!r} is there twice or claims {columns} values")
        values = np.frombuffer(take(4 * columns, f"the values of {name!r}"), dtype="<f4")
        _check_values(path, name, values)
        means = np.divide(values, max(1, calls), dtype=np.float32)
        entries[name] = ImportanceEntry(means, max(1, calls))
    chunks = 0
    datasets: tuple[str, ...] = ()
    if left >= 8:
        chunks = max(0, whole("the chunks"))
        length = whole("the dataset")
        if length > _MAX_DATASET:
            raise BadInputError(f"{refused}: the name of a dataset of {length} bytes")
        datasets = (take(length, "the dataset").decode("utf-8", "replace"),)
    return ImportanceMatrix(entries, datasets, chunks, 0)
