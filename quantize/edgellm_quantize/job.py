"""A quantization job over all layers: memory, progress, a work folder to resume from, its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import EdgeLLMError, Notice, ResourceError
from edgellm_models.network.hold import give_back_memory
from edgellm_quantize.calibration import CalibrationTokens
from edgellm_quantize.capture import (
    STAGES,
    Stream,
    keeps_activated,
    open_stream,
    part_slices,
    stage_shapes,
)
from edgellm_quantize.estimates import activation_bytes
from edgellm_quantize.layer_rounding import CorePlan, LayerResult, check_plan, quantize_layer
from edgellm_quantize.provenance import digest, source_identity
from edgellm_quantize.recipe import LayerOutcome, LayerStatistics, QuantizedLinear, QuantizeProgress
from edgellm_quantize.sizes import memory_size
from edgellm_quantize.work_folder import WorkFolder, whole

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.build import LayerLoader
    from edgellm_models.network.spec import ModelSpec

_PROGRAM_BYTES = 600 << 20
"""Python, torch and what they keep for themselves."""
_ROWS_PER_PART = 4096
_LEAST_ROWS = 256


class QuantizeCancelledError(EdgeLLMError):
    """The job was told to stop; what is finished is kept in the work folder."""

    exit_code = 130


@dataclass(frozen=True)
class CoreResult:
    """The finished layers of a job, read from its work folder one at a time."""

    folder: WorkFolder
    num_layers: int
    notices: tuple[Notice, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By canonical weight name, of the linears that this run rounded: files hold no times."""

    def layer(self, index: int) -> LayerResult:
        """What came out for one layer."""
        with whole(self.folder.layer_path(index)):
            return _unpacked(*self.folder.layer(index), self.seconds)

    def layers(self) -> Iterator[LayerResult]:
        for index in range(self.num_layers):
            yield self.layer(index)


def run_core(
    checkpoint: Checkpoint,
    plan: CorePlan,
    work_dir: Path,
    calibration: CalibrationTokens | None = None,
    *,
    resume: bool = False,
    max_memory: int | None = None,
    on_progress: Callable[[QuantizeProgress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CoreResult:
    """Round every linear that ``plan`` names, one decoder layer at a time.

    Finished layers lie in ``work_dir`` at once; a job that was stopped or killed goes on from there with
    ``resume`` and comes to the same bytes.

    Args:
        max_memory: bytes that the process may take. What does not fit is done more cheaply, with a notice:
            without the asymmetric term, then without error feedback.
        should_stop: asked between steps; True ends the job with QuantizeCancelledError.

    Raises:
        BadInputError: a source tensor that is not finite, a grid that does not fit its tensor, a work folder
            of another job.
        ResourceError: max_memory does not suffice even for the cheapest way.
        OutputError: the work folder cannot be written.
    """
    from edgellm_models.network.build import LayerLoader

    check_plan(checkpoint, plan)
    loader = LayerLoader(checkpoint)
    plan, rows, _, notices = within_memory(loader.spec, plan, calibration, max_memory)
    num_layers = loader.spec.num_layers
    named = _fingerprint(checkpoint, plan, calibration, rows) | {"layers": num_layers}
    folder = WorkFolder(work_dir, named, resume=resume)
    if resume:
        notices.append(_resumed(folder, num_layers))
    clock = _Clock(loader.spec.num_layers, folder.num_done, on_progress, should_stop)
    stream, original = _streams(loader, plan, calibration, rows, folder)
    seconds: dict[str, float] = {}
    for index in range(folder.num_done, loader.spec.num_layers):
        on_stage = partial(clock.at, index)
        result = quantize_layer(checkpoint, loader, plan, index, stream, original, on_stage)
        tensors, notes = _packed(result)
        seconds |= {name: outcome.seconds for name, outcome in result.outcomes.items()}
        folder.add(tensors, notes, _state(stream, original))
        del result, tensors
        checkpoint.release_pages()  # what was read of the mapped file would count as memory to the end
        give_back_memory()  # holes that one layer leaves and the next does not fit into would add up
    clock.at(loader.spec.num_layers, 0)
    del stream, original
    give_back_memory()  # what comes next, writing, would begin on top of it
    return CoreResult(folder, loader.spec.num_layers, tuple(notices), seconds)


def _resumed(folder: WorkFolder, num_layers: int) -> Notice:
    """From where an interrupted run is gone on with."""
    done = folder.num_done
    detail = f"went on with layer {done + 1} of {num_layers}; finished before: {done}"
    if done >= num_layers:
        detail = f"all {num_layers} layers were finished before: only the output was left to write"
    return Notice("resumed", detail)


class _Clock:
    """Says how far the job is and how long it will take, and ends it when it is told to."""

    def __init__(
        self,
        num_layers: int,
        num_done: int,
        on_progress: Callable[[QuantizeProgress], None] | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.num_layers = num_layers
        self.first = num_done
        self.begun = time.monotonic()
        self.on_progress = on_progress
        self.should_stop = should_stop

    def at(self, layer: int, stage: int) -> None:
        if self.should_stop():
            raise QuantizeCancelledError(
                "stopped as asked; finished layers are kept, resume goes on with them"
            )
        if self.on_progress is None:
            return
        place = layer + stage / len(STAGES)
        detail = f"layer {min(layer + 1, self.num_layers)} of {self.num_layers}"
        if place > self.first:
            left = (time.monotonic() - self.begun) / (place - self.first) * (self.num_layers - place)
            detail += f", about {left:.0f} s left"
        self.on_progress(QuantizeProgress("quantizing", place / self.num_layers, detail))


def _streams(
    loader: LayerLoader,
    plan: CorePlan,
    calibration: CalibrationTokens | None,
    rows: int,
    folder: WorkFolder,
) -> tuple[Stream | None, Stream | None]:
    """The quantized and (for the asymmetric term) the original stream, where the work folder left them."""
    if calibration is None:
        return None, None
    stream = open_stream(loader, calibration.sequences, rows)
    original = stream.copy() if plan.asymmetric_share and plan.method != "rtn" else None
    if folder.num_done:
        stored = folder.state()
        with whole(folder.state_path(folder.num_done)):
            stream.restore([stored[f"quantized.{i}"] for i in range(len(stream.state()))])
            if original is not None:
                original.restore([stored[f"original.{i}"] for i in range(len(original.state()))])
    return stream, original


def _state(stream: Stream | None, original: Stream | None) -> dict[str, torch.Tensor]:
    parts = {f"quantized.{i}": part for i, part in enumerate(stream.state() if stream else [])}
    return parts | {f"original.{i}": part for i, part in enumerate(original.state() if original else [])}


def estimate_memory(
    spec: ModelSpec, plan: CorePlan, calibration: CalibrationTokens | int | None, rows: int, longest: int = 1
) -> int:
    """Bytes that a job takes at its peak. ``calibration`` is the tokens, or how many there will be.

    ``longest``: tokens of the longest sequence, where the tokens themselves do not say it. A sequence runs
    whole, so it counts where it is more than ``rows``.
    """
    tokens = calibration if not isinstance(calibration, CalibrationTokens) else calibration.num_tokens
    if isinstance(calibration, CalibrationTokens):
        lengths = [len(sequence) for sequence in calibration.sequences]
        parts = [lengths[taken] for taken in part_slices(lengths, rows)]
        tokens, longest = sum(len(part) * max(part) for part in parts), max(lengths)  # with what pads
    q, hidden, ffn = spec.num_heads * spec.head_dim, spec.hidden_size, spec.ffn_size
    shapes = stage_shapes(spec).values()
    layer = 4 * sum(n * k for n, k in shapes)
    feedback = plan.method != "rtn" and tokens is not None
    streams = 2 if feedback and plan.asymmetric_share else 1
    rounding = 0
    for n, k in shapes:
        matrices = 0
        if feedback:
            # The Hessian beside the cross term and a factor, or beside an inverse (f64 up to 4096).
            matrices = k * k * 4 * (6 if k <= 4096 else 3)
        rounding = max(rounding, matrices + 6 * n * k * 4)
    # While inputs are collected the layer is there as it was, as it is and as it was rounded so far.
    square = max(k for _, k in shapes) ** 2 * 4 if feedback else 0
    collecting = (streams + 1) * layer + streams * square
    if tokens is not None:
        collecting += activation_bytes(spec, max(rows, longest), longest)
    total = _PROGRAM_BYTES + max(collecting, layer + rounding)
    if tokens is not None:
        kept = ffn if keeps_activated(tokens, ffn) else 0
        total += streams * tokens * (hidden + max(q, kept)) * 4 + (256 << 20)
    return total


def within_memory(
    spec: ModelSpec,
    plan: CorePlan,
    calibration: CalibrationTokens | int | None,
    max_memory: int | None,
    longest: int = 1,
) -> tuple[CorePlan, int, int, list[Notice]]:
    """The plan that keeps ``max_memory``, rows that run at once, bytes, and notices of what was left out."""
    rows = _ROWS_PER_PART
    notices: list[Notice] = []
    if max_memory is None:
        return plan, rows, estimate_memory(spec, plan, calibration, rows, longest), notices
    while estimate_memory(spec, plan, calibration, rows, longest) > max_memory:
        if rows > _LEAST_ROWS:
            rows //= 2
        elif plan.asymmetric_share and plan.method != "rtn":
            plan = replace(plan, asymmetric_share=0.0)
            detail = "the model as it was is not run beside the quantized one: max-memory does not hold both"
            notices.append(Notice("asymmetric_term_left_out", detail))
        elif plan.method != "rtn" and calibration is not None:
            plan = replace(plan, method="rtn")
            detail = "weights are rounded to nearest without error feedback: max-memory holds no Hessian"
            notices.append(Notice("error_feedback_left_out", detail))
        else:
            needed = estimate_memory(spec, plan, calibration, rows, longest)
            raise ResourceError(
                f"max-memory {memory_size(max_memory)}: one layer of this model needs "
                f"{memory_size(needed)} even without error feedback: allow more, or calibrate with less"
            )
    return plan, rows, estimate_memory(spec, plan, calibration, rows, longest), notices


def _fingerprint(
    checkpoint: Checkpoint, plan: CorePlan, calibration: CalibrationTokens | None, rows: int
) -> dict[str, Any]:
    """What two runs must share so that one can go on with the other's work."""
    grids = {name: repr(grid) for name, grid in sorted(plan.grids.items())}
    return {
        **source_identity(checkpoint),
        "grids": digest(grids),
        "method": plan.method,
        "options": repr(plan.options),
        "asymmetric_share": plan.asymmetric_share,
        "awq_ratios": plan.awq_ratios,
        "calibration": None if calibration is None else calibration.hash,
        "rows": rows,
    }


def _packed(result: LayerResult) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A layer's result as named tensors and plain values. Times are left out: bytes do not depend on them."""
    tensors: dict[str, torch.Tensor] = {}
    linears: dict[str, Any] = {}
    for name, outcome in result.outcomes.items():
        weight = outcome.weight
        note: dict[str, Any] = {
            "error": outcome.relative_error,
            "measure": outcome.error_measure,
            "method": outcome.method,
            "notices": [[notice.kind, notice.detail] for notice in outcome.notices],
        }
        if isinstance(weight, QuantizedLinear):
            tensors[f"{name}/codes"], tensors[f"{name}/scales"] = weight.codes, weight.scales
            if weight.zeros is not None:
                tensors[f"{name}/zeros"] = weight.zeros
            note |= {"bits": weight.bits, "group_size": weight.group_size}
        else:
            tensors[f"{name}/blocks"] = weight.data
            note |= {"layout": weight.layout.value, "in_features": weight.shape[1]}  # type: ignore[union-attr]
        linears[name] = note
    for name, value in result.changed.items():
        tensors[f"{name}/dense"] = value
    tokens = {}
    for name, seen in result.imatrix.items():
        tensors[f"{name}/imatrix"] = seen.imatrix
        tokens[name] = seen.tokens
    return tensors, {"linears": linears, "tokens": tokens}


def _unpacked(
    tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any], seconds: Mapping[str, float]
) -> LayerResult:
    from edgellm_kernels.weights import BlockLayout, BlockQuantWeight

    result = LayerResult()
    for name, note in notes["linears"].items():
        weight: QuantizedLinear | BlockQuantWeight
        if "layout" in note:
            layout = BlockLayout(note["layout"])
            weight = BlockQuantWeight(tensors[f"{name}/blocks"], layout, note["in_features"])
        else:
            weight = QuantizedLinear(
                tensors[f"{name}/codes"],
                tensors[f"{name}/scales"],
                tensors.get(f"{name}/zeros"),
                note["group_size"],
                note["bits"],
            )
        notices = tuple(Notice(kind, detail) for kind, detail in note["notices"])
        result.outcomes[name] = LayerOutcome(
            name, weight, note["error"], seconds.get(name, 0.0), note["method"], notices, note["measure"]
        )
    for name, tensor in tensors.items():
        if name.endswith("/dense"):
            result.changed[name.removesuffix("/dense")] = tensor
        elif name.endswith("/imatrix"):
            short = name.removesuffix("/imatrix")
            result.imatrix[short] = LayerStatistics(None, tensor, notes["tokens"][short])
    return result
