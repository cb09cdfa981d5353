"""A dense Hugging Face model as GGUF: tensors renamed, rearranged and cast, one chunk in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_models.errors import BadInputError, Notice, UsageError
from edgellm_quantize.gguf_file import Chunks, PlannedTensor, write_gguf_file
from edgellm_quantize.gguf_metadata import FILE_TYPES
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.gguf_source import SourceTensor, open_gguf_source

_F16_MAX = 65504.0


@dataclass(frozen=True)
class DenseGGUFReport:
    """What was written."""

    path: Path
    nbytes: int
    num_tensors: int
    notices: tuple[Notice, ...]
    """What the GGUF file says otherwise than the folder."""


def write_dense_gguf(source: Path, out: Path, dtype: str) -> DenseGGUFReport:
    """Write the Hugging Face folder ``source`` as the GGUF file ``out``.

    ``dtype`` (f32, f16, bf16) is the type of the matrices; vectors are f32. Errors: UsageError for another
    dtype, BadInputError for a source that cannot be read or that GGUF cannot express (NaN weights too),
    OutputError when the file cannot be written, in which case nothing is left behind.
    """
    if dtype not in FILE_TYPES:
        raise UsageError(f"dtype {dtype!r} is not known; known are {', '.join(FILE_TYPES)}")
    source, out = Path(source), Path(out)
    model = open_gguf_source(source, dtype)
    try:
        if model.is_gguf:
            raise BadInputError(f"{source}: a Hugging Face folder is needed, this is gguf")
        kind = dtype.upper()
        tensors = [plan_dense(tensor, kind if len(tensor.shape) == 2 else "F32") for tensor in model.tensors]
        nbytes = write_gguf_file(out, model.metadata, tensors)
    finally:
        model.close()
    return DenseGGUFReport(out, nbytes, len(tensors), tuple(model.notices))


def plan_dense(tensor: SourceTensor, kind: str) -> PlannedTensor:
    """A tensor of a dense type: F32, F16 or BF16."""
    nbytes = tensor_nbytes(tensor.shape, kind)
    return PlannedTensor(tensor.name, tensor.shape, kind, nbytes, partial(_chunks, tensor, kind))


def _chunks(tensor: SourceTensor, kind: str) -> Chunks:
    for rows in tensor.rows():
        yield cast_dense(rows, kind, tensor.file_name)


def cast_dense(rows: np.ndarray[Any, Any], kind: str, name: str) -> np.ndarray[Any, Any]:
    """f32 rows as F32, F16 or BF16. BadInputError names the tensor whose values the type cannot hold."""
    import torch

    if kind == "F16":
        largest = float(np.abs(rows).max()) if rows.size else 0.0
        if largest > _F16_MAX:
            raise BadInputError(
                f"tensor {name} has the value {largest:g}, too large for f16 ({_F16_MAX:g}): "
                f"write bf16 or f32"
            )
        return torch.from_numpy(rows).to(torch.float16).numpy()
    if kind == "BF16":
        cast = torch.from_numpy(rows).to(torch.bfloat16)
        if not bool(torch.isfinite(cast).all()):
            raise BadInputError(f"tensor {name} has a value too large for bf16: write f32")
        return cast.view(torch.int16).numpy()
    return rows
