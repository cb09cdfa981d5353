"""What a server is told when it starts: where it listens, who may come in, how much it takes on."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edgellm.contracts import Notice
from edgellm_models.errors import ConfigError, NotFoundError, UsageError

MAX_KEY_FILE_BYTES = 1 << 20
MAX_BODY_BYTES = 16 << 20
"""Of a request. The longest contexts in use have some megabytes of text."""

_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")


@dataclass(frozen=True)
class ServerSettings:
    """See the options of ``edgellm serve``. UsageError when they make no sense together."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 lets the system choose."""
    uds: Path | None = None
    """A unix socket instead of host and port."""
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    """``scheme://host[:port]`` or ``*``."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which the server may be addressed, beside the local ones and its own address."""
    insecure: bool = False
    queue: int = 64
    """Answers that may wait, beside those that run."""
    request_timeout_s: float | None = None
    grace_s: float = 10.0
    """How long open answers may go on after SIGTERM."""
    idle_unload_s: float | None = None
    strict: bool = False
    """Unknown fields of a request are refused."""
    parent_pid: int | None = None
    """The server ends when this process does."""
    chat_file: Callable[[str], Path] | None = None
    """Where the KV of a chat is kept, by its id; for the engine of one screen, else None."""
    access_log: bool = False
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be from 0 to 65535, not {self.port}")
        for name, value in (("--grace", self.grace_s), ("--queue", self.queue)):
            if value < 0:
                raise UsageError(f"{name} must be 0 or more, not {value}")
        for name, limit in (
            ("--request-timeout", self.request_timeout_s),
            ("--idle-unload", self.idle_unload_s),
        ):
            if limit is not None and limit <= 0:
                raise UsageError(f"{name} must be above 0 seconds, not {limit}")
        for origin in self.cors_origins:
            check_origin(origin)
        for name in self.allowed_hosts:
            if not (_NAME.fullmatch(name.lower()) or is_ip_literal(name)):
                raise UsageError(f"--allowed-host must be a host name without a port, not {name!r}")
        if self.uds is None and not (self.api_keys or self.insecure or is_loopback(self.host)):
            raise UsageError(
                f"--host {self.host} lets everyone who reaches this machine use the model; give "
                "--api-key-file FILE, or --insecure if that is what you want"
            )


def check_origin(origin: str) -> None:
    """UsageError unless it is what browsers send as Origin, or ``*``."""
    if origin == "*":
        return
    parts = urlsplit(origin)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        raise UsageError(
            f"--cors-origin must be like https://app.example or http://localhost:3000, not {origin!r}"
        )


def is_ip_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether listening there reaches this machine's own programs only. UsageError when there is no such
    host."""
    if is_ip_literal(host):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is neither an address nor a name that this machine knows") from None
    return all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


def read_api_keys(path: Path) -> tuple[tuple[str, ...], tuple[Notice, ...]]:
    """The keys of a file, one a line; empty lines and those that begin with # are none.

    A notice when others on this machine can read it. NotFoundError or ConfigError, never with a key in it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"--api-key-file {path} is not a file")
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"--api-key-file {path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is over {MAX_KEY_FILE_BYTES:,} bytes")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#") and not _KEY.fullmatch(line):
            raise ConfigError(
                f"--api-key-file {path}, line {number}: a key is 1 to 512 printable ASCII characters without "
                "spaces"
            )
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one a line")
    notices: tuple[Notice, ...] = ()
    if os.name == "posix" and mode & 0o077:
        notices = (
            Notice(
                "api_keys_exposed",
                f"other users of this machine may read or write {path} (mode {stat.S_IMODE(mode):04o}); "
                f"chmod 600 {path}",
            ),
        )
    return tuple(dict.fromkeys(keys)), notices
