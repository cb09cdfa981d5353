"""Types for a file of a wanted size: settles what is fixed, measures the rest, spends the bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import Notice, UsageError
from edgellm_quantize.feedback_share import ROWS_PER_PART, feedback_shares
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.hf_tensors import is_block_linear
from edgellm_quantize.kquant_mix import FILE_TYPE_IDS, Mixture, is_quantized
from edgellm_quantize.recipe import TENSOR_TYPES
from edgellm_quantize.sensitivity import (
    Sensitivity,
    measured_sensitivity,
    structural_sensitivity,
    type_options,
)
from edgellm_quantize.type_budget import TypeOption, choose_under_budget
from edgellm_quantize.work_folder import damaged, keep, kept_path, read_kept

if TYPE_CHECKING:
    from edgellm_quantize.gguf_source import GGUFSource
    from edgellm_quantize.imatrix_file import ImportanceMatrix

_KEPT = "types"
_MEASURING_SHARE = 0.6
"""Of the time that choosing takes, where the model runs for it."""
_FEEDBACK_END = 0.9
"""... and where what error feedback leaves is measured then."""


def choose_for_size(
    model: GGUFSource,
    target_bpw: float,
    *,
    pinned: Mapping[str, str] | None = None,
    importance: ImportanceMatrix | None = None,
    sequences: Sequence[Sequence[int]] | None = None,
    has_feedback: bool = False,
    feedback_rows: int = ROWS_PER_PART,
    runs_later: bool = False,
    lacks_memory: bool = False,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Mixture:
    """The types with the least loss whose tensors together take ``target_bpw`` bits per weight or less.

    Args:
        pinned: tensors whose type the user has named.
        importance: weights of the columns in the errors, where no sequences are given.
        sequences: token ids on which the model shows what an error of each matrix costs; None takes the
            errors of the weights alone, and a notice says so.
        has_feedback: the matrices of the blocks will be rounded with error feedback. What it leaves is
            measured with ``feedback_rows`` rows at once.
        runs_later: this is the dry run of a job that has sequences; the notice says so then.
        lacks_memory: there are sequences, but the model cannot run within max-memory.

    UsageError where even the smallest types take more.
    """
    pinned = pinned or {}
    checkpoint = model.checkpoint
    names = [t.name for t in model.tensors if is_quantized(t.name, t.shape) and t.name not in pinned]
    fixed = {
        t.name: pinned.get(t.name, "F32")
        for t in model.tensors
        if t.name in pinned or not is_quantized(t.name, t.shape)
    }
    share = _MEASURING_SHARE if sequences else 0.0
    if sequences:
        sensitivity = measured_sensitivity(checkpoint, names, sequences, lambda d: on_progress(share * d))
        if has_feedback:
            shares = feedback_shares(
                checkpoint,
                names,
                sequences,
                lambda d: on_progress(share + (_FEEDBACK_END - share) * d),
                feedback_rows,
            )
            # A lookup by row, and what follows the last block, get no feedback: a bit buys more there.
            after = {
                name: loss * (shares[name] if is_block_linear(name) else 1.0)
                for name, loss in sensitivity.loss.items()
            }
            sensitivity, share = Sensitivity(after, True), _FEEDBACK_END
    else:
        sensitivity = structural_sensitivity(names, model.shape.num_layers)
        model.notices.append(_not_measured(runs_later, lacks_memory))
    options = type_options(
        checkpoint, names, sensitivity, importance, lambda d: on_progress(share + (1 - share) * d)
    )
    for tensor in model.tensors:
        if tensor.name in fixed:
            size = tensor_nbytes(tensor.shape, fixed[tensor.name])
            options[tensor.name] = [TypeOption(fixed[tensor.name], size, 0.0)]
    budget = math.floor(target_bpw * model.num_weights / 8)
    least = sum(min(option.nbytes for option in found) for found in options.values())
    if least > budget:
        raise UsageError(
            f"a target of {target_bpw:g} bits per weight cannot be met: the smallest types that fit this "
            f"model's rows take {8 * least / model.num_weights:.3f}"
        )
    chosen = choose_under_budget(options, budget).types
    types = {tensor.name: chosen[tensor.name] for tensor in model.tensors}
    return Mixture(_file_type(model, types), types, (), tuple(pinned))


def _not_measured(runs_later: bool, lacks_memory: bool) -> Notice:
    alone = "types are chosen by the error of the weights alone, as if all layers mattered alike"
    if runs_later:
        detail = (
            f"the dry run does not run the model: here {alone}; the job will choose by what an error of each "
            "matrix costs on the calibration text: other types, within the same bits per weight"
        )
        return Notice("sensitivity_measured_later", detail)
    why, remedy = "without calibration the model does not run", "a calibration text"
    if lacks_memory:
        why, remedy = "max-memory does not hold the model at work", "more memory"
    detail = f"{why}: {alone}; {remedy} gives a better choice"
    return Notice("sensitivity_not_measured", detail)


def keep_types(folder: Path, depends: Mapping[str, Any], mixture: Mixture) -> None:
    """Keep what was chosen for a resumed job. ``depends``: what the choice follows from."""
    keep(folder, _KEPT, depends, {"file_type": mixture.type_name, "types": mixture.tensors})


def kept_types(
    folder: Path, depends: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Mixture | None:
    """What ``keep_types`` was given; None where nothing is kept. BadInputError where it follows from other
    values, or is damaged."""
    found = read_kept(folder, _KEPT, depends)
    if found is None:
        return None
    types, name = found.get("types"), found.get("file_type")
    fits = isinstance(types, dict) and set(types) == set(shapes) and set(types.values()) <= {*TENSOR_TYPES}
    if not fits or not isinstance(types, dict) or not isinstance(name, str) or name not in FILE_TYPE_IDS:
        raise damaged(kept_path(folder, _KEPT))
    return Mixture(name, {tensor: types[tensor] for tensor in shapes}, (), ())


def _file_type(model: GGUFSource, types: Mapping[str, str]) -> str:
    """The mixture that general.file_type names: the one of the type that most weights have."""
    weights: Counter[str] = Counter()
    for tensor in model.tensors:
        weights[types[tensor.name]] += math.prod(tensor.shape)
    most = weights.most_common(1)[0][0]
    return next(name for name in (f"{most}_M", most) if name in FILE_TYPE_IDS)
