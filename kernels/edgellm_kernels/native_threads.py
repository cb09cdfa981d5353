"""The threads of the native kernels: how many cores this process really has, and its one pool of threads."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from edgellm_kernels.native_library import NativeLibrary, load_library

_lock = threading.Lock()
_pools: dict[Path, tuple[int, int]] = {}
"""Library file -> (address of its pool, threads). A pool is made once and kept while the process lives."""
_wanted: list[int] = []
"""What set_threads asked for, at most one number."""


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, and the limits of its control groups (v1 and v2), the
    fraction of a core rounded down, at least 1. ``root`` is where /proc and /sys lie, for tests.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [cores, *_cgroup_limits(root)]
    return max(1, int(min(limits)))


def _cgroup_limits(root: Path) -> list[float]:
    """Cores that each control group above this process grants, of those that limit anything."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            base = base / "cpu" if (base / "cpu").is_dir() else base / controllers
        # A limit above binds as well. In a container the path may be the host's, which is not there.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            limits += _quota(base.joinpath(*parts[:depth]), is_v1=bool(controllers))
    return limits


def _quota(folder: Path, *, is_v1: bool) -> list[float]:
    try:
        if is_v1:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            quota, period = (folder / "cpu.max").read_text().split()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return []  # not there, or "max"
    return [cores] if cores > 0 else []  # v1 says -1 for no limit


def set_threads(threads: int) -> None:
    """How many threads the pool has, the caller's included, from the next call on. Not while a call runs."""
    with _lock:
        _wanted[:] = [max(1, threads)]


def pool(library: NativeLibrary | None = None) -> int:
    """Address of the pool of a library (by default the one for this processor), made on first use with the
    threads of ``set_threads`` or as many as there are cores.
    """
    library = library or load_library()
    assert library is not None, "no native library"
    threads = _wanted[0] if _wanted else 0
    known = _pools.get(library.path)
    if known is not None and threads in (0, known[1]):
        return known[0]
    with _lock:
        threads = threads or available_cores()
        known = _pools.get(library.path)
        if known is not None and known[1] == threads:
            return known[0]
        handle = ctypes.c_void_p()
        library.call("edgellm_pool_new", threads, ctypes.addressof(handle))
        assert handle.value is not None
        if known is not None:
            library.call("edgellm_pool_delete", known[0])
        _pools[library.path] = (handle.value, threads)
        return handle.value


def num_threads() -> int:
    """Threads of the pool that ``pool`` gives."""
    return _wanted[0] if _wanted else available_cores()
