"""A file mapped into memory, and tensors that are views of it."""

from __future__ import annotations

import errno
import math
import mmap
import os
import platform
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    NotFoundError,
    PermissionDeniedError,
    TransferError,
)

if TYPE_CHECKING:
    import torch

_LINUX_MAP_NORESERVE = 0x4000
"""mmap.h on x86-64 and arm64; Python names it from 3.12 on."""


def file_error(path: Path, error: OSError) -> EdgeLLMError:
    """The error a user reads when the system refuses to open or read ``path``."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{path}: there is no such file")
    if isinstance(error, PermissionError):
        return PermissionDeniedError(f"{path}: permission to read this file is denied")
    if isinstance(error, IsADirectoryError):
        return BadInputError(f"{path}: this is a folder, not a file")
    if error.errno == errno.ENOMEM:
        return TransferError(f"{path}: the system has no address space left to map this file")
    return TransferError(f"{path}: cannot be read: {error.strerror or error}")


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise file_error(path, error) from error
    except ValueError as error:  # a NUL in the name
        raise NotFoundError(f"{str(path)!r}: there is no such file ({error})") from error


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. NotFoundError or PermissionDeniedError where the system does not say."""
    return stat.S_ISDIR(_status(path).st_mode)


def regular_file_size(path: Path) -> int:
    """Size in bytes of a regular file. A folder, pipe or device is BadInputError, and is never opened."""
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        raise BadInputError(f"{path}: this is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise BadInputError(f"{path}: this is not a regular file")
    return status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The whole of a small file. BadInputError if it is larger than ``max_bytes``."""
    size = regular_file_size(path)
    if size > max_bytes:
        raise BadInputError(f"{path}: {size:,} bytes is too large for such a file (at most {max_bytes:,})")
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise file_error(path, error) from error


class MappedFile:
    """A non-empty regular file, mapped privately: pages are read when touched and never written back.

    The mapping is private and writable because torch warns about read-only buffers; nothing writes to it. It
    lives as long as the last tensor made from it, so there is no ``close`` that could pull memory from under
    one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = regular_file_size(path)
        if self.size == 0:
            raise BadInputError(f"{path}: the file is empty (0 bytes)")
        try:
            with path.open("rb") as file:
                self.buffer = _map_private(file.fileno(), self.size)
        except (OSError, ValueError) as error:
            wrapped = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
            raise file_error(path, wrapped) from error

    def release(self) -> None:
        """Gives back the memory of pages that were read, where the system can; they can be read again."""
        if sys.platform == "linux":
            self.buffer.madvise(mmap.MADV_DONTNEED)  # nothing wrote to the private pages, so nothing is lost

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A view of the bytes at ``offset``; a copy where the offset does not suit the element size.

        The caller has checked that the bytes lie within the file and that no dimension is 0.
        """
        import torch

        count = math.prod(shape)
        if offset % dtype.itemsize:
            # a header of odd length: unaligned loads are undefined for the kernels, so move the bytes
            raw = bytearray(self.buffer[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(raw, dtype=dtype, count=count).view(shape)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _map_private(descriptor: int, size: int) -> mmap.mmap:
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        # without NORESERVE a private writable mapping larger than free memory is refused, though it is never
        # written
        return mmap.mmap(
            descriptor,
            size,
            flags=mmap.MAP_PRIVATE | _LINUX_MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
