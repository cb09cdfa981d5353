"""The most memory that this process has had."""

from __future__ import annotations

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes; 0 where the system does not say.

    Linux's getrusage would begin with the peak of the process that started this one.
    """
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return _by_getrusage()


def _by_getrusage() -> int:
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
