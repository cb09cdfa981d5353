"""One decoder layer through the core: each input is collected, the linears that read it are rounded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.network.hold import give_back_memory
from edgellm_quantize.awq import search_scales
from edgellm_quantize.capture import STAGE_STEMS, STAGES, StageStatistics, Stream, collect
from edgellm_quantize.folding import CheckpointTensors, expand, fold, source_rows
from edgellm_quantize.grids import Grid, IntegerGrid, clipped_notice, dequantize, f16_scale, within_reach
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.recipe import OUTPUT_ERROR, WEIGHT_ERROR, LayerOutcome, LayerStatistics, QuantizedLinear
from edgellm_quantize.rounding import (
    RoundingOptions,
    asymmetric_target,
    gptq,
    importance_of,
    output_error,
    round_nearest,
)

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.build import LayerLoader


@dataclass(frozen=True)
class CorePlan:
    """What the core does with every layer."""

    grids: Mapping[str, Grid]
    """Canonical weight name -> what it is rounded to. Linears that are not named stay as they are."""
    method: str = "gptq"
    """rtn, gptq, or awq: factors folded into the layer, then gptq."""
    options: RoundingOptions = field(default_factory=RoundingOptions)
    asymmetric_share: float = 0.25
    """How far weights make up for what earlier layers lost (rounding.asymmetric_target); 0 keeps no second
    stream."""
    awq_ratios: int = 20


@dataclass
class LayerResult:
    """One layer after the core."""

    outcomes: dict[str, LayerOutcome] = field(default_factory=dict)
    """By canonical weight name."""
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that stay dense and that folding changed: f32, in the conventions of the source file."""
    imatrix: dict[str, LayerStatistics] = field(default_factory=dict)
    """What was seen, by canonical weight name, without Hessians."""


class LayerRounding:
    """Works on one layer; see ``quantize_layer``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        loader: LayerLoader,
        plan: CorePlan,
        index: int,
        on_stage: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self.index = index
        self.spec = loader.spec
        self.on_stage = on_stage
        self.result = LayerResult()
        self._original = loader
        self._overlay = OverlayCheckpoint(checkpoint)
        self._tensors = CheckpointTensors(self._overlay)
        # A loader over the overlay shows the layer as it is by now.
        self._loader = type(loader)(self._overlay)
        self._prefix = f"blk.{index}."
        self._seen: StageStatistics | None = None
        _check_finite(checkpoint, self._prefix)

    def run(self, stream: Stream | None, original: Stream | None) -> LayerResult:
        """Round all linears; moves the streams behind the layer."""
        for number, stage in enumerate(STAGES):
            self.on_stage(number)
            names = self._names(stage)
            self._seen = None
            if stream is not None:
                self._seen = self._collect(stage, stream, original, bool(names))
                self._remember(stage, self._seen)
            if names:
                self._round_stage(stage, names, stream)
                give_back_memory()  # holes of many small matrices are a GB at the width of an 8B model
        self._seen = None
        if stream is not None:
            stream.finish(self._loader.layer(self.index))
        if original is not None:
            original.finish(self._original.layer(self.index))
        for name, value in self._overlay.replaced.items():
            if name not in self.result.outcomes:
                self.result.changed[name] = value
        return self.result

    def _collect(
        self, stage: str, stream: Stream, original: Stream | None, feedback: bool
    ) -> StageStatistics:
        """Both forms of the layer are decoded for this alone: beside the matrices of rounding they have no
        room."""
        return collect(
            stage,
            self.index,
            stream,
            self._loader.layer(self.index),
            None if original is None else (original, self._original.layer(self.index)),
            hessian=self.plan.method != "rtn" and feedback,
        )

    def _names(self, stage: str) -> list[str]:
        names = [f"{self._prefix}{stem}.weight" for stem in STAGE_STEMS[stage]]
        return [name for name in names if name in self.plan.grids]

    def _remember(self, stage: str, seen: StageStatistics) -> None:
        for stem in STAGE_STEMS[stage]:
            name = f"{self._prefix}{stem}.weight"
            if self._overlay.has(name):
                self.result.imatrix[name] = LayerStatistics(
                    None, seen.input.imatrix.clone(), seen.input.tokens
                )

    def _round_stage(self, stage: str, names: Sequence[str], stream: Stream | None) -> None:
        import torch

        method = self.plan.method
        if self._seen is not None and method == "awq":
            assert stream is not None
            folded = self._fold(stage, names, self._seen, stream)
            if folded is not None:
                self._seen, method = folded, "awq+gptq"
        begun = time.monotonic()
        hessian = None if self._seen is None else self._seen.input.hessian
        # What huge weights make of the inputs may be no number: then weights are compared.
        judge = hessian if hessian is None or math.isfinite(float(hessian.sum(dtype=torch.float64))) else None
        # Linears with one grid are rounded together: their rows are independent, the factorization is one.
        by_grid: dict[Grid, list[str]] = {}
        for name in names:
            by_grid.setdefault(self.plan.grids[name], []).append(name)
        targets = self._targets(by_grid.values())
        for grid, members in by_grid.items():
            matrices = [self._tensors.matrix(name).float() for name in members]
            weight = _stacked(matrices)
            if hessian is not None and method != "rtn":
                found = gptq(targets.pop(members[0], weight), hessian, grid, self.plan.options)
            else:
                importance = None if self._seen is None else importance_of(self._seen.input.imatrix)
                found = round_nearest(weight, grid, importance, self.plan.options.candidates)
            done = found.method if found.method == "rtn" or method != "awq+gptq" else method
            seconds = time.monotonic() - begun
            start = 0
            for name, matrix in zip(members, matrices, strict=True):
                rows = slice(start, start + len(matrix))
                start += len(matrix)
                values = found.values[rows]
                error = output_error(matrix, values, judge)
                notes = [Notice(note.kind, f"{name}: {note.detail}") for note in found.notices]
                _, clipped = within_reach(matrix, grid)
                if clipped:
                    notes.append(clipped_notice(name, clipped, grid.label))
                self.result.outcomes[name] = LayerOutcome(
                    name,
                    _rows(found.weight, rows),
                    error,
                    seconds * len(matrix) / len(weight),
                    done,
                    tuple(notes),
                    WEIGHT_ERROR if judge is None else OUTPUT_ERROR,
                )
                self._overlay.replaced[name] = values.contiguous()
            begun = time.monotonic()

    def _targets(self, groups: Iterable[Sequence[str]]) -> dict[str, torch.Tensor]:
        """What the linears of each group are rounded from, by the group's first name, where it is not their
        weights; the cross term, as large as the Hessian, is let go then.
        """
        seen, share = self._seen, self.plan.asymmetric_share
        if seen is None or seen.cross is None or seen.input.hessian is None or not share:
            return {}
        damping = self.plan.options.damping
        made = {
            names[0]: asymmetric_target(
                _stacked([self._tensors.matrix(name).float() for name in names]),
                seen.input.hessian,
                seen.cross,
                share,
                damping,
            )
            for names in groups
        }
        self._seen = StageStatistics(seen.input)
        return made

    def _fold(
        self, stage: str, names: Sequence[str], seen: StageStatistics, stream: Stream
    ) -> StageStatistics | None:
        """Search factors for a stage and put them in; None where nothing may change or be better."""
        import torch

        hessian = seen.input.hessian
        grids = {self.plan.grids[name] for name in names}
        stems = [stem for stem in STAGE_STEMS[stage] if self._overlay.has(f"{self._prefix}{stem}.weight")]
        if hessian is None or len(grids) != 1 or len(stems) != len(names):
            return None
        grid = next(iter(grids))
        source = None
        if stage in ("attn_output", "ffn_down"):
            stem, rows = source_rows(self._tensors, self.spec, self.index, stage)
            source = self.result.outcomes.get(f"{self._prefix}{stem}.weight")
            if source is not None and not isinstance(source.weight, QuantizedLinear):
                return None  # the scales of block types are not free
        share = (self.spec.num_heads, self.spec.num_kv_heads) if stage == "attn_output" else (1, 1)
        found = search_scales(
            [self._tensors.matrix(name) for name in names],
            hessian,
            grid,
            ratios=self.plan.awq_ratios,
            share=share,
        )
        if found.error >= found.identity_error:
            return None
        columns = expand(self.spec, stage, found.scales)
        changed = fold(self._tensors, self.spec, self.index, stage, found.scales)
        if not all(math.isfinite(float(value.sum(dtype=torch.float64))) for value in changed.values()):
            return None  # weights near the end of f32
        if source is not None:
            name = source.name
            assert isinstance(source.weight, QuantizedLinear)
            scales = source.weight.scales.clone()
            scales[rows] = f16_scale(scales[rows] / found.scales[:, None])
            weight = replace(source.weight, scales=scales)
            self.result.outcomes[name] = replace(source, weight=weight)
            changed[name] = dequantize(weight)
        self._overlay.replaced |= changed
        if stage == "attn_output":
            stream.divide(columns)
        elif stage == "ffn_down":
            stream.forget_activated()
        outer = columns[:, None] * columns[None, :]
        cross = None if seen.cross is None else seen.cross / outer
        return StageStatistics(
            LayerStatistics(hessian / outer, seen.input.imatrix / columns.square(), seen.input.tokens), cross
        )


def quantize_layer(
    checkpoint: Checkpoint,
    loader: LayerLoader,
    plan: CorePlan,
    index: int,
    stream: Stream | None = None,
    original: Stream | None = None,
    on_stage: Callable[[int], None] = lambda stage: None,
) -> LayerResult:
    """Round the linears of layer ``index``, in the order in which they are computed.

    Args:
        stream: the quantized model's residual stream before the layer; it is behind it afterwards. None
            rounds without calibration.
        original: the same of the model as it was, for the asymmetric term.
        on_stage: called before each of the stages; may raise to stop.

    BadInputError names a tensor of the source that is not finite.
    """
    return LayerRounding(checkpoint, loader, plan, index, on_stage).run(stream, original)


def check_plan(checkpoint: Checkpoint, plan: CorePlan) -> None:
    """Every grid fits its tensor: BadInputError names the first that does not."""
    for name, grid in plan.grids.items():
        info = checkpoint.tensors().get(name)
        if info is None or len(info.shape) != 2:
            raise BadInputError(f"{checkpoint.path}: there is no matrix {name!r} to quantize")
        try:
            grid.span(info.shape[1])
        except BadInputError as error:
            raise BadInputError(f"{info.file_name}: {error}") from None


def uniform_grids(checkpoint: Checkpoint, grid: IntegerGrid) -> dict[str, Grid]:
    """The same grid for every linear of every layer."""
    return {name: grid for name in checkpoint.tensors() if is_block_linear(name)}


def _check_finite(checkpoint: Checkpoint, prefix: str) -> None:
    import torch

    for name, info in checkpoint.tensors().items():
        if not name.startswith(prefix):
            continue
        is_matrix = len(info.shape) == 2
        values = dequantize(checkpoint.weight(name)) if is_matrix else checkpoint.vector(name)
        # A sum shows a NaN or an infinity without a mask as large as the tensor.
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            place = [int(i) for i in torch.nonzero(~torch.isfinite(values))[0]]
            raise BadInputError(
                f"{checkpoint.path}: tensor {info.file_name} has the value {float(values[tuple(place)])} at "
                f"{place}: the model is damaged"
            )


def _stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def _rows(weight: Any, rows: slice) -> QuantizedLinear | BlockQuantWeight:
    if isinstance(weight, QuantizedLinear):
        zeros = None if weight.zeros is None else weight.zeros[rows].contiguous()
        return replace(
            weight,
            codes=weight.codes[rows].contiguous(),
            scales=weight.scales[rows].contiguous(),
            zeros=zeros,
        )
    stored: BlockQuantWeight = replace(weight, data=weight.data[rows].contiguous())
    return stored
