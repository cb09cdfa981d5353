"""The hf source: fetches files of a hub repository through huggingface_hub, in a process of its own."""

from __future__ import annotations

import difflib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from edgellm_models.catalog.catalog import Entry, HubSource, load_catalog
from edgellm_models.catalog.hub_files import Choice, RemoteFile, choose_files
from edgellm_models.catalog.store import StoredFile
from edgellm_models.catalog.transfer import RESUME, StallWatch, Transfer, check_room
from edgellm_models.catalog.verify import git_blob_id, sha256_file
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    NotFoundError,
    Notice,
    OutputError,
    PermissionDeniedError,
    TransferError,
)

WORKER = Path(__file__).with_name("hub_worker.py")
MAX_FILE_BYTES = 50_000_000_000
"""The hub serves no larger file over plain HTTP, the only way that resumes between runs."""
MAX_LINE_CHARS = 32 << 20
_POLL_S = 0.2


def fetch_hub_files(
    entry: Entry, source: HubSource, partial: Path, ready: Path, transfer: Transfer
) -> tuple[list[StoredFile], str]:
    """Puts the files of the model into ``ready``, each checked; returns them and what to open.

    What was fetched stays in ``partial`` and ``ready`` for the next call. Errors: NotFoundError,
    PermissionDeniedError (gated, private), TransferError (network, stall, checksum), OutputError (no room),
    BadInputError (no model in there).
    """
    transfer.report("connecting", 0)
    with _worker() as worker:
        listing = _list(worker, source, transfer)
        files = [RemoteFile(f["name"], f["size"], f["sha256"], f["blob_id"]) for f in listing["files"]]
        choice = choose_files(source.repo, files, source.file)
        for notice in choice.notices:
            transfer.on_notice(notice)
        if listing.get("licence") and not entry.licence_url:
            transfer.licence = str(listing["licence"])
            transfer.on_notice(Notice("licence", f"licence of {entry.name}: {transfer.licence}"))
        sizes = _sizes(source, choice)
        _compare_with_catalog(entry, choice, source)
        transfer.total_bytes = sum(sizes)
        orders = [_order(file, size, partial, ready) for file, size in zip(choice.files, sizes, strict=True)]
        have = sum(_have(order) for order in orders)
        check_room(partial, max(0, transfer.total_bytes - have), entry.name)
        transfer.report("fetching", have)
        _forget_other_parts(partial, orders)
        worker.send(
            op="fetch", repo=source.repo, commit=listing["commit"], revision=source.revision, files=orders
        )
        for event in worker.events(transfer, source):
            if event["event"] == "done":
                break
    stored = []
    for file, size in zip(choice.files, sizes, strict=True):
        stored.append(_verified(file, size, ready / file.name, transfer))
    return stored, choice.main


def _list(worker: _Worker, source: HubSource, transfer: Transfer) -> dict[str, Any]:
    """The worker's list of files; where the hub cannot be reached, what its cache on this machine holds."""
    order = {"repo": source.repo, "revision": source.revision}
    try:
        worker.send(op="list", **order)
        return _files_event(worker, source, transfer)
    except _OfflineError as unreachable:
        worker.send(op="list_cached", **order)
        try:
            return _files_event(worker, source, transfer)
        except TransferError:
            raise unreachable from None


def _files_event(worker: _Worker, source: HubSource, transfer: Transfer) -> dict[str, Any]:
    return next(event for event in worker.events(transfer, source) if event["event"] == "files")


def _sizes(source: HubSource, choice: Choice) -> list[int]:
    sizes = []
    for file in choice.files:
        if not isinstance(file.size, int) or file.size < 0:
            raise TransferError(f"the hub states no size for {file.name} of hf:{source.repo}")
        if file.size > MAX_FILE_BYTES:
            raise BadInputError(
                f"{file.name} of hf:{source.repo} has {file.size / 1e9:.0f} GB; files over "
                f"{MAX_FILE_BYTES / 1e9:.0f} GB are not fetched: take a split or smaller one"
            )
        sizes.append(file.size)
    return sizes


def _compare_with_catalog(entry: Entry, choice: Choice, source: HubSource) -> None:
    """A file that is pinned in the catalog and differs on the hub is not worth fetching."""
    if entry.sha256 is None or len(choice.files) != 1:
        return
    stated = choice.files[0].sha256
    if stated is not None and stated != entry.sha256:
        raise TransferError(f"{source.label} has sha256 {stated}, but the catalog says {entry.sha256}")


def _order(file: RemoteFile, size: int, partial: Path, ready: Path) -> dict[str, Any]:
    # The part is named by the content's id: when the file changes on the hub, its old part is dropped.
    mark = (file.sha256 or file.blob_id or "unknown")[:40]
    part = partial / f"{file.name.replace('/', '--')}.{mark}.part"
    return {"name": file.name, "size": size, "target": str(ready / file.name), "part": str(part)}


def _have(order: dict[str, Any]) -> int:
    for place in (order["target"], order["part"]):
        if os.path.exists(place):
            return min(os.path.getsize(place), int(order["size"]))
    return 0


def _forget_other_parts(partial: Path, orders: list[dict[str, Any]]) -> None:
    wanted = {order["part"] for order in orders}
    for path in partial.glob("*.part"):
        if str(path) not in wanted:
            path.unlink(missing_ok=True)


def _verified(file: RemoteFile, size: int, path: Path, transfer: Transfer) -> StoredFile:
    """Checks the stated checksum; a file that fails is thrown away, so the next run fetches it afresh."""
    transfer.report("verifying")

    def look(count: int) -> None:
        transfer.check_cancelled()
        transfer.report("verifying")

    if path.stat().st_size != size:
        raise TransferError(f"{file.name} has {path.stat().st_size:,} bytes instead of {size:,}; {RESUME}")
    sha256 = sha256_file(path, look)
    if file.sha256 is not None:
        right, found, stated = sha256 == file.sha256, sha256, file.sha256
    elif file.blob_id is not None:
        found = git_blob_id(path)
        right, stated = found == file.blob_id, file.blob_id
    else:
        raise TransferError(f"the hub states no checksum for {file.name}, so it cannot be checked")
    if not right:
        path.unlink(missing_ok=True)
        raise TransferError(
            f"{file.name} has checksum {found}, but the hub states {stated}; it was thrown away, "
            "since it is damaged or was changed: run the same command to fetch it again"
        )
    return StoredFile(file.name, size, sha256)


class _OfflineError(TransferError):
    """HF_HUB_OFFLINE is set, or nothing answers."""


class _Worker:
    """The other process: orders in, events out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin: IO[str] = process.stdin
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def send(self, **order: Any) -> None:
        try:
            self._stdin.write(json.dumps(order) + "\n")
            self._stdin.flush()
        except OSError:
            raise TransferError("the process that talks to the hub has ended") from None

    def events(self, transfer: Transfer, source: HubSource) -> Iterator[dict[str, Any]]:
        """Events of the order in hand. Raises what went wrong, a stall, or PullCancelled."""
        watch = StallWatch(transfer.stall_s, f"the download of {source.label}")
        while True:
            transfer.check_cancelled()
            try:
                event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                watch.check()
                continue
            if event is None:
                code = self._process.wait()
                raise TransferError(f"the process that talks to the hub ended with code {code}; {RESUME}")
            kind = event.get("event")
            if kind == "error":
                raise _error(str(event.get("kind")), str(event.get("message")), source)
            if kind == "log":
                watch.extend(float(event.get("wait_s", 0.0)))
                transfer.on_notice(Notice("hub_message", f"hub: {event.get('message')}"))
            elif kind == "bytes":
                watch.saw(int(event["done"]))
                transfer.report("fetching", int(event["done"]))
            else:
                yield event

    def _read(self, stdout: IO[str]) -> None:
        while line := stdout.readline(MAX_LINE_CHARS):
            try:
                event = json.loads(line)
            except ValueError:
                continue  # something else printed
            if isinstance(event, dict):
                self._events.put(event)
        self._events.put(None)


@contextmanager
def _worker() -> Iterator[_Worker]:
    environment = {
        **os.environ,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env=environment,
        # Ctrl-C reaches this process only, which then ends the other one in order.
        start_new_session=os.name == "posix",
    )
    try:
        yield _Worker(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()


def _error(kind: str, message: str, source: HubSource) -> EdgeLLMError:
    repo = source.repo
    page = f"https://huggingface.co/{repo}"
    if kind == "gated":
        return PermissionDeniedError(
            f"hf:{repo} is gated: accept its terms on {page} and set HF_TOKEN (or run `hf auth login`)"
        )
    if kind == "not_found_or_private":
        return PermissionDeniedError(
            f"hf:{repo} does not exist, or is private or gated: check the name, accept its terms on {page}, "
            f"and set HF_TOKEN (or run `hf auth login`){_nearest_repo(repo)}"
        )
    if kind == "not_found":
        return NotFoundError(f"the hub has no {source.label}{_nearest_repo(repo)} ({message})")
    if kind == "offline":
        return _OfflineError(f"HF_HUB_OFFLINE is set and {source.label} is not in the hub's local cache")
    if kind == "network":
        return _OfflineError(f"fetching {source.label} failed: {message}; {RESUME}")
    if kind == "rate_limited":
        return TransferError(
            f"the hub asks to slow down: {message}; a token (HF_TOKEN) has a higher limit; {RESUME}"
        )
    if kind == "no_room":
        return OutputError(
            f"the disk is full while fetching {source.label}; make room and {RESUME} ({message})"
        )
    if kind == "not_writable":
        return OutputError(f"cannot write while fetching {source.label} ({message})")
    return TransferError(f"fetching {source.label} failed: {message}; {RESUME}")


def _nearest_repo(repo: str) -> str:
    known = [s.repo for entry in load_catalog().values() for s in entry.sources if isinstance(s, HubSource)]
    near = difflib.get_close_matches(repo, known, n=3, cutoff=0.6)
    return f"; nearest in the catalog: {', '.join('hf:' + name for name in near)}" if near else ""
