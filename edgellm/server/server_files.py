"""One file per running server, for this user only: what ``ps``, ``stop`` and attaching read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgellm.locations import Locations
from edgellm_models.errors import OutputError

MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class ServerRecord:
    """A server as its file has it. No key is in it."""

    pid: int
    address: str
    """``http://host:port`` or ``unix:/path``, as HttpClient takes it."""
    model: str
    path: str = ""
    """Of the model."""
    api_key_file: str = ""
    """Where its keys are, when it wants one."""
    started: float = 0.0
    """Seconds since 1970."""
    process_start: str = ""
    """When the process began, as the system counts: another one may get its number."""
    version: str = ""

    @property
    def is_alive(self) -> bool:
        """The process runs, and is the one that wrote the file."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return False  # of another user, so not the one that wrote this user's file
        except (OSError, OverflowError):
            return False
        state, start = _process_facts(self.pid)
        return state != "Z" and (not self.process_start or start in ("", self.process_start))


def process_start(pid: int) -> str:
    """The start time of a process in clock ticks since boot; empty where the system does not say."""
    return _process_facts(pid)[1]


def _process_facts(pid: int) -> tuple[str, str]:
    """State and start time of a process as proc(5) has them; Z is one that ended and was not asked after."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    values = text.rpartition(")")[2].split()  # from field 3 on; the name before it may hold spaces
    return values[0], values[19]


def servers_folder(locations: Locations) -> Path:
    return locations.runtime / "servers"


def write_record(record: ServerRecord, locations: Locations) -> Path:
    """Writes the file of this process, mode 0600, whole or not at all. OutputError."""
    locations.ensure_runtime()
    folder = servers_folder(locations)
    path = folder / f"{record.pid}.json"
    temporary = folder / f".{record.pid}.tmp"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
    return path


def new_record(address: str, model: str, path: str, api_key_file: str, version: str) -> ServerRecord:
    """The record of this process."""
    pid = os.getpid()
    return ServerRecord(pid, address, model, path, api_key_file, time.time(), process_start(pid), version)


def read_records(locations: Locations) -> list[ServerRecord]:
    """The servers that run, oldest first. Files of processes that ended are removed."""
    found = []
    for path in sorted(servers_folder(locations).glob("*.json")):
        record = _read(path)
        if record is None:
            continue
        if record.is_alive:
            found.append(record)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda record: record.started)


def _read(path: Path) -> ServerRecord | None:
    """One file's record; None when it is none, which is left alone."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        values = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, Mapping) or path.stem != str(values.get("pid")):
        return None
    usual = ServerRecord(0, "", "")
    kept: dict[str, Any] = {}
    for f in fields(ServerRecord):
        value = values.get(f.name, getattr(usual, f.name))
        if f.name == "started" and isinstance(value, int):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, type(getattr(usual, f.name))):
            return None
        kept[f.name] = value
    return ServerRecord(**kept) if kept["pid"] > 0 else None
