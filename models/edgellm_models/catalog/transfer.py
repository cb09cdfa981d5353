"""What both kinds of source share: progress, cancelling, the stall watchdog, room on the disk."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.errors import Notice, OutputError, PullProgress, TransferError

RESUME = "run the same command to resume"
SPARE_BYTES = 16 << 20
"""Room that a pull leaves for everything else on the disk."""

# EFBIG is a limit of the process or file system; for the user it is the same as a full disk.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class PullCancelled(TransferError):
    """The caller asked to stop; what was fetched is kept."""


@dataclass
class Transfer:
    """One attempt to fetch a model from one source."""

    source: str
    on_progress: Callable[[PullProgress], None]
    on_notice: Callable[[Notice], None]
    cancelled: Callable[[], bool]
    stall_s: float
    total_bytes: int = 0
    """Set once, before the first byte; 0 is not known."""
    licence: str = ""
    """What the source itself states, which is remembered where the catalog knows none."""
    _done: int = 0

    def report(self, phase: str, done_bytes: int | None = None) -> None:
        """Tells the caller where the pull is. The count never falls and never exceeds the total."""
        if done_bytes is not None:
            self._done = max(self._done, done_bytes)
        if self.total_bytes:
            self._done = min(self._done, self.total_bytes)
        self.on_progress(PullProgress(self._done, self.total_bytes, self.source, phase))

    def check_cancelled(self) -> None:
        if self.cancelled():
            raise PullCancelled(f"the pull was cancelled; {RESUME}")


class StallWatch:
    """Notices that nothing has arrived for a while."""

    def __init__(self, limit_s: float, what: str) -> None:
        self._limit_s = limit_s
        self._what = what
        self._count = -1
        self._deadline = time.monotonic() + limit_s

    def saw(self, count: int) -> None:
        """``count`` bytes are here; a new count starts the time again."""
        if count != self._count:
            self._count = count
            self.extend(0.0)

    def extend(self, seconds: float) -> None:
        """A pause of this length is expected (the server asked to wait)."""
        self._deadline = time.monotonic() + self._limit_s + seconds

    def check(self) -> None:
        """TransferError when the time is over."""
        if time.monotonic() > self._deadline:
            raise TransferError(f"{self._what} stalled: nothing arrived for {self._limit_s:g} s; {RESUME}")


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """OutputError when the disk cannot take this much, before anything is fetched."""
    free = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_BYTES > free:
        raise OutputError(
            f"not enough room for {what}: {needed_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free "
            f"in {folder}; make room, or set EDGELLM_HOME to another disk"
        )


def disk_error(error: OSError, path: Path) -> OutputError:
    """What failed while writing, as an error for the user."""
    if error.errno in NO_ROOM:
        return OutputError(f"the disk is full while writing {path}; make room and {RESUME}")
    return OutputError(f"cannot write {path}: {error.strerror or error}")
