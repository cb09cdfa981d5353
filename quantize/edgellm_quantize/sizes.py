"""Sizes in words, with the unit in which their digits say something."""

from __future__ import annotations


def memory_size(nbytes: int) -> str:
    """``64 MiB``, ``1 KiB``, ``300 bytes``: in powers of two, as memory is given."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):,.0f} {unit}"
    return f"{nbytes:,} bytes"


def size_change(nbytes: int) -> str:
    """``+1.2 MB``, ``-3.4 kB``, ``+96 bytes``: in powers of ten, as files are counted."""
    for unit, power in (("MB", 1_000_000), ("kB", 1_000)):
        if abs(nbytes) >= power:
            return f"{nbytes / power:+,.1f} {unit}"
    return f"{nbytes:+,} bytes"
