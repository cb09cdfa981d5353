"""The block decoders against gguf's own, bit for bit, and the Q8_0 encoder that further types are held
with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from edgellm_kernels import ggml_blocks
from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.weights import BlockLayout

F16_FIELDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Byte offsets of the halves in a block, from the format's description."""


def random_rows(layout: BlockLayout, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Random bytes; the halves are any finite ones, zeros of both signs and subnormals included."""
    rng = np.random.default_rng(seed)
    size = GGML_TYPES_BY_NAME[layout.value].block_bytes
    data = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for offset in F16_FIELDS[layout.value]:
        halves = rng.integers(0, 1 << 16, rows * blocks).astype(np.uint16)
        halves = np.where((halves & 0x7C00) == 0x7C00, halves & 0x83FF, halves).astype("<u2")
        halves[: min(4, len(halves))] = [0x0000, 0x8000, 0x0001, 0x7BFF][: len(halves)]
        data[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    return torch.from_numpy(data.reshape(rows, blocks * size))


def reference(data: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(
            gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[layout.value]).astype(np.float32)
        )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool((left.view(torch.int32) == right.view(torch.int32)).all())


@pytest.mark.parametrize("layout", list(BlockLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (37, 3), (300, 4)])
def test_random_bytes_decode_to_the_same_bits_as_gguf(layout: BlockLayout, rows: int, blocks: int) -> None:
    data = random_rows(layout, rows, blocks, seed=rows)
    in_features = blocks * ggml_blocks.block_elements(layout)
    ours = ggml_blocks.dequantize(data, layout, in_features)
    assert ours.dtype == torch.float32
    assert same_bits(ours, reference(data, layout))


def test_every_layout_has_its_halves_listed() -> None:
    assert set(F16_FIELDS) == {layout.value for layout in BlockLayout}


@pytest.mark.parametrize("layout", list(BlockLayout), ids=lambda layout: layout.value)
def test_chunks_and_chosen_rows_change_nothing(layout: BlockLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_rows(layout, 20, 2, seed=5)
    in_features = 2 * ggml_blocks.block_elements(layout)
    whole = ggml_blocks.dequantize(data, layout, in_features)
    monkeypatch.setattr(ggml_blocks, "_CHUNK_ELEMENTS", 3 * in_features)
    assert same_bits(ggml_blocks.dequantize(data, layout, in_features), whole)
    ids = torch.tensor([19, 0, 7, 7])
    assert same_bits(ggml_blocks.dequantize_rows(data, layout, in_features, ids), whole[ids])
    # a row slice of a larger tensor need not be contiguous
    wide = torch.cat((data, data), dim=1)[:, : data.shape[1]]
    assert same_bits(ggml_blocks.dequantize(wide, layout, in_features), whole)


def test_wrong_shapes_are_refused() -> None:
    data = torch.zeros((2, 18), dtype=torch.uint8)
    with pytest.raises(ValueError, match="Q4_0 rows of 64"):
        ggml_blocks.dequantize(data, BlockLayout.Q4_0, 64)
    with pytest.raises(ValueError, match="not a multiple"):
        ggml_blocks.dequantize(data, BlockLayout.Q4_0, 33)
    with pytest.raises(ValueError, match="uint8"):
        ggml_blocks.dequantize(data.float(), BlockLayout.Q4_0, 32)


def test_q8_0_encoding_is_as_good_as_ggufs() -> None:
    """Error within half a step of the stored scale everywhere, and no larger in sum than gguf's own
    encoder's."""
    weights = torch.from_numpy(np.random.default_rng(3).standard_t(4, (64, 256)).astype(np.float32))
    packed = ggml_blocks.encode_q8_0(weights)
    decoded = ggml_blocks.dequantize(packed, BlockLayout.Q8_0, 256)
    steps = packed.view(-1, 34)[:, :2].contiguous().view(torch.float16).float()
    # the largest weight of a block may also fall short by the rounding of its scale: 127 * 2**-11 steps
    assert bool(((decoded - weights).abs().view(-1, 32) <= 0.5701 * steps).all())
    theirs = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.Q8_0)
    their_error = np.square(
        gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0) - weights.numpy()
    ).sum()
    assert float((decoded - weights).square().sum()) <= their_error * 1.001


def test_q8_0_encoding_at_the_edges() -> None:
    zeros = torch.zeros((1, 32))
    assert not ggml_blocks.encode_q8_0(zeros).any()
    tiny = torch.full((1, 32), 1e-12)
    assert (
        float(ggml_blocks.dequantize(ggml_blocks.encode_q8_0(tiny), BlockLayout.Q8_0, 32).abs().max()) <= 1e-7
    )
    for bad in (float("nan"), float("inf"), 1e30):
        with pytest.raises(ValueError, match="not finite or too large"):
            ggml_blocks.encode_q8_0(torch.tensor([[bad] + [0.0] * 31]))
