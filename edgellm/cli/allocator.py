"""How the C library keeps memory: large blocks go back to the system as soon as they are free."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
LARGE_BYTES = 1 << 18


def return_large_blocks() -> None:
    """Gives blocks of LARGE_BYTES and more a mapping of their own; where the C library is not GNU's nothing
    changes.

    Left alone it raises that threshold to the largest block that was ever freed, so that torch's tensors of
    megabytes, which come and go with every op, are cut out of a heap that only grows: a prompt of SmolLM2
    then took up to three times of what was alive at once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
