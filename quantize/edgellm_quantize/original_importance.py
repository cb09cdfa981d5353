"""The importance matrix of a model as it is, nothing quantized: what llama-imatrix computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm_quantize.imatrix_file import ImportanceEntry, ImportanceMatrix

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_quantize.calibration import CalibrationTokens

_ROWS_PER_PART = 4096


def original_importance(
    checkpoint: Checkpoint,
    calibration: CalibrationTokens,
    dataset: str,
    on_progress: Callable[[float], None] = lambda done: None,
) -> ImportanceMatrix:
    """One forward pass of all sequences, layer by layer. Embedding and head have no entry, as usual.

    (What the core sees while it works is another thing: the inputs behind layers that are rounded already.)
    """
    from edgellm_models.network.build import LayerLoader
    from edgellm_models.network.hold import give_back_memory
    from edgellm_quantize.capture import STAGE_STEMS, STAGES, collect, open_stream

    loader = LayerLoader(checkpoint)
    stream = open_stream(loader, calibration.sequences, _ROWS_PER_PART)
    entries = {}
    for index in range(loader.spec.num_layers):
        on_progress(index / loader.spec.num_layers)
        layer = loader.layer(index)
        for stage in STAGES:
            seen = collect(stage, index, stream, layer, hessian=False).input
            for stem in STAGE_STEMS[stage]:
                name = f"blk.{index}.{stem}.weight"
                if checkpoint.has(name):
                    entries[name] = ImportanceEntry(seen.imatrix.numpy(), seen.tokens)
        stream.finish(layer)
        del layer  # the next would be made beside it
        give_back_memory()
    lengths = [len(sequence) for sequence in calibration.sequences]
    return ImportanceMatrix(entries, (dataset,), len(lengths), max(lengths))
