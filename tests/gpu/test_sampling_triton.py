"""Triton draws against their torch twin: the same ids, of any vocabulary and with any cut."""

from __future__ import annotations

import pytest
import torch

from edgellm_kernels import sampling_torch, sampling_triton
from edgellm_kernels.sampling_torch import DrawTables


def tables(rows: int, n: int) -> DrawTables:
    """Greedy and drawn rows, cut and uncut, keys of all sizes."""
    keys = torch.randint(0, 2**32, (rows, 2), dtype=torch.int64)
    temperatures = torch.rand(rows, dtype=torch.float64) * 2
    temperatures[::3] = 0.0
    cuts = torch.where(torch.arange(rows) % 2 == 0, float("-inf"), -1.0).double()
    return DrawTables(temperatures, keys, cuts, torch.full((rows,), n))


def both(logits: torch.Tensor, given: DrawTables, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    moved = DrawTables(
        *(part.to(device) for part in (given.temperatures, given.keys, given.cuts, given.last_ids))
    )
    ours = tuple(part.cpu() for part in sampling_triton.draw(logits.to(device), moved))
    return [ours, sampling_torch.draw(logits, given)]


@pytest.mark.parametrize("n", [1, 77, 2048, 5003])
def test_the_same_ids(n: int, device: torch.device) -> None:
    logits, given = torch.randn(7, n) * 4, tables(7, n)
    (ids, largest), (expected, expected_largest) = both(logits, given, device)
    assert torch.equal(ids, expected) and torch.equal(largest, expected_largest)
    assert len(set(ids.tolist())) > 1 or n == 1


def test_ties_go_to_the_first_id_and_cuts_end_at_an_id(device: torch.device) -> None:
    """Of equal logits the first, over chunks too; of scores equal to the cut only those up to an id stay."""
    logits = torch.zeros(3, 4500)
    logits[0, 4400] = logits[0, 2100] = 5.0
    given = DrawTables(
        torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([[1, 2], [3, 4], [5, 2**32 - 1]]),
        torch.tensor([float("-inf"), 0.0, float("-inf")], dtype=torch.float64),
        torch.tensor([4500, 3, 4500]),
    )
    (ids, _), (expected, _) = both(logits, given, device)
    assert torch.equal(ids, expected)
    assert int(ids[0]) == 2100 and 0 <= int(ids[1]) <= 3


def test_what_cannot_be_drawn_from_shows(device: torch.device) -> None:
    """NaN anywhere is the largest; -inf is never drawn."""
    logits = torch.full((3, 3000), float("-inf"))
    logits[0, 2500], logits[1, 17], logits[2, 2999] = float("nan"), float("inf"), -3.0
    given = DrawTables(
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, 2, dtype=torch.int64),
        torch.full((3,), float("-inf"), dtype=torch.float64),
        torch.full((3,), 3000),
    )
    (ids, largest), (_, expected) = both(logits, given, device)
    assert torch.equal(largest.isnan(), expected.isnan()) and bool(largest[0].isnan())
    assert float(largest[1]) == float("inf") and int(ids[2]) == 2999
