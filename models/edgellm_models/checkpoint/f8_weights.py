"""Eight-bit float weights and the scales that belong to them, made into bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    import torch

F8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""After the weight's name. Both multiply the weight; "inv" says that the writer had divided by its
inverse."""
_DEFAULT_BLOCK = 128


def scale_block(shape: tuple[int, ...], scale_shape: tuple[int, ...], label: str) -> tuple[int, int]:
    """Rows and columns that share one scale: (N, K) for a scalar, (1, K) per row, else blocks.

    Without a statement of the block size 128 x 128 is taken where it fits, else the size that divides evenly.
    BadInputError where the shapes do not go together.
    """
    rows, columns = shape
    if scale_shape in ((), (1,), (1, 1)):
        return rows, columns
    if scale_shape in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale_shape) == 2 and all(scale_shape):
        blocks = tuple(-(-extent // _DEFAULT_BLOCK) for extent in shape)
        if scale_shape == blocks:
            return _DEFAULT_BLOCK, _DEFAULT_BLOCK
        if not rows % scale_shape[0] and not columns % scale_shape[1]:
            return rows // scale_shape[0], columns // scale_shape[1]
    raise BadInputError(
        f"{label}: a scale of shape {list(scale_shape)} does not fit a weight of shape {list(shape)}"
    )


def dequantize_f8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """weight f8 [N, K] times its scales (f32 [N / block rows, K / block columns], rounded up) -> bf16 [N, K].

    The product is formed in f32 and rounded once; some rows at a time.
    """
    import torch

    rows, columns = weight.shape
    grid = scale.float().reshape(-(-rows // block[0]), -(-columns // block[1]))
    wide = grid.repeat_interleave(block[1], dim=1)[:, :columns]
    out = torch.empty((rows, columns), dtype=torch.bfloat16)
    step = max(1, (1 << 21) // columns)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        owner = torch.arange(start, end) // block[0]
        out[start:end] = (weight[start:end].float() * wide[owner]).to(torch.bfloat16)
    return out
