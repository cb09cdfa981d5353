"""Memory of packed weights: parts that share nothing, large pages, what goes back to the system."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from edgellm_kernels.packed_memory import LARGE_PAGE, SWITCH, PackedMemory


def test_parts_are_aligned_apart_and_hold_what_is_written() -> None:
    memory = PackedMemory(chunk_bytes=1 << 20)
    sizes = [1, 63, 64, 65, 4096, 700_000, 500_000, 3 << 20, 17, 0]
    parts = [memory.empty(size) for size in sizes]
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True), start=1):
        assert part.shape == (size,) and part.dtype == torch.uint8
        part.fill_(value)
    for value, part in enumerate(parts, start=1):
        assert bool((part == value).all())
    assert all(part.data_ptr() % 64 == 0 for part in parts)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_chunks_are_shared_and_end_with_their_last_part() -> None:
    memory = PackedMemory(chunk_bytes=LARGE_PAGE)
    first, second = memory.empty(1000), memory.empty(1000)
    assert first.data_ptr() % LARGE_PAGE == 0 and second.data_ptr() - first.data_ptr() == 1024
    assert memory._open is not None
    chunk = memory._open
    del first
    gc.collect()
    assert chunk() is not None  # the second part lies there
    del second
    gc.collect()
    assert chunk() is None
    later = memory.empty(10)
    later.fill_(7)
    assert later.tolist() == [7] * 10


def is_advised(part: torch.Tensor) -> bool:
    """Whether Linux was asked for large pages where a tensor lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            start, end = (int(bound, 16) for bound in name.split()[0].split("-"))
            inside = start <= part.data_ptr() < end
        elif inside and name == "VmFlags":
            return "hg" in rest.split()
    raise AssertionError("the tensor lies in no mapping")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a kernel without large pages"
)
def test_large_pages_are_asked_for_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_advised(PackedMemory().empty(100))
    monkeypatch.setenv(SWITCH, "0")
    memory = PackedMemory()
    part = memory.empty(100)
    part.fill_(3)
    assert part.tolist() == [3] * 100 and memory._open is None
