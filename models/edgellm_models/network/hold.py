"""Whether weights are decoded once and held as floats, or kept as file blocks and decoded at every call."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

_DENSE_SHARE = 0.7
"""Of the free memory: the rest is for the KV cache, activations and the system."""


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping, a container's limit included; None where the system does not
    say.
    """
    candidates = [_mem_available(), _cgroup_free()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def give_back_memory() -> None:
    """Returns to the system what was freed: glibc keeps the scratch memory of loading, a hundred MB and more.

    Does nothing where the C library is another.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _mem_available(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """memory.max - memory.current, with the page cache counted as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def choose_hold(hold: str, dense_bytes: int, free_bytes: int | None) -> str:
    """``auto`` is dense where the decoded weights fit into the greater part of the free memory, else blocks.

    Where the free memory is not known auto is dense.
    """
    if hold != "auto":
        return hold
    return "dense" if free_bytes is None or dense_bytes <= _DENSE_SHARE * free_bytes else "blocks"
