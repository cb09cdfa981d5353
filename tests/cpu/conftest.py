"""Every test here draws the same numbers in every run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """One seed for all that draws without a generator of its own: a tolerance holds always or never."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
