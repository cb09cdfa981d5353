"""A process of its own that talks to the Hugging Face Hub: it can be stopped at any moment, stalled or not.

Run by path, with no import of ours. One JSON object per line: orders on standard input, events on standard
output. It ends when its standard input does, so it never outlives a parent that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import re
import shutil
import sys
import threading
import time
from typing import Any

ATTEMPTS_WITHOUT_PROGRESS = 5
LONGEST_WAIT_S = 300.0
PIECE_BYTES = 64 << 10
"""What a cut can lose. The library keeps 10 MB in memory until they are whole: a lot on a slow line."""
REPORT_S = 0.1
_TRANSIENT = (408, 429, 500, 502, 503, 504)


def emit(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class LogForwarder(logging.Handler):
    """The library's warnings ("Rate limited. Waiting 30s") become events."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().split("\n")[0][:300]
        wait = re.search(r"Waiting ([\d.]+)\s*s", message)
        emit("log", message=message, wait_s=float(wait.group(1)) if wait else 0.0)


class CountingFile:
    """A binary file for ``http_get`` that reports what is written and refuses more than was announced."""

    def __init__(self, raw: Any, base: int, limit: int) -> None:
        self._raw = raw
        self._base = base
        self._limit = limit
        self._next = 0.0

    def write(self, data: bytes) -> int:
        if self._raw.tell() + len(data) > self._limit:
            raise OSError(f"the server sends more than the {self._limit} bytes that it announced")
        written = int(self._raw.write(data))
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_S
            emit("bytes", done=self._base + self._raw.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def list_files(order: dict[str, Any]) -> None:
    """Every file of the repository with size and checksum, from the hub or, offline, from its local cache."""
    from huggingface_hub import HfApi

    info = with_retries(
        lambda: HfApi().model_info(order["repo"], revision=order["revision"], files_metadata=True, timeout=30)
    )
    files = []
    for sibling in info.siblings or []:
        lfs = sibling.lfs
        files.append(
            {
                "name": sibling.rfilename,
                "size": lfs.size if lfs else sibling.size,
                "sha256": lfs.sha256 if lfs else None,
                "blob_id": sibling.blob_id,
            }
        )
    card = info.card_data
    licence = getattr(card, "license_name", None) or getattr(card, "license", None)
    emit("files", commit=info.sha, files=files, licence=licence if isinstance(licence, str) else None)


def list_cached(order: dict[str, Any]) -> None:
    """What the hub's own cache on this machine holds of the repository (for HF_HUB_OFFLINE)."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(order["repo"], revision=order["revision"], local_files_only=True)
    files = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            blob = os.path.basename(os.path.realpath(path))
            files.append(
                {
                    "name": os.path.relpath(path, folder).replace(os.sep, "/"),
                    "size": os.path.getsize(path),
                    # The cache names blobs by their ETag: SHA-256 of large files, git id of small ones.
                    "sha256": blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None,
                    "blob_id": blob if re.fullmatch(r"[0-9a-f]{40}", blob) else None,
                }
            )
    emit("files", commit=os.path.basename(folder), files=files, licence=None)


def fetch(order: dict[str, Any]) -> None:
    """Fetches the ordered files one after the other into ``*.part`` files that a later run goes on with."""
    done = 0
    for item in order["files"]:
        fetch_one(order, item, done)
        done += item["size"]
        emit("bytes", done=done)
    emit("done")


def fetch_one(order: dict[str, Any], item: dict[str, Any], base: int) -> None:
    from huggingface_hub import try_to_load_from_cache

    target, part = item["target"], item["part"]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.exists(target) and os.path.getsize(target) == item["size"]:
        return
    cached = try_to_load_from_cache(order["repo"], item["name"], revision=order["commit"])
    if isinstance(cached, str) and os.path.getsize(cached) == item["size"]:
        real = os.path.realpath(cached)
        try:
            os.link(real, part + ".link")
        except OSError:
            shutil.copyfile(real, part + ".link")
        os.replace(part + ".link", target)
        return
    download(order, item, part, base)
    os.replace(part, target)


def download(order: dict[str, Any], item: dict[str, Any], part: str, base: int) -> None:
    """GETs from where the ``.part`` file ends, again after cuts, until attempts bring nothing more."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(order["repo"], item["name"], revision=order["commit"])
    fruitless = 0
    while True:
        have = os.path.getsize(part) if os.path.exists(part) else 0
        if have > item["size"]:
            os.unlink(part)
            have = 0
        if have == item["size"]:
            return
        try:
            metadata = with_retries(lambda: get_hf_file_metadata(url, timeout=30))
            headers = build_hf_headers()
            if host_of(metadata.location) != host_of(url):
                # A signed address of a content network; the token must not leave the hub.
                headers.pop("authorization", None)
            emit("bytes", done=base + have)
            with open(part, "ab") as raw:
                raw.seek(have)
                http_get(
                    metadata.location,
                    CountingFile(raw, base, item["size"]),  # type: ignore[arg-type]
                    resume_size=have,
                    headers=headers,
                    expected_size=item["size"],
                )
                raw.flush()
                os.fsync(raw.fileno())
            return
        except Exception as error:
            grown = os.path.getsize(part) if os.path.exists(part) else 0
            fruitless = 0 if grown > have else fruitless + 1
            if not is_transient(error) or fruitless >= ATTEMPTS_WITHOUT_PROGRESS:
                raise
            wait = min(2.0**fruitless, 10.0) / 2
            emit(
                "log",
                message=f"{type(error).__name__}: {error}; going on from byte {grown}"[:300],
                wait_s=wait,
            )
            time.sleep(wait)


def with_retries(call: Any) -> Any:
    """Calls again after transient failures, waiting as the server asks or a little longer each time."""
    for attempt in range(ATTEMPTS_WITHOUT_PROGRESS):
        try:
            return call()
        except Exception as error:
            if not is_transient(error) or attempt == ATTEMPTS_WITHOUT_PROGRESS - 1:
                raise
            wait = retry_after(error)
            if wait is not None and wait > LONGEST_WAIT_S:
                raise
            wait = 0.5 * 2.0**attempt if wait is None else wait
            emit(
                "log", message=f"{error}".split("\n")[0][:200] + f"; trying again in {wait:g} s", wait_s=wait
            )
            time.sleep(wait)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    if "OfflineModeIsEnabled" in names:
        return False
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ConnectionError | TimeoutError)
    ):
        return False
    # By name: the HTTP library under huggingface_hub changes between its major versions.
    known = {
        "TransportError",
        "NetworkError",
        "TimeoutException",
        "ConnectionError",
        "TimeoutError",
        "ProtocolError",
    }
    return bool(names & known) or "Consistency check failed" in str(error)


def status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def retry_after(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None


def host_of(url: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url).netloc


def describe(error: BaseException) -> dict[str, Any]:
    """The kind of a failure, in words that the parent turns into its own errors."""
    names = {base.__name__ for base in type(error).__mro__}
    status = status_of(error)
    message = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    if "GatedRepoError" in names:
        kind = "gated"
    elif status in (401, 403) or "LocalTokenNotFoundError" in names:
        # The hub answers 401 for repositories that do not exist, too, and the library calls that "not found".
        kind = "gated" if status == 403 else "not_found_or_private"
    elif "OfflineModeIsEnabled" in names or "LocalEntryNotFoundError" in names:
        kind = "offline"
    elif "RevisionNotFoundError" in names or "EntryNotFoundError" in names or status == 404:
        kind = "not_found"
    elif status == 429:
        kind = "rate_limited"
        message += f" (Retry-After {retry_after(error):g} s)" if retry_after(error) is not None else ""
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind = "no_room"
    elif isinstance(error, PermissionError):
        kind = "not_writable"
    elif is_transient(error):
        kind = "network"
    else:
        kind = "other"
    return {"kind": kind, "message": message}


def read_orders(orders: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(3)  # the parent is gone


def main() -> None:
    from huggingface_hub import constants

    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=read_orders, args=(orders,), daemon=True).start()
    logger = logging.getLogger("huggingface_hub")
    logger.handlers[:] = [LogForwarder()]
    logger.propagate = False
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    operations = {"list": list_files, "list_cached": list_cached, "fetch": fetch}
    while True:
        order = orders.get()
        try:
            operations[order["op"]](order)
        except Exception as error:
            with contextlib.suppress(OSError):
                emit("error", **describe(error))


if __name__ == "__main__":
    main()
