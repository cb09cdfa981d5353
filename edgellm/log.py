"""The log: what happens, by Python's ``logging``, and a bounded file of notices, errors and answers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.contracts import FinishReason, RequestTimings, Usage
    from edgellm_models.errors import Notice

FILE_NAME = "edgellm.log"
MAX_FILE_BYTES = 1 << 20
MAX_LINE = 2000

NOTICE, ANSWER, ERROR = (logging.getLogger(f"edgellm.{name}") for name in ("notice", "answer", "error"))
"""What the file is for. Other loggers below ``edgellm`` say what happens for -v."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def log_notice(notice: Notice) -> None:
    """One line for something that was done differently from what was asked."""
    NOTICE.info("%s: %s", notice.kind, notice.detail)


def log_answer(model: str, reason: FinishReason, usage: Usage, timings: RequestTimings) -> None:
    """One line for an answer: counts and times, never a word of the prompt or of the answer."""
    ANSWER.info(
        "model %s, %s, %d prompt tokens (%d cached), %d answer tokens, first after %.3f s, "
        "then %.1f tokens/s",
        model,
        reason.value,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        timings.ttft_s,
        timings.decode_tokens_per_s,
    )


def log_error(exit_code: int, text: str) -> None:
    """One line for an error, where anything listens; it has been said on standard error already."""
    if ERROR.hasHandlers():
        ERROR.error("exit %d: %s", exit_code, text)


def show_log(write: Callable[[str], None], *, everything: bool) -> None:
    """Sends the log to ``write``, a line at a time: edgellm's own or, on a debugging level, everyone's."""
    logger = logging.getLogger() if everything else logging.getLogger("edgellm")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines(write))
    logger.setLevel(logging.DEBUG if everything else logging.INFO)


@contextlib.contextmanager
def log_to_file() -> Iterator[None]:
    """Keeps the log's file while a command runs. The file and its folder are made by the first line."""
    logger, handler = logging.getLogger("edgellm"), _LogFile()
    levels = logger.level, logging.getLogger().level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for owner in (logger, logging.getLogger()):
            for shown in [h for h in owner.handlers if isinstance(h, _Lines)]:
                owner.removeHandler(shown)
        logger.setLevel(levels[0])
        logging.getLogger().setLevel(levels[1])


class _OneLine(logging.Formatter):
    """A record on one line without control characters, whatever a file's name or a server said."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(" ", super().format(record))[:MAX_LINE]


class _Lines(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(_OneLine())
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


class _LogFile(logging.Handler):
    """Appends to the log in the state folder; over its size it becomes ``.1`` and a new one begins.

    A log that cannot be written never stops a command: what fails here is dropped.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(_OneLine())

    def emit(self, record: logging.LogRecord) -> None:
        if record.name not in (NOTICE.name, ANSWER.name, ERROR.name):
            return
        with contextlib.suppress(Exception):
            from edgellm.locations import Locations

            locations = Locations.from_environment()
            path = locations.ensure(locations.logs) / FILE_NAME
            line = (self.format(record) + "\n").encode("utf-8", "replace")
            if path.exists() and path.stat().st_size + len(line) > MAX_FILE_BYTES:
                os.replace(path, path.with_name(FILE_NAME + ".1"))
            # For this user only. A pipe under this name must not hold the command up.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(path, flags, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
