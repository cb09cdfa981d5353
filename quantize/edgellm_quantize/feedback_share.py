"""What is left of a matrix's rounding error in its output when later columns make up for earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgellm_quantize.sensitivity import REFERENCE, dense, filled, fits_reference, sampled_layers

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint

TOKENS = 8192
"""Of which a quarter is kept apart to judge: feedback does better on what it was fitted to."""
ROWS_PER_PART = 4096


def feedback_shares(
    checkpoint: Checkpoint,
    names: Sequence[str],
    sequences: Sequence[Sequence[int]],
    on_progress: Callable[[float], None] = lambda done: None,
    rows_per_part: int = ROWS_PER_PART,
) -> dict[str, float]:
    """Of each block matrix in ``names``: its output's error after feedback over that without, 1 at most.

    Small where the inputs are much alike (attention reads the normed stream), near a half where they are not.
    Measured on some layers with the type that sensitivities are measured with; interpolated between them.
    ``rows_per_part`` rows of the tokens run through a layer at once.
    """
    from edgellm_models.network.build import LayerLoader
    from edgellm_models.network.hold import give_back_memory
    from edgellm_quantize.capture import STAGE_STEMS, STAGES, collect, open_stream

    loader = LayerLoader(checkpoint)
    chosen = sampled_layers(loader.spec.num_layers)
    fitted_to, judged_on = _parts(sequences)
    streams = [open_stream(loader, part, rows_per_part) for part in (fitted_to, judged_on)]
    measured: dict[str, float] = {}
    for index in range(loader.spec.num_layers):
        on_progress(index / loader.spec.num_layers)
        if index not in chosen:
            layer = loader.layer(index)
            for stream in streams:
                stream.forward(layer, index)
            del layer
            continue
        for stage in STAGES:
            members = [f"blk.{index}.{stem}.weight" for stem in STAGE_STEMS[stage]]
            members = [n for n in members if n in names and fits_reference(checkpoint.tensors()[n].shape[-1])]
            layer = loader.layer(index)
            seen = [collect(stage, index, s, layer, hessian=bool(members)).input.hessian for s in streams]
            del layer  # it has no room beside the matrices of rounding
            for name in members:
                measured[name] = _share(dense(checkpoint, name), *seen)
            del seen
            give_back_memory()
        layer = loader.layer(index)
        for stream in streams:
            stream.finish(layer)
        del layer
    return filled(measured, names, loader.spec.num_layers)


def _share(weight: torch.Tensor, fitted_to: torch.Tensor | None, judged_on: torch.Tensor | None) -> float:
    from edgellm_quantize.grids import BlockTypeGrid
    from edgellm_quantize.rounding import RoundingOptions, gptq, output_error, round_nearest

    assert fitted_to is not None
    grid = BlockTypeGrid(REFERENCE, "fast")
    without = output_error(weight, round_nearest(weight, grid, None, 0).values, judged_on)
    after = gptq(weight, fitted_to, grid, RoundingOptions(candidates=0)).values
    left = output_error(weight, after, judged_on)
    # An input that was never seen has no error either way.
    return min(1.0, max(left, 1e-12) / without) if without > 0 else 1.0


def _parts(sequences: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Three quarters and one quarter of some sequences, spread over all of them; one alone is both."""
    wanted = max(4, TOKENS // max(1, max(map(len, sequences))))
    shown = list(sequences[:: max(1, len(sequences) // wanted)])[:wanted]
    judged: Sequence[int] = range(3, len(shown), 4) or [len(shown) - 1]
    fitted_to = [sequence for i, sequence in enumerate(shown) if i not in judged]
    return fitted_to or shown, [shown[i] for i in judged]
