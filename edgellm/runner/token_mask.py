"""Packed token masks of a step plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpack_masks(masks: Sequence[bytes], vocab_size: int) -> torch.Tensor:
    """Masks as in ``PlannedSequence.token_masks`` -> [len(masks), vocab_size] bool, on the CPU.

    Ids beyond a mask's bytes are not allowed.
    """
    width = -(-vocab_size // 8)
    packed = torch.zeros(len(masks), width, dtype=torch.uint8)
    for row, mask in enumerate(masks):
        usable = bytearray(mask[:width])
        if usable:
            packed[row, : len(usable)] = torch.frombuffer(usable, dtype=torch.uint8)
    # One look-up per byte: eight booleans, held as one integer, in the order of its bits.
    values = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    bits = (values >> torch.arange(8, dtype=torch.uint8)) & 1  # [256, 8]
    table = bits.view(torch.int64).squeeze(1)  # [256]
    found = table[packed.to(torch.int64)]  # [masks, bytes]
    return found.view(torch.bool)[:, :vocab_size]
