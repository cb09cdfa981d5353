"""Where the tests of the Triton kernels run: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

HERE = "cuda" if torch.cuda.is_available() else "cpu"
if HERE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device(HERE)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN: an element that no kernel writes shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)
