"""Decodes the GGUF types without kernels (i-quants, ternary, FP4) and holds them as Q8_0, some rows at a
time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME, GGMLType
from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight

_CHUNK_ELEMENTS = 1 << 21

_PEAKS: dict[str, tuple[int, ...]] = {
    "TQ1_0": (64,),
    "TQ2_0": (64,),
    "MXFP4": (127, 96, 64),
    "IQ4_NL": (127, 113, 104, 89),
}
"""Codes for a block's largest magnitude with which the type's own grid becomes whole Q8_0 codes, so that most
blocks are held without loss: ternary +-d as +-64 (d/64); FP4 in half units 1..12 as multiples of 8 or 16;
IQ4_NL as itself."""


def held_bytes(shape: tuple[int, ...]) -> int:
    """Memory of a tensor of ``shape`` held as Q8_0."""
    return math.prod(shape) // 32 * 34


def convert_to_q8_0(
    data: torch.Tensor, kind: GGMLType, in_features: int, scale: float, label: str
) -> BlockQuantWeight:
    """Rows uint8 [N, row bytes] of ``kind``, times ``scale``, as a Q8_0 weight. Scratch memory is bounded.

    BadInputError where the installed gguf cannot decode the type, or the values do not fit Q8_0.
    """
    import gguf
    import numpy as np
    import torch

    from edgellm_kernels.ggml_blocks import encode_q8_0
    from edgellm_kernels.weights import BlockLayout, BlockQuantWeight

    rows = data.shape[0]
    held = torch.empty((rows, GGML_TYPES_BY_NAME["Q8_0"].row_bytes(in_features)), dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // in_features)
    for start in range(0, rows, step):
        chunk = data[start : start + step].numpy()
        try:
            with np.errstate(all="ignore"):
                decoded = gguf.quants.dequantize(chunk, gguf.GGMLQuantizationType(kind.type_id))
        except (NotImplementedError, ValueError) as error:
            raise BadInputError(
                f"{label}: the installed gguf package cannot decode {kind.name} ({error}); update it"
            ) from error
        values = torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32))
        if scale != 1.0:
            values = values * scale
        try:
            held[start : start + step] = encode_q8_0(values, _PEAKS.get(kind.name, (127,)))
        except ValueError as error:
            raise BadInputError(f"{label}: {error}") from error
    return BlockQuantWeight(held, BlockLayout.Q8_0, in_features)
