"""What this machine offers: free memory, and the read bandwidth of all cores, measured in a moment."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

MEASURED_BYTES = 256 * 2**20
"""Larger than any cache of a desktop."""
REPEATS = 3


def free_memory() -> int | None:
    """Bytes that can be had without swapping, a container's limit included; None where nobody says."""
    from edgellm_models.network.hold import free_memory_bytes

    return free_memory_bytes()


def read_bandwidth(num_bytes: int = MEASURED_BYTES) -> float:
    """10^9 bytes per second that all available cores read together: the best of three readings of a buffer of
    ``num_bytes``.
    """
    import numpy as np

    cores = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    words = num_bytes // 8
    data = np.ones(words, dtype=np.float64)
    parts = np.array_split(data, cores)
    best = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(REPEATS):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))  # releases the GIL
            best = min(best, time.perf_counter() - begin)
    return data.nbytes / best / 1e9
