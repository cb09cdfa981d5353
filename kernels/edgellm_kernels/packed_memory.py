"""The memory that packed weights lie in: in pages of 2 MiB where the system has them."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from contextlib import suppress

import torch

LARGE_PAGE = 2 << 20
"""Bytes. Linux backs aligned ranges of this size with one page when asked to, on every processor with small
pages of 4 KiB; on others the advice does nothing or less.
"""
CHUNK_BYTES = 64 << 20
"""Memory is taken from the system in such chunks; what of one is never touched takes none."""
SWITCH = "EDGELLM_LARGE_PAGES"
"""Environment variable: 0 leaves the memory in the system's small pages."""
_ALIGNMENT = 64


class PackedMemory:
    """Hands out parts of chunks. A chunk goes back to the system with the last tensor that lies in it.

    A decode step reads every weight once. In pages of 4 KiB each of them costs a walk through the page
    tables, on a virtual machine through two: measured on one (AMD EPYC, SmolLM2-135M Q8_0, one thread, minima
    of alternating runs), the linears of a step took 6.3 ms in small pages and 4.5 ms in large ones.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._open: weakref.ref[mmap.mmap] | None = None
        """The chunk that the next tensor goes to, while one of its tensors lives."""
        self._used = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of any content, at a multiple of 64 bytes."""
        if not hasattr(mmap, "MADV_HUGEPAGE") or os.environ.get(SWITCH) == "0" or nbytes == 0:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            chunk = None if self._open is None else self._open()
            if chunk is None or self._used + nbytes > len(chunk):
                chunk, start = _new_chunk(max(self._chunk_bytes, nbytes))
                self._open, self._used = weakref.ref(chunk), start
            start = self._used
            self._used = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
            return torch.frombuffer(chunk, dtype=torch.uint8, count=nbytes, offset=start)


def _new_chunk(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that holds ``nbytes`` from an offset on which a large page begins, and that offset."""
    size = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages: the memory serves as it is
        chunk.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr()
    return chunk, -address % LARGE_PAGE


PACKED_MEMORY = PackedMemory()
"""What native_packing takes weights' memory from."""
