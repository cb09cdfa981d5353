"""What goes where: data on standard output, words for people on standard error, progress on terminals."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgellm.cli.errors import one_line, tell
from edgellm.contracts import RequestTimings
from edgellm_models.errors import Notice, PullProgress

_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029]")


class Output:
    """The two streams of one command. Quiet drops what is for people; errors are not its business."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar = ""
        self._bar_time = 0.0
        self._bar_phase = ""

    def data(self, text: str) -> None:
        """A line of the command's result."""
        self.end_progress()
        _write_line(sys.stdout, text)

    def json(self, value: Any) -> None:
        """One JSON object on one line; the only thing on standard output under ``--json``."""
        self.end_progress()
        _write_line(sys.stdout, json_line(value))

    def note(self, text: str) -> None:
        """A line for people."""
        if self.quiet:
            return
        self.end_progress()
        tell(one_line(text) + "\n")

    def notice(self, notice: Notice) -> None:
        """Something that was done differently from what was asked."""
        self.note(f"note: {notice.detail}")

    @property
    def shows_progress(self) -> bool:
        return not self.quiet and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"

    def progress(self, progress: PullProgress) -> None:
        """Redraws the line of a pull, at most ten times a second and phase."""
        if not self.shows_progress:
            return
        now = time.monotonic()
        if now - self._bar_time < 0.1 and progress.phase == self._bar_phase:
            return
        self._bar_time, self._bar_phase = now, progress.phase
        self._draw(progress_line(progress))

    def status(self, text: str) -> None:
        """Redraws the line of a long computation, on terminals only."""
        if self.shows_progress:
            self._draw(text)

    def _draw(self, text: str) -> None:
        # Only carriage return and spaces: also right where no escape sequence is understood.
        tell("\r" + text + " " * max(0, len(self._bar) - len(text)))
        self._bar = text

    def end_progress(self) -> None:
        """Leaves the progress line, so that other text starts on a line of its own."""
        if self._bar:
            tell("\n")
            self._bar = ""


def current_output() -> Output:
    """The output of the running command (quiet or not); one of its own outside of a command."""
    context = click.get_current_context(silent=True)
    root = context.find_root() if context is not None else None
    if root is None:
        return Output()
    if not isinstance(root.obj, Output):
        root.obj = Output()
    return root.obj


def progress_line(progress: PullProgress, width: int = 24) -> str:
    """``fetching  [######      ]  48 %  45.1 of 93.6 MB``; without a total only the bytes so far."""
    if progress.total_bytes <= 0:
        return f"{progress.phase:<10} {megabytes(progress.done_bytes)}"
    share = min(1.0, progress.done_bytes / progress.total_bytes)
    bar = "#" * int(share * width)
    done, total = progress.done_bytes / 1e6, megabytes(progress.total_bytes)
    return f"{progress.phase:<10} [{bar:<{width}}] {share:4.0%}  {done:.1f} of {total}"


def counted(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def megabytes(count: int) -> str:
    """Bytes for people, decimal as disks and downloads are counted."""
    if count < 1_000_000:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1_000_000_000 else f"{count / 1e9:.2f} GB"


def timings_report(timings: RequestTimings, load: Mapping[str, float]) -> dict[str, float]:
    """The ``timings`` of ``--json``, seconds and tokens per second; ``load`` adds what came before."""
    names = "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "queued_s", "prefill_s", "decode_s"
    return {name: getattr(timings, name) for name in names} | dict(load)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def json_line(value: Any) -> str:
    """A value as JSON on one line that is safe to show: DEL, C1 controls and line separators are escaped as
    C0 controls are; where standard output cannot take other characters, these are too.
    """
    data = plain(value)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(data, allow_nan=False).replace("\x7f", "\\u007f")
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plain(value: Any) -> Any:
    """Dataclasses, enums and paths as what JSON knows; numbers that JSON has no form for become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _write_line(stream: Any, text: str) -> None:
    try:
        stream.write(text + "\n")
    except UnicodeEncodeError:
        # A locale without the character, such as LANG=C: an escape beats a traceback.
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()
