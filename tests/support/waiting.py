"""Waiting for what another thread or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Until the condition holds; fails where it never does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.005)
