"""What calibration shows of a layer's linears: runs sequences through it and sums x x^T of every input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm_quantize.recipe import LayerStatistics

if TYPE_CHECKING:
    import torch

    from edgellm_models.network.build import LayerLoader
    from edgellm_models.network.layers import LayerWeights
    from edgellm_models.network.plain_block import PlainBatch, PlainBlocks
    from edgellm_models.network.spec import ModelSpec

STAGES = ("qkv", "attn_output", "gate_up", "ffn_down")
"""The distinct linear inputs of a layer, in the order in which they are computed."""
STAGE_STEMS = {
    "qkv": ("attn_qkv", "attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}
"""The linears that share each input, by canonical stem."""
_MOST_KEPT_BYTES = 320 << 20
_STRIPS = 6
"""Strips of a Hessian's rows, which are summed from the diagonal on only ..."""
HESSIAN_SHARE = (_STRIPS + 1) / (2 * _STRIPS)
"""... and so much of the whole square's work is left."""
_LEAST_STRIP = 192


@dataclass(frozen=True)
class StageStatistics:
    """What was seen at one input."""

    input: LayerStatistics
    cross: torch.Tensor | None = None
    """[K, K] f32: the sum of (x - xq) xq^T over tokens, where x is the original model's input and xq the
    quantized one's; None where the original is not kept."""


@dataclass
class _Part:
    """The states of some sequences at one point of a layer. Rows are padded, see PlainBatch."""

    batch: PlainBatch
    rows: torch.Tensor
    """The rows that are no padding."""
    hidden: torch.Tensor
    between: torch.Tensor | None = None
    """What the current stage left for the next one: what the output projection, or the last linear, reads."""


def keeps_activated(rows: int, ffn_size: int) -> bool:
    """Whether a stream holds the last linear's input of so many rows while that linear is rounded.

    It is more than the stream itself, but without it gate and up, a third of the layer, are computed twice.
    """
    return rows * ffn_size * 4 <= _MOST_KEPT_BYTES


def stage_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[N, K] of the linears that share each input of a layer, stacked; stages in the order of STAGES."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, ffn = spec.hidden_size, spec.ffn_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * ffn, hidden), (hidden, ffn))
    return dict(zip(STAGES, shapes, strict=True))


class Stream:
    """The residual stream of all calibration sequences, moved through the layers stage by stage.

    Holds [rows, hidden] f32 between layers, and within one the input of the output projection besides, later
    that of the last linear if ``keeps_activated``.
    """

    def __init__(self, blocks: PlainBlocks, parts: Sequence[tuple[PlainBatch, torch.Tensor]]) -> None:
        self.blocks = blocks
        self._parts = [_Part(batch, batch.real_rows(), hidden) for batch, hidden in parts]

    @property
    def num_tokens(self) -> int:
        return sum(sum(part.batch.lengths) for part in self._parts)

    def inputs(self, stage: str, layer: LayerWeights, index: int) -> Iterator[torch.Tensor]:
        """The inputs [tokens, K] of a stage, part by part; stages must be asked for in order.

        ``layer`` holds the weights of the stages before as they are to be used.
        """
        for part in self._parts:
            yield self._input(part, stage, layer, index)[part.rows]

    def _input(self, part: _Part, stage: str, layer: LayerWeights, index: int) -> torch.Tensor:
        if stage == "qkv":
            return self.blocks.attention_input(part.hidden, layer)
        if stage == "attn_output":
            x = self.blocks.attention_input(part.hidden, layer)
            part.between = self.blocks.attend(x, layer, index, part.batch)
            return part.between
        if stage == "gate_up":
            assert part.between is not None
            part.hidden = self.blocks.after_attention(part.between, part.hidden, layer)
            part.between = None
            return self.blocks.ffn_input(part.hidden, layer)
        assert stage == "ffn_down", stage
        activated = self.blocks.activate(self.blocks.ffn_input(part.hidden, layer), layer)
        if self._keeps(activated.shape[1]):
            part.between = activated
        return activated

    def _keeps(self, ffn_size: int) -> bool:
        return keeps_activated(sum(len(part.hidden) for part in self._parts), ffn_size)

    def divide(self, scales: torch.Tensor) -> None:
        """The layer was changed so that the input of the output projection is smaller by these factors."""
        for part in self._parts:
            assert part.between is not None
            part.between /= scales

    def forget_activated(self) -> None:
        """Gate or up was changed after the stage ``ffn_down`` was asked for."""
        for part in self._parts:
            part.between = None

    def finish(self, layer: LayerWeights) -> None:
        """The last step of a layer, behind the stage ``ffn_down``: the stream is at the next layer then."""
        for part in self._parts:
            activated, part.between = part.between, None
            if activated is None:
                activated = self.blocks.activate(self.blocks.ffn_input(part.hidden, layer), layer)
            part.hidden = self.blocks.after_ffn(activated, part.hidden, layer)

    def forward(self, layer: LayerWeights, index: int) -> None:
        """The whole layer at once."""
        for part in self._parts:
            part.hidden = self.blocks.forward(part.hidden, layer, index, part.batch)

    def state(self) -> list[torch.Tensor]:
        """The stream between layers, to be stored; ``restore`` takes it, ValueError for another shape."""
        return [part.hidden for part in self._parts]

    def real_state(self) -> list[torch.Tensor]:
        """The stream between layers without the rows that pad: [tokens, hidden] of each part."""
        return [part.hidden[part.rows] for part in self._parts]

    def restore(self, state: Sequence[torch.Tensor]) -> None:
        for part, hidden in zip(self._parts, state, strict=True):
            if part.hidden.shape != hidden.shape:
                raise ValueError(f"a part has the shape {list(hidden.shape)}, not {list(part.hidden.shape)}")
            part.hidden = hidden

    def copy(self) -> Stream:
        """A second stream at the same place; the states are shared until one of them moves on."""
        return Stream(self.blocks, [(part.batch, part.hidden) for part in self._parts])


def open_stream(loader: LayerLoader, sequences: Sequence[Sequence[int]], rows_per_part: int) -> Stream:
    """The embedded sequences, cut into parts of about ``rows_per_part`` rows (one sequence at least)."""
    import torch

    from edgellm_models.network.plain_block import PlainBatch, PlainBlocks

    embedding = loader.embedding()
    parts = []
    for taken in part_slices([len(sequence) for sequence in sequences], rows_per_part):
        chosen = sequences[taken]
        longest = max(len(sequence) for sequence in chosen)
        batch = PlainBatch(tuple(len(sequence) for sequence in chosen), longest)
        ids = torch.zeros((len(chosen), longest), dtype=torch.int64)
        for row, sequence in zip(ids, chosen, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        hidden = loader.kernels.embed(ids.flatten(), embedding, loader.spec.embedding_scale)
        parts.append((batch, hidden))
    loader.release_pages()
    return Stream(PlainBlocks(loader.spec, loader.kernels), parts)


def part_slices(lengths: Sequence[int], rows_per_part: int) -> list[slice]:
    """Which sequences run together: as many as ``rows_per_part`` holds of the longest, one at least."""
    step = max(1, rows_per_part // max(lengths))
    return [slice(start, start + step) for start in range(0, len(lengths), step)]


def collect(
    stage: str,
    index: int,
    stream: Stream,
    layer: LayerWeights,
    original: tuple[Stream, LayerWeights] | None = None,
    *,
    hessian: bool = True,
) -> StageStatistics:
    """Sums over all tokens of the inputs of ``stage`` in layer ``index``; moves the streams to that stage.

    Args:
        stream, layer: the quantized model so far.
        original: the model as it was, for the cross term.
        hessian: without it only the mean squares are kept.
    """
    import torch

    total: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    tokens = 0
    reference = iter(original[0].inputs(stage, original[1], index)) if original else None
    for x in stream.inputs(stage, layer, index):
        tokens += len(x)
        squared = x.double().square().sum(0)
        squares = squared if squares is None else squares + squared
        wanted = next(reference) if reference is not None else None
        if not hessian:
            continue
        if total is None:
            total = torch.zeros((x.shape[1], x.shape[1]))
            cross = torch.zeros_like(total) if reference is not None else None
        _add_square(total, x)
        if wanted is not None and cross is not None:
            cross.addmm_((wanted - x).t(), x)
    assert squares is not None
    if total is not None:
        _mirror(total)
    mean = (squares / max(1, tokens)).float()
    return StageStatistics(LayerStatistics(total, mean, tokens), cross)


def _strips(size: int) -> Iterator[slice]:
    step = max(_LEAST_STRIP, -(-size // _STRIPS))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _add_square(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x [K, K] of ``x`` [rows, K], strip by strip from the diagonal on; see ``_mirror``."""
    for strip in _strips(len(total)):
        total[strip, strip.start :].addmm_(x[:, strip].t(), x[:, strip.start :])


def _mirror(total: torch.Tensor) -> None:
    """Fill what ``_add_square`` left out: the sum is symmetric."""
    for strip in _strips(len(total)):
        total[strip.stop :, strip] = total[strip, strip.stop :].t()
