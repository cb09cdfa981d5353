"""Claims the address of a server before anything is loaded: a TCP port or a unix socket of this user."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.errors import OutputError, PermissionDeniedError, UnavailableError, UsageError

BACKLOG = 512
MAX_UNIX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""The kernel's field has one more, for the NUL at its end."""


@dataclass
class ClaimedAddress:
    """A listening socket. ``release`` closes it and removes what was made for it."""

    socket: socket.socket
    url: str
    """``http://host:port`` or ``unix:/path``."""
    host: str
    """As it was asked for; empty for a unix socket."""
    uds: Path | None
    release: Callable[[], None]


def claim_tcp(host: str, port: int) -> ClaimedAddress:
    """Listens on a port. UnavailableError when another program does already, PermissionDeniedError."""
    bare = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is neither an address nor a name that this machine knows") from None
    # NOTE: asyncio sends small packets at once only on sockets that name their protocol. Without, an event of
    # a stream waits until the client's system acknowledges the one before, which takes it 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if os.name == "posix":
            # A port whose last connections the kernel remembers is free; Windows would share it.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(
                f"{host}:{port} is in use by another program; choose another --port (0 takes a free one), or "
                "see edgellm ps"
            ) from None
        if error.errno == errno.EACCES:
            raise PermissionDeniedError(
                f"this user may not listen on port {port}; choose one above 1023"
            ) from None
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listening.setblocking(False)
    shown = f"[{bare}]" if ":" in bare else bare
    return ClaimedAddress(
        listening, f"http://{shown}:{listening.getsockname()[1]}", bare, None, listening.close
    )


def claim_unix(path: Path) -> ClaimedAddress:
    """Listens on a socket file with mode 0600 in a folder of this user with mode 0700.

    A socket that a server of this user left behind is replaced; one that answers is UnavailableError, as is
    any other file. A lock beside it, which dies with its process, keeps two from replacing each other.
    """
    if not hasattr(socket, "AF_UNIX") or os.name != "posix":
        raise UsageError("--uds: this system has no unix sockets; use --host and --port")
    path = Path(os.path.abspath(path))
    length = len(os.fsencode(path))
    if length > MAX_UNIX_PATH_BYTES:
        raise UsageError(
            f"--uds {path} has {length} bytes; the path of a unix socket has at most {MAX_UNIX_PATH_BYTES}"
        )
    _private_folder(path.parent)
    lock = _lock(path)
    listening: socket.socket | None = None
    try:
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        inode = os.lstat(path)
    except OSError as error:
        os.close(lock)
        if listening is not None:
            listening.close()
        raise UnavailableError(f"cannot listen on {path}: {error.strerror}") from None
    except BaseException:
        os.close(lock)
        if listening is not None:
            listening.close()
        raise
    bound = listening

    def release() -> None:
        bound.close()
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) == (inode.st_dev, inode.st_ino):
                os.unlink(path)
        with contextlib.suppress(OSError):
            os.unlink(_lock_path(path))
        os.close(lock)

    return ClaimedAddress(bound, f"unix:{path}", "", path, release)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from None
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionDeniedError(
            f"the socket's folder {folder} must be a folder of this user with mode 0700, so that nobody else "
            "reaches or replaces the socket; name a path in a folder of its own, which will be made"
        )


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    """The descriptor of the locked file; UnavailableError when another server has it."""
    import fcntl

    while True:
        try:
            descriptor = os.open(
                _lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise UnavailableError(f"cannot lock {path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise UnavailableError(
                f"another server listens on {path} or is about to; see edgellm ps"
            ) from None
        # The one who had it may have removed the file between the two calls: then the lock protects nothing.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == os.lstat(_lock_path(path)).st_ino:
                return descriptor
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Removes a socket of this user that nobody listens on. UnavailableError for everything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise UnavailableError(f"{path} exists and is no socket of this user; it stays. Choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError:  # full, slow: somebody is there
            pass
    raise UnavailableError(f"another server answers on {path}; see edgellm ps")
