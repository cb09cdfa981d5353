"""A model as a GGUF file would hold it, whatever it comes from: metadata, and tensors as streams of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_models.errors import BadInputError, Notice
from edgellm_quantize.gguf_file import Chunks
from edgellm_quantize.gguf_metadata import ModelFields, gguf_architecture, model_fields, permutes_qk
from edgellm_quantize.gguf_special_ids import chat_template_fields, sampling_fields
from edgellm_quantize.gguf_tokenizer import name_for_readers, tokenizer_fields
from edgellm_quantize.gguf_typed_metadata import read_typed_metadata
from edgellm_quantize.gguf_values import MetadataTable
from edgellm_quantize.hf_tokenizer_files import read_tokenizer_files
from edgellm_quantize.kquant_mix import ModelShape
from edgellm_quantize.provenance import readable_name
from edgellm_quantize.source_check import UsedTensors, requantized_notice, used_tensors

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import IntWeight
    from edgellm_models.checkpoint.reader import Checkpoint, TensorInfo
    from edgellm_models.network.spec import ModelSpec

Array = np.ndarray[Any, Any]

CHUNK_WEIGHTS = 4 << 20
"""Weights that are held decoded at once: 16 MiB as f32."""
_OWN_KEYS = ("general.file_type", "general.quantization_version", "general.alignment")
_OWN_PREFIXES = ("split.", "quantize.imatrix.", "edgellm.")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor in the arrangement of GGUF."""

    name: str
    """GGUF's name."""
    file_name: str
    """The name in the source, for messages."""
    shape: tuple[int, ...]
    source_type: str
    """F32, F16, BF16, Q4_K, INT4 ..., as the source holds it."""
    rows: Callable[[], Iterator[Array]]
    """Yields f32 [r, K] (a vector: [N]), CHUNK_WEIGHTS or fewer at a time, together all rows. Values are
    finite: BadInputError names the tensor otherwise."""
    raw: Callable[[], Chunks] | None = None
    """The bytes as they lie in a GGUF source."""
    heads: int | None = None
    """Rows of this many heads were put from half-split into interleaved rotary order: see ``arrange``."""
    rescaled: bool = False
    """Values differ from the source's by more than their arrangement: a folded query scale, a norm offset."""

    def arrange(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the source's order (weights, or bytes that encode them) in GGUF's order."""
        return rows if self.heads is None else interleave_rotary(rows, self.heads)


@dataclass
class GGUFSource:
    """What a GGUF file of this model holds beside the types of its tensors. Close it when all is written."""

    path: Path
    metadata: MetadataTable
    tensors: list[SourceTensor]
    shape: ModelShape
    is_gguf: bool
    checkpoint: Checkpoint
    notices: list[Notice] = field(default_factory=list)

    @property
    def num_weights(self) -> int:
        """Weights of all tensors."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.tensors)

    def close(self) -> None:
        self.checkpoint.close()


def open_gguf_source(source: Path, dtype: str = "f32") -> GGUFSource:
    """Open a Hugging Face folder or a GGUF file. ``dtype`` names the file type where nothing else does.

    BadInputError for what cannot be read or expressed.
    """
    from edgellm_models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(source))
    try:
        if checkpoint.file_format == "gguf":
            return _from_gguf(checkpoint)
        return _from_folder(checkpoint, dtype)
    except BaseException:
        checkpoint.close()
        raise


def _from_gguf(checkpoint: Checkpoint) -> GGUFSource:
    from edgellm_models.network import read_spec

    table, notices = read_typed_metadata(checkpoint.path)
    kept = {
        key: value
        for key, value in table.items()
        if key not in _OWN_KEYS and not key.startswith(_OWN_PREFIXES)
    }
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    used = used_tensors(checkpoint, spec)
    notices += used.notices
    tensors = []
    for name, info in checkpoint.tensors().items():
        planned = _gguf_tensor(checkpoint, info)
        if planned is None:
            notices.append(
                Notice("tensor_left_out", f"tensor {name} ({info.type_name} {list(info.shape)}) was left out")
            )
        elif name in used.names:
            # Notices have told of the others: llama.cpp loads no file with more than it asks for.
            tensors.append(planned)
    shape = _model_shape(spec)
    return GGUFSource(
        checkpoint.path, kept, tensors, shape, True, checkpoint, [*checkpoint.notices, *notices]
    )


def _gguf_tensor(checkpoint: Checkpoint, info: TensorInfo) -> SourceTensor | None:
    """None for what no model reads: integer tables, tensors of three dimensions, scales beside a weight."""
    from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME, TypeRole

    role = GGML_TYPES_BY_NAME[info.type_name].role
    if len(info.shape) > 2 or role in (TypeRole.INTEGER, TypeRole.UNSUPPORTED):
        return None
    if info.name.endswith(".scale"):
        return None
    return SourceTensor(
        info.name,
        info.file_name,
        info.shape,
        info.type_name,
        partial(_rows, checkpoint, info, _Rearrange()),
        partial(_raw, checkpoint, info) if role in (TypeRole.DENSE, TypeRole.BLOCK) else None,
    )


def _raw(checkpoint: Checkpoint, info: TensorInfo) -> Chunks:
    import torch

    if len(info.shape) == 1:
        values = checkpoint.vector(info.name)  # f32, whatever it was
        yield values.contiguous().numpy()
        return
    data = checkpoint.weight(info.name).data
    step = max(1, CHUNK_WEIGHTS // info.shape[-1])
    for start in range(0, len(data), step):
        yield data[start : start + step].contiguous().view(torch.uint8).numpy()
        checkpoint.release_pages()  # a table of a gigabyte would be in memory whole before it is written


def _model_shape(spec: ModelSpec) -> ModelShape:
    return ModelShape(gguf_architecture(spec), spec.num_layers, spec.num_heads, spec.num_kv_heads)


def _from_folder(checkpoint: Checkpoint, dtype: str) -> GGUFSource:
    from edgellm_models.network import read_spec

    source = checkpoint.path
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    used = used_tensors(checkpoint, spec)
    files = read_tokenizer_files(source)
    fields = model_fields(spec, name=name_for_readers(readable_name(source.resolve()), files), dtype=dtype)
    words = tokenizer_fields(files, checkpoint.metadata, spec.vocab_size)
    notices = [*checkpoint.notices, *used.notices, *fields.notices, *words.notices]
    notices += requantized_notice(info for name, info in checkpoint.tensors().items() if name in used.names)
    metadata = fields.metadata | words.metadata
    metadata |= chat_template_fields(files, notices) | sampling_fields(files.generation)
    tensors = _plan(checkpoint, spec, fields, used)
    return GGUFSource(source, metadata, tensors, _model_shape(spec), False, checkpoint, notices)


def _plan(
    checkpoint: Checkpoint, spec: ModelSpec, fields: ModelFields, used: UsedTensors
) -> list[SourceTensor]:
    """Every tensor of the file, in the order in which a model runs."""
    planned = [_rope_table(name, values) for name, values in fields.rope_tables.items()]
    for name, info in checkpoint.tensors().items():
        if name in used.names:
            planned.append(_planned(checkpoint, spec, fields, info))
    return planned


def _rope_table(name: str, values: list[float]) -> SourceTensor:
    table = np.asarray(values, dtype=np.float32)
    return SourceTensor(name, name, table.shape, "F32", lambda: iter([table]))


def _planned(checkpoint: Checkpoint, spec: ModelSpec, fields: ModelFields, info: TensorInfo) -> SourceTensor:
    stem = info.name.split(".")[-2]
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}.get(stem) if permutes_qk(spec) else None
    gain, row_limit = 1.0, None
    if stem == ("attn_q_norm" if spec.qk_norm else "attn_q"):
        gain = fields.query_gain
    elif stem == "attn_qkv" and not spec.qk_norm:
        gain, row_limit = fields.query_gain, spec.num_heads * spec.head_dim
    change = _Rearrange(
        heads=heads,
        offset=spec.norm_offset if stem.endswith("norm") else 0.0,
        gain=gain,
        gain_rows=row_limit,
    )
    return SourceTensor(
        info.name,
        info.file_name,
        info.shape,
        info.type_name,
        partial(_rows, checkpoint, info, change),
        heads=heads,
        rescaled=bool(change.offset) or gain != 1.0,
    )


@dataclass(frozen=True)
class _Rearrange:
    """What changes in a tensor beside its type."""

    heads: int | None = None
    """Rows of this many heads go into interleaved rotary order."""
    offset: float = 0.0
    """Added to every value (Gemma stores gain - 1)."""
    gain: float = 1.0
    gain_rows: int | None = None
    """``gain`` applies to this many first rows; None is all."""


def _rows(checkpoint: Checkpoint, info: TensorInfo, change: _Rearrange) -> Iterator[Array]:
    """The tensor's values as f32, a few rows at a time."""
    values = _values(checkpoint, info)
    per_row = int(np.prod(info.shape[1:])) or 1
    step = max(1, CHUNK_WEIGHTS // per_row)
    order = None
    if change.heads is not None:
        import torch

        order = interleave_rotary(torch.arange(info.shape[0]), change.heads)
    for start in range(0, info.shape[0], step):
        picked = slice(start, start + step) if order is None else order[start : start + step]
        rows = values(picked)
        _check_finite(rows, info, start)
        if change.offset or change.gain != 1.0:
            rows = rows + change.offset
            limit = len(rows) if change.gain_rows is None else max(0, change.gain_rows - start)
            rows[:limit] *= change.gain
        yield rows.contiguous().numpy()
        checkpoint.release_pages()  # what was read would count as memory until the whole file is written


def _values(checkpoint: Checkpoint, info: TensorInfo) -> Callable[[Any], torch.Tensor]:
    """Rows of a tensor as f32, by slice or index."""
    import torch

    from edgellm_kernels.ggml_blocks import dequantize
    from edgellm_kernels.weights import BlockQuantWeight, DenseWeight, IntWeight

    if len(info.shape) == 1:
        vector = checkpoint.vector(info.name)
        return lambda picked: vector[picked].to(torch.float32)
    weight = checkpoint.weight(info.name)
    if isinstance(weight, BlockQuantWeight):
        data, layout, columns = weight.data, weight.layout, info.shape[1]
        return lambda picked: dequantize(data[picked].contiguous(), layout, columns)
    if isinstance(weight, IntWeight):
        grouped = weight
        return lambda picked: _group_rows(grouped, picked)
    if not isinstance(weight, DenseWeight) or weight.data.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        kind = getattr(getattr(weight, "data", None), "dtype", info.type_name)
        raise BadInputError(f"tensor {info.file_name} is {kind}: only dense weights can be written")
    dense = weight.data
    return lambda picked: dense[picked].to(torch.float32)


def _group_rows(weight: IntWeight, picked: Any) -> torch.Tensor:
    """Some rows of a weight on an integer grid, with the bits that its readers compute."""
    from edgellm_kernels.int_groups import dequantize_group_rows

    zeros = None if weight.zeros is None else weight.zeros[picked]
    rows = replace(weight, data=weight.data[picked], scales=weight.scales[picked], zeros=zeros)
    return dequantize_group_rows(rows, 0, len(rows.data))


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
