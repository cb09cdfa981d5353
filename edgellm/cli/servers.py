"""``edgellm ps`` and ``edgellm stop``: the servers of this user, and the end of one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.errors import one_line
from edgellm.cli.options import json_option, option
from edgellm.cli.output import current_output

if TYPE_CHECKING:
    from edgellm.server.server_files import ServerRecord

ASK_TIMEOUT_S = 3.0


@click.command(cls=EdgeCommand, name="ps", examples=("edgellm ps", "edgellm ps --json"))
@json_option
def ps(as_json: bool) -> None:
    """List the servers that run, with what they do."""
    import asyncio

    records = _records()
    rows = asyncio.run(_rows(records))
    output = current_output()
    if as_json:
        output.json({"servers": rows})
        return
    lines: list[tuple[str, ...]] = [("PID", "MODEL", "ADDRESS", "STATE", "RUNNING", "WAITING", "FOR")]
    for row in rows:
        running, waiting = ("-" if row[key] is None else str(row[key]) for key in ("running", "waiting"))
        cells = (str(row["pid"]), row["model"], row["address"], row["state"], running, waiting)
        lines.append((*(one_line(cell) for cell in cells), _duration(row["uptime_s"])))
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    for line in lines:
        output.data("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@click.command(
    cls=EdgeCommand, name="stop", examples=("edgellm stop", "edgellm stop 4711", "edgellm stop --all")
)
@click.argument("pid", type=int, required=False, metavar="[PID]")
@option("--all", "stop_all", is_flag=True, help="Stop every server of this user.")
@option("--timeout", type=float, default=15.0, show_default=True, metavar="S", help="How long to wait.")
@json_option
def stop(pid: int | None, stop_all: bool, timeout: float, as_json: bool) -> None:
    """Stop a server; the only one needs no PID. Open answers may end first, as its --grace says."""
    from edgellm_models.errors import NotFoundError, UnavailableError, UsageError

    if pid is not None and stop_all:
        raise UsageError("give a PID or --all, not both")
    records = _records()
    if pid is not None:
        records = [record for record in records if record.pid == pid]
        if not records:
            raise NotFoundError(f"no server of this user has the PID {pid}; edgellm ps lists them")
    if not records and not stop_all:
        raise NotFoundError("no server of this user runs")
    if len(records) > 1 and not stop_all:
        pids = ", ".join(str(record.pid) for record in records)
        raise UsageError(f"several servers run ({pids}); name one, or --all")
    for record in records:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    end = time.monotonic() + timeout
    left = records
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [record for record in left if record.is_alive]
    output = current_output()
    if as_json:
        stopped = [record.pid for record in records if record not in left]
        output.json({"stopped": stopped, "running": [record.pid for record in left]})
    else:
        for record in records:
            if record not in left:
                output.data(f"stopped {record.pid} ({one_line(record.model)} at {one_line(record.address)})")
    if left:
        pids = ", ".join(str(record.pid) for record in left)
        raise UnavailableError(
            f"still running after {timeout:g} s: {pids}; its answers may take their --grace"
        )


def _records() -> list[ServerRecord]:
    from edgellm.locations import Locations
    from edgellm.server.server_files import read_records

    return read_records(Locations.from_environment())


async def _rows(records: list[ServerRecord]) -> list[dict[str, Any]]:
    import asyncio

    return list(await asyncio.gather(*(_row(record) for record in records)))


async def _row(record: ServerRecord) -> dict[str, Any]:
    """What a server says of itself; one that does not answer is still listed."""
    from edgellm.client.http_client import ask_status

    found = await ask_status(record.address, _key(record), ASK_TIMEOUT_S)
    return {
        "pid": record.pid,
        "model": record.model,
        "address": record.address,
        "state": found.state,
        "running": found.running,
        "waiting": found.waiting,
        "uptime_s": round(max(0.0, time.time() - record.started), 1),
        "path": record.path,
    }


def _key(record: ServerRecord) -> str | None:
    from pathlib import Path

    from edgellm.server.settings import read_api_keys
    from edgellm_models.errors import EdgeLLMError

    if not record.api_key_file:
        return None
    try:
        return read_api_keys(Path(record.api_key_file))[0][0]
    except EdgeLLMError:  # its state is known without a key
        return None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
