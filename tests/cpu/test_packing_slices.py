"""A large weight is packed in slices: the same bytes, and the file's pages can go between two of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgellm_kernels import native_packing
from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, NativeWeight, StackedWeight, prepare
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from tests.support.native import random_rows
from tests.support.native_cases import needs_native
from tests.support.tiny_models import make_tiny

pytestmark = needs_native


def block_weight(n: int, seed: int) -> BlockQuantWeight:
    return BlockQuantWeight(random_rows("Q6_K", n, 256, seed), BlockLayout.Q6_K, 256)


@pytest.mark.parametrize(("slice_bytes", "slices"), [(1, 13), (2 * 8 * 210, 7), (3 * 8 * 210 + 5, 5)])
def test_slices_give_the_bytes_of_the_whole(
    slice_bytes: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 8 tiles and of 5, the last with 3 rows."""
    weight = StackedWeight((block_weight(64, 1), block_weight(35, 2)))
    whole = prepare(weight, hold="native")
    calls: list[int] = []
    monkeypatch.setattr(native_packing, "SLICE_BYTES", slice_bytes)
    cut = prepare(weight, hold="native", between=lambda: calls.append(1))
    assert isinstance(whole, NativeWeight) and isinstance(cut, NativeWeight)
    assert torch.equal(whole.data, cut.data)
    assert len(calls) == slices - 2  # the first slice of each part follows nothing of it


def test_the_pages_of_a_table_are_given_back_while_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(make_tiny("gemma3", tmp_path / "m"))
    given: list[int] = []
    release = checkpoint.release_pages
    monkeypatch.setattr(checkpoint, "release_pages", lambda: (given.append(1), release())[1])
    build_decoder(checkpoint, kernels="native")
    at_once = len(given)
    monkeypatch.setattr(native_packing, "SLICE_BYTES", 1 << 10)
    decoder = build_decoder(checkpoint, kernels="native")
    assert len(given) - at_once > at_once + 10
    assert decoder.weight_bytes > 0
