"""The most memory that this process held since a moment, and how that is known."""

from __future__ import annotations

from pathlib import Path

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak() -> bool:
    """Starts counting anew; False where the system cannot, so that the peak is that of the whole process."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes(was_reset: bool) -> tuple[int, str]:
    """Resident bytes at the peak, and the source in words."""
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                since = "since the model was loaded" if was_reset else "since the process began"
                return int(line.split()[1]) * 1024, f"VmHWM {since}"
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0, "not known on this system"
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "ru_maxrss since the process began"
