"""Where outputs go: whether one can be put there, its name while it is written, what dead processes left."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from edgellm_models.errors import OutputError


def partial_of(out: Path) -> Path:
    """The name beside ``out`` under which this process writes until all is there and read back."""
    return out.with_name(f".{out.name}.{os.getpid()}.partial")


def remove_stale_partials(out: Path) -> None:
    """Remove what processes that were killed left of ``out``. A process that runs keeps its own.

    One with the number of this process is stale too: in a container every run may have the same number.
    """
    name = re.compile(rf"\.{re.escape(out.name)}\.([1-9]\d{{0,9}})\.partial")
    with contextlib.suppress(OSError):  # a folder that is missing or closed is told of by check_place
        for path in list(out.parent.iterdir()):
            match = name.fullmatch(path.name)
            if match is None or _runs(int(match[1])):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    """Whether another process of this number is there."""
    if pid == os.getpid():
        return False
    if os.name == "nt":  # there, signal 0 is no question
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def check_place(out: Path, nbytes: int, *, replaces_file: bool = False) -> None:
    """OutputError where a file or folder of this size cannot be put.

    ``replaces_file``: an older file of that name may be there.
    """
    if replaces_file and out.is_dir():
        raise OutputError(f"{out}: this is a folder, a file name is needed")
    if not replaces_file and (out.exists() or out.is_symlink()):
        raise OutputError(f"{out}: this exists already: choose another name or remove it first")
    if not out.parent.is_dir():
        raise OutputError(f"{out}: the folder {out.parent} does not exist: create it or choose another place")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: writing in {out.parent} is not permitted")
    check_space(out, [(out, nbytes)])


def check_space(out: Path, needs: Iterable[tuple[Path, int]], what: str = "") -> None:
    """OutputError where the disks do not hold ``needs``: paths that are to be written, and their bytes.

    ``what`` is said behind how much is needed.
    """
    disks: dict[int, tuple[Path, int]] = {}
    for path, nbytes in needs:
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        device = folder.stat().st_dev
        first, before = disks.get(device, (folder, 0))
        disks[device] = (first, before + nbytes)
    for folder, nbytes in disks.values():
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise OutputError(
                f"{out}: no space: {nbytes:,} bytes are needed{what}, {free:,} are free in {folder}"
            )


def output_error(out: Path, error: OSError) -> OutputError:
    """One line for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{out}: no space left on the device while writing; nothing of it was left there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(f"{out}: writing in {out.parent} is not permitted ({error.strerror})")
    return OutputError(f"{out}: cannot be written: {error.strerror or error}")
