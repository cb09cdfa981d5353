"""What each type costs each tensor: its error, times the loss that the model shows for such errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_quantize.block_grids import F16_MAX
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.recipe import TENSOR_TYPES
from edgellm_quantize.type_budget import TypeOption

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight, LinearPart
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.build import LayerLoader
    from edgellm_quantize.capture import Stream
    from edgellm_quantize.imatrix_file import ImportanceMatrix

Array = np.ndarray[Any, Any]

_SAMPLE_WEIGHTS = 1 << 19
"""Weights of a tensor that are encoded to learn the error of a type."""
REFERENCE = "Q4_0"
"""The type whose loss is measured; small errors cost in proportion, so other types follow from theirs."""
TOKENS = 512
_LENGTH = 128
SCORED_EVERY = 2
"""Of the tokens that run, how many have their logits compared: a large vocabulary costs more than layers."""
LAYERS = 8
"""Layers whose tensors are measured; those between are interpolated."""
HEAD_ROWS = 64
STRIP_WEIGHTS = 64 << 20
"""Weights of a matrix that are rounded at once: every linear of an 8B model, but not its embedding."""
_F16_ERROR = 2.0**-24
_LARGE = 1e15
"""From here on sums of squares are formed in f64: they may exceed f32."""
_WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_NARROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@dataclass(frozen=True)
class Sensitivity:
    """What rounding a tensor costs."""

    loss: Mapping[str, float]
    """Tensor name -> loss per unit of relative squared error. Nats of KL divergence where ``measured``."""
    measured: bool


def candidate_types(columns: int) -> tuple[str, ...]:
    """The types that rows of ``columns`` weights can have, smallest first."""
    if columns % GGML_TYPES_BY_NAME["Q4_K"].block_elements == 0:
        return (*_WIDE, "F16")
    return (*_NARROW, "F16") if columns % GGML_TYPES_BY_NAME["Q8_0"].block_elements == 0 else ("F16",)


def type_options(
    checkpoint: Checkpoint,
    names: Sequence[str],
    sensitivity: Sensitivity,
    importance: ImportanceMatrix | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> dict[str, list[TypeOption]]:
    """Every candidate type of each matrix with its bytes and its loss.

    Errors are those of the fast search on a sample of rows, weighted by column with ``importance``; a
    measured sensitivity goes with unweighted errors, as it was measured: one huge input would hide the other
    columns. A type that the source holds already costs nothing.
    """
    options: dict[str, list[TypeOption]] = {}
    for place, name in enumerate(names):
        on_progress(place / len(names))
        info = checkpoint.tensors()[name]
        weights = (
            None
            if importance is None or sensitivity.measured
            else importance.column_weights(name, info.shape[-1])
        )
        rows = _sample(checkpoint, name)
        found = []
        kinds = candidate_types(info.shape[-1])
        if len(kinds) > 1 and float(np.abs(rows).max(initial=0.0)) > F16_MAX:
            kinds = tuple(kind for kind in kinds if kind != "F16")  # it is refused when it is written
        for kind in kinds:
            error = _F16_ERROR if kind == "F16" else relative_error(rows, kind, weights)
            found.append(TypeOption(kind, tensor_nbytes(info.shape, kind), error * sensitivity.loss[name]))
        if info.type_name in TENSOR_TYPES and info.type_name != "F32":
            found = [option for option in found if option.type_name != info.type_name]
            found.append(TypeOption(info.type_name, tensor_nbytes(info.shape, info.type_name), 0.0))
        options[name] = found
    return options


def structural_sensitivity(names: Sequence[str], num_layers: int) -> Sensitivity:
    """Without running the model: layers share the stream evenly; embedding and head count whole."""
    return Sensitivity({name: 1.0 / num_layers if is_block_linear(name) else 1.0 for name in names}, False)


def measured_sensitivity(
    checkpoint: Checkpoint,
    names: Sequence[str],
    sequences: Sequence[Sequence[int]],
    on_progress: Callable[[float], None] = lambda done: None,
) -> Sensitivity:
    """KL divergence of the model's answers when one matrix alone is rounded, for each of ``names``.

    All variants of the residual stream move through the layers together, so each layer is loaded once for
    them and few layers are in memory.
    """
    from edgellm_models.network.build import LayerLoader
    from edgellm_models.network.hold import give_back_memory
    from edgellm_quantize.capture import open_stream
    from edgellm_quantize.overlay import OverlayCheckpoint

    loader = LayerLoader(checkpoint)
    count = loader.spec.num_layers
    chosen = sampled_layers(count)
    shown = _short(sequences)
    base = open_stream(loader, shown, TOKENS)
    rounded, errors = OverlayCheckpoint(checkpoint), {}
    variants: dict[str, Stream] = {}

    def replaced(name: str) -> LayerLoader:
        weight, errors[name] = _reference(checkpoint, name)
        rounded.encoded = {name: weight}
        return LayerLoader(rounded)

    fitting = [name for name in names if fits_reference(checkpoint.tensors()[name].shape[-1])]
    heads = [name for name in fitting if not is_block_linear(name)]
    if "token_embd.weight" in heads:
        variants["token_embd.weight"] = open_stream(replaced("token_embd.weight"), shown, TOKENS)
    for index in range(count):
        on_progress(index / (count + 1))
        layer = loader.layer(index)
        before = base.copy()
        base.forward(layer, index)
        for stream in variants.values():
            stream.forward(layer, index)
        if index in chosen:
            for name in fitting:
                if name.startswith(f"blk.{index}."):
                    variants[name] = before.copy()
                    variants[name].forward(replaced(name).layer(index), index)
        del layer  # the next would be made beside it
        give_back_memory()
    on_progress(count / (count + 1))
    if "output.weight" in heads:
        replaced("output.weight")  # for its error; the stream before it is the model's own
        variants["output.weight"] = base.copy()
    rounded.encoded = {}
    states = {name: _scored(stream) for name, stream in variants.items()}
    variants.clear()
    losses = _divergences(loader, checkpoint, _scored(base), states, rounded_head=_head_name(loader))
    per_error = {name: max(loss, 1e-12) / max(errors[name], 1e-12) for name, loss in losses.items()}
    return Sensitivity(filled(per_error, names, count), True)


def _divergences(
    loader: LayerLoader,
    checkpoint: Checkpoint,
    base: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    rounded_head: str,
) -> dict[str, float]:
    """Mean KL(base || state) of every variant; the one that is named ``rounded_head`` has a rounded head."""
    from edgellm_kernels.weights import DenseWeight
    from edgellm_models.network.hold import give_back_memory
    from edgellm_quantize.grids import dequantize

    kernels, norm = loader.kernels, loader.output_norm()

    def logs(hidden: torch.Tensor, head: DenseWeight) -> torch.Tensor:
        prepared, _ = kernels.add_rms_norm(None, hidden, norm, loader.spec.rms_eps)
        return kernels.lm_head(prepared, head, loader.spec.final_softcap).float().log_softmax(-1)

    losses = dict.fromkeys(states, 0.0)
    parts = [slice(start, start + HEAD_ROWS) for start in range(0, len(base), HEAD_ROWS)]
    head = DenseWeight(dense(checkpoint, rounded_head))
    kept: list[torch.Tensor] = []  # what the rounded head is compared with: there is no room for both heads
    for rows in parts:
        wanted = logs(base[rows], head)
        shares = wanted.exp()
        for name, state in states.items():
            if name != rounded_head:
                losses[name] += float((shares * (wanted - logs(state[rows], head))).sum())
        if rounded_head in states:
            kept.append(wanted)
    del head
    if rounded_head in states:
        give_back_memory()
        head = DenseWeight(dequantize(_reference(checkpoint, rounded_head)[0]))
        for rows, wanted in zip(parts, kept, strict=True):
            rounded = logs(states[rounded_head][rows], head)
            losses[rounded_head] += float((wanted.exp() * (wanted - rounded)).sum())
    return {name: loss / len(base) for name, loss in losses.items()}


def sampled_layers(count: int) -> list[int]:
    """The first, the last and evenly spaced ones between, about eight."""
    if count <= LAYERS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (LAYERS - 1)) for i in range(LAYERS)})


def relative_error(rows: Array, kind: str, importance: Array | None) -> float:
    """Weighted squared error of ``rows`` f32 [n, k] in a block type, over their weighted squares."""
    weights = 1.0 if importance is None else importance / max(float(importance.mean()), 1e-30)
    rounded = _rounded(rows, kind, importance)
    if float(np.abs(rows).max(initial=0.0)) > _LARGE:
        rows = rows.astype(np.float64)
    below = float((weights * np.square(rows)).sum())
    return float((weights * np.square(rounded - rows)).sum()) / max(below, 1e-30)


def _rounded(rows: Array, kind: str, importance: Array | None = None) -> Array:
    import torch

    from edgellm_kernels.ggml_blocks import dequantize
    from edgellm_kernels.weights import BlockLayout
    from edgellm_quantize.kquant_codec import encode_rows

    data = encode_rows(rows, kind, importance, "fast").data
    decoded: Array = dequantize(torch.from_numpy(data), BlockLayout(kind), rows.shape[1]).numpy()
    return decoded


def _reference(checkpoint: Checkpoint, name: str) -> tuple[BlockQuantWeight, float]:
    """A matrix in the reference type, as the fast search makes it, and its relative squared error."""
    import torch

    from edgellm_kernels.weights import BlockLayout, BlockQuantWeight
    from edgellm_quantize.grids import dequantize
    from edgellm_quantize.kquant_codec import encode_rows

    stored = checkpoint.weight(name)
    count, columns = checkpoint.tensors()[name].shape
    step = max(1, STRIP_WEIGHTS // columns)
    encoded, layout = [], BlockLayout(REFERENCE)
    above: Any = np.float32(0)
    below: Any = torch.zeros(())
    for start in range(0, count, step):
        weight = _picked(stored, slice(start, start + step))
        encoded.append(torch.from_numpy(encode_rows(weight.numpy(), REFERENCE, None, "fast").data))
        difference = dequantize(BlockQuantWeight(encoded[-1], layout, columns)).sub_(weight).numpy()
        with np.errstate(over="ignore"):
            above += np.square(difference, out=difference).sum()
        del difference
        below += weight.square().sum()
        checkpoint.release_pages()
    data = encoded[0] if len(encoded) == 1 else torch.cat(encoded)
    # Squares beyond f32: nearly all of them are in weights that no scale reaches.
    error = float(above / max(1e-30, below)) if np.isfinite(float(below)) else 1.0
    return BlockQuantWeight(data, layout, columns), error


def dense(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """f32 of a matrix, whatever it is stored in."""
    made = _picked(checkpoint.weight(name), slice(None))
    checkpoint.release_pages()
    return made


def _picked(weight: LinearPart, rows: slice) -> torch.Tensor:
    """f32 of some rows; the others are not decoded where that can be."""
    from edgellm_kernels.weights import BlockQuantWeight, DenseWeight
    from edgellm_quantize.grids import dequantize

    if isinstance(weight, DenseWeight | BlockQuantWeight):
        return dequantize(replace(weight, data=weight.data[rows].contiguous())).float()
    return dequantize(weight)[rows].float().contiguous()


def _sample(checkpoint: Checkpoint, name: str) -> Array:
    """Rows spread over the whole matrix."""
    step = max(1, math.prod(checkpoint.tensors()[name].shape) // _SAMPLE_WEIGHTS)
    rows: Array = _picked(checkpoint.weight(name), slice(None, None, step)).numpy()
    checkpoint.release_pages()
    return rows


def fits_reference(columns: int) -> bool:
    """Whether rows of so many weights can have the reference type."""
    return columns % GGML_TYPES_BY_NAME[REFERENCE].block_elements == 0


def _head_name(loader: LayerLoader) -> str:
    return "token_embd.weight" if loader.spec.tied_embeddings else "output.weight"


def _short(sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The beginnings of some sequences, spread over all of them."""
    step = max(1, len(sequences) * _LENGTH // TOKENS)
    return [sequence[:_LENGTH] for sequence in sequences[::step]][: TOKENS // _LENGTH]


def _scored(stream: Stream) -> torch.Tensor:
    import torch

    return torch.cat(stream.real_state())[::SCORED_EVERY]


def filled(measured: Mapping[str, float], names: Sequence[str], num_layers: int) -> dict[str, float]:
    """Layers between measured ones by interpolation of the logarithm; what fits no block counts little."""
    by_stem: dict[str, list[tuple[int, float]]] = {}
    for name, value in measured.items():
        if is_block_linear(name):
            _, index, stem, _ = name.split(".")
            by_stem.setdefault(stem, []).append((int(index), math.log(value)))
    filled = {}
    for name in names:
        if name in measured:
            filled[name] = measured[name]
        elif is_block_linear(name) and (points := by_stem.get(name.split(".")[2])):
            places, logs = zip(*sorted(points), strict=True)
            filled[name] = float(np.exp(np.interp(int(name.split(".")[1]), places, logs)))
        else:
            filled[name] = 1.0 / num_layers
    return filled
