"""One pull or removal of a model at a time, over processes; a process that dies frees its lock."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from edgellm_models.errors import OutputError

_POLL_S = 0.2


@contextmanager
def model_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file ``path``; while another holds it, calls ``waiting`` often, which may raise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; is the models folder writable?") from None
    with file:
        while not _try_lock(file):
            waiting()
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            _unlock(file)


if os.name == "nt":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return False
            # ENOLCK, ENOTSUP: a file system without locks would otherwise be waited for without end.
            raise OutputError(
                f"cannot lock {file.name}: {error.strerror}; move EDGELLM_HOME to another file system"
            ) from None
        return True

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
