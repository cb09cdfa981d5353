"""What a user asks of the types of a GGUF file, looked at before any work: patterns, and sizes in reach."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm_models.errors import Notice, UsageError
from edgellm_quantize.gguf_sizes import tensor_nbytes
from edgellm_quantize.kquant_mix import choose_types, is_quantized
from edgellm_quantize.recipe import TENSOR_TYPES, QuantizeRecipe
from edgellm_quantize.sensitivity import candidate_types

if TYPE_CHECKING:
    from edgellm_quantize.gguf_source import GGUFSource

_UNUSED_BITS = 0.05
"""Bits per weight below a target from which a notice says so; less is what no tensor's step fits into."""
_UNUSED_SHARE = 0.02


def check_types(recipe: QuantizeRecipe, model: GGUFSource) -> list[Notice]:
    """Notices of what is asked in vain. UsageError for a pattern that matches no tensor, and for a target
    that is less than the smallest types take."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    notices = check_patterns(recipe.tensor_types, shapes)
    if recipe.target_bpw is None:
        return notices
    named = choose_types(recipe.type, shapes, model.shape, overrides=recipe.tensor_types)
    pinned = {name: named.tensors[name] for name in named.overridden}
    least = 0
    for tensor in model.tensors:
        kinds = [pinned.get(tensor.name, "F32")]
        if tensor.name not in pinned and is_quantized(tensor.name, tensor.shape):
            kinds = [*candidate_types(tensor.shape[-1])]
            if tensor.source_type in TENSOR_TYPES and tensor.source_type != "F32":
                kinds.append(tensor.source_type)
        least += min(tensor_nbytes(tensor.shape, kind) for kind in kinds)
    if least > math.floor(recipe.target_bpw * model.num_weights / 8):
        raise UsageError(
            f"a target of {recipe.target_bpw:g} bits per weight cannot be met: the smallest types that fit "
            f"this model's rows take {8 * least / model.num_weights:.3f}"
        )
    fallbacks = tuple(entry for entry in named.fallbacks if entry.name in pinned)
    return [*notices, *replace(named, fallbacks=fallbacks).notices()]


def check_patterns(
    patterns: Sequence[tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]
) -> list[Notice]:
    """A notice for each pattern that changes nothing, UsageError for one that matches no tensor at all.

    The first pattern that is found in a name decides; norms, vectors and the like keep their type whatever is
    asked.
    """
    notices = []
    taken: set[str] = set()
    for pattern, kind in patterns:
        found = [name for name in shapes if re.search(pattern, name)]
        if not found:
            raise UsageError(
                f"tensor type {pattern}={kind}: no tensor of this model has such a name; names are like "
                f"{', '.join(sorted(shapes)[:3])}"
            )
        free = [name for name in found if is_quantized(name, shapes[name])]
        if not free:
            why = f"{_some(found)}: norms, vectors and tables of this kind stay as they are"
        elif taken.issuperset(free):
            why = f"a pattern before it decides for {_some(free)}"
        else:
            why = ""
        taken.update(free)
        if why:
            notices.append(
                Notice("tensor_type_unused", f"tensor type {pattern}={kind} changes nothing: {why}")
            )
    return notices


def unused_target(target_bpw: float | None, types: Mapping[str, str], model: GGUFSource) -> list[Notice]:
    """A notice where the types that were chosen take clearly less than the target allows."""
    if target_bpw is None:
        return []
    total = sum(tensor_nbytes(tensor.shape, types[tensor.name]) for tensor in model.tensors)
    held = 8 * total / model.num_weights
    if target_bpw - held < max(_UNUSED_BITS, _UNUSED_SHARE * target_bpw):
        return []
    detail = (
        f"the tensors take {held:.2f} bits per weight, not {target_bpw:g}: they have the types of the least "
        "loss, and no larger one that fits into the rest makes any of them better"
    )
    return [Notice("target_not_used", detail)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
