"""A dense Hugging Face model as GGUF: tensors renamed, rearranged and cast, one chunk in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_models.errors import BadInputError, Notice, UsageError
from edgellm_quantize.gguf_file import Chunks, PlannedTensor, write_gguf_file
from edgellm_quantize.gguf_metadata import FILE_TYPES, ModelFields, model_fields, permutes_qk
from edgellm_quantize.gguf_special_ids import chat_template_fields, sampling_fields
from edgellm_quantize.gguf_tokenizer import name_for_readers, tokenizer_fields
from edgellm_quantize.hf_tokenizer_files import read_tokenizer_files

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint, TensorInfo
    from edgellm_models.network.spec import ModelSpec

_CHUNK_WEIGHTS = 8 << 20
"""Weights that are converted at once: 32 MiB as f32."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
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
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network import read_spec

    if dtype not in FILE_TYPES:
        raise UsageError(f"dtype {dtype!r} is not known; known are {', '.join(FILE_TYPES)}")
    source, out = Path(source), Path(out)
    checkpoint = open_checkpoint(source)
    try:
        if checkpoint.file_format != "safetensors":
            raise BadInputError(
                f"{source}: a Hugging Face folder is needed, this is {checkpoint.file_format}"
            )
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
        files = read_tokenizer_files(source)
        fields = model_fields(spec, name=name_for_readers(source.resolve().name, files), dtype=dtype)
        words = tokenizer_fields(files, checkpoint.metadata, spec.vocab_size)
        notices = [*checkpoint.notices, *fields.notices, *words.notices]
        metadata = fields.metadata | words.metadata
        metadata |= chat_template_fields(files, notices) | sampling_fields(files.generation)
        tensors = _plan(checkpoint, spec, fields, dtype.upper(), notices)
        nbytes = write_gguf_file(out, metadata, tensors)
    finally:
        checkpoint.close()
    return DenseGGUFReport(out, nbytes, len(tensors), tuple(notices))


def _plan(
    checkpoint: Checkpoint, spec: ModelSpec, fields: ModelFields, type_name: str, notices: list[Notice]
) -> list[PlannedTensor]:
    """Every tensor of the file, in the order in which a model runs."""
    from edgellm_models.checkpoint.tensor_names import is_canonical

    infos = checkpoint.tensors()
    if "output.weight" not in infos and not spec.tied_embeddings:
        raise BadInputError(
            f"{checkpoint.path}: lm_head.weight is missing, but config.json says that the head is not tied"
        )
    planned = [_rope_table(name, values) for name, values in fields.rope_tables.items()]
    for name, info in infos.items():
        if not is_canonical(spec.architecture, name):
            continue  # the reader has told of it
        if name == "output.weight" and spec.tied_embeddings:
            notices.append(
                Notice(
                    "tied_head_dropped",
                    "lm_head.weight was left out: config.json says that the embedding is used",
                )
            )
            continue
        planned.append(_planned(checkpoint, spec, fields, info, type_name))
    return planned


def _rope_table(name: str, values: list[float]) -> PlannedTensor:
    table = np.asarray(values, dtype=np.float32)
    return PlannedTensor(name, table.shape, "F32", table.nbytes, lambda: [table])


def _planned(
    checkpoint: Checkpoint, spec: ModelSpec, fields: ModelFields, info: TensorInfo, type_name: str
) -> PlannedTensor:
    name = info.name
    stem = name.split(".")[-2]
    if len(info.shape) not in (1, 2):
        raise BadInputError(f"tensor {info.file_name} has {len(info.shape)} dimensions, not one or two")
    kind = type_name if len(info.shape) == 2 else "F32"
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}.get(stem) if permutes_qk(spec) else None
    gain, row_limit = 1.0, None
    if stem == ("attn_q_norm" if spec.qk_norm else "attn_q"):
        gain = fields.query_gain
    elif stem == "attn_qkv" and not spec.qk_norm:
        gain, row_limit = fields.query_gain, spec.num_heads * spec.head_dim
    rearrange = _Rearrange(
        heads=heads,
        offset=spec.norm_offset if stem.endswith("norm") else 0.0,
        gain=gain,
        gain_rows=row_limit,
    )
    count = int(np.prod(info.shape))
    return PlannedTensor(
        name, info.shape, kind, count * _BYTES[kind], partial(_chunks, checkpoint, info, kind, rearrange)
    )


@dataclass(frozen=True)
class _Rearrange:
    """What changes in a tensor beside its type."""

    heads: int | None
    """Rows of this many heads go into interleaved rotary order."""
    offset: float
    """Added to every value (Gemma stores gain - 1)."""
    gain: float
    gain_rows: int | None
    """``gain`` applies to this many first rows; None is all."""


def _chunks(checkpoint: Checkpoint, info: TensorInfo, kind: str, change: _Rearrange) -> Chunks:
    """The tensor's bytes for the file, a few rows at a time."""
    import torch

    if len(info.shape) == 1:
        values = checkpoint.vector(info.name)
    else:
        weight = checkpoint.weight(info.name)
        if weight.data.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BadInputError(
                f"tensor {info.file_name} is {weight.data.dtype}: only dense weights can be written"
            )
        values = weight.data
    if change.heads is not None:
        values = interleave_rotary(values, change.heads)
    per_row = int(np.prod(info.shape[1:])) or 1
    step = max(1, _CHUNK_WEIGHTS // per_row)
    for start in range(0, info.shape[0], step):
        rows = values[start : start + step]
        _check_finite(rows, info, start)
        if change.offset or change.gain != 1.0:
            rows = rows.float() + change.offset
            limit = len(rows) if change.gain_rows is None else max(0, change.gain_rows - start)
            rows[:limit] *= change.gain
        yield _cast(rows, kind, info)


def interleave_rotary(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from half-split rotary order (i, i + d/2) into GGUF's interleaved order (2i, 2i + 1).

    [heads * head_dim, ...] to the same shape: within a head, row i of the first half goes to 2i, row i of the
    second half to 2i + 1.
    """
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, 2, rows // heads // 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _check_finite(rows: torch.Tensor, info: TensorInfo, start: int) -> None:
    import torch

    finite = torch.isfinite(rows)
    if not bool(finite.all()):
        place = [int(i) for i in torch.nonzero(~finite)[0]]
        value = float(rows[tuple(place)])
        place[0] += start
        raise BadInputError(f"tensor {info.file_name} has the value {value} at {place}: the model is damaged")


def _cast(rows: torch.Tensor, kind: str, info: TensorInfo) -> np.ndarray[Any, Any]:
    import torch

    if kind == "F16":
        largest = float(rows.abs().max()) if rows.numel() else 0.0
        if largest > _F16_MAX:
            raise BadInputError(
                f"tensor {info.file_name} has the value {largest:g}, too large for f16 ({_F16_MAX:g}): "
                f"write bf16 or f32"
            )
        return rows.to(torch.float16).contiguous().numpy()
    if kind == "BF16":
        return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return rows.to(torch.float32).contiguous().numpy()
