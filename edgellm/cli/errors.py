"""From an exception to one line on standard error and the exit code that belongs to it."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
import traceback
from typing import TextIO

import click

from edgellm.log import log_error
from edgellm_models.errors import EdgeLLMError, OutputError, UsageError

INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141
"""As a shell reports a program that SIGPIPE ended."""
EXIT_CODES = {
    0: "done",
    1: "a fault of edgellm, whose traceback lies in the log folder; `doctor`: something is in the way",
    2: "the command line makes no sense",
    65: "an input file, schema or value is damaged, of another kind or not supported; `complete --input`: a "
    "line failed",
    66: "a model or file that was named does not exist",
    69: "an address or socket is in use, or a server cannot be reached",
    70: "the engine failed while computing",
    71: "no usable device, or not enough memory",
    73: "an output cannot be written, or something is there already: nothing is left under its name",
    74: "reading or the network failed; what was fetched is kept for a resume",
    77: "not permitted to the user or key",
    78: "a configuration file or an EDGELLM_ variable is wrong",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "whoever read the output went away",
    TERMINATED: "ended by SIGTERM",
}
"""Every exit code of every command and when it comes. For people: docs/cli.md shows it."""

_UNWRITABLE = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "no space left in the quota",
    errno.EFBIG: "the file would grow over its limit",
    errno.EBADF: "standard output is not open for writing",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class Terminated(BaseException):
    """SIGTERM arrived; unwinds so that children end and files are closed."""


def one_line(text: str) -> str:
    """Names and messages from files and servers, without line breaks and control characters."""
    return _CONTROL.sub(" ", text).strip()


def report(error: BaseException) -> int:
    """Tells the user what went wrong and returns the exit code."""
    if isinstance(error, KeyboardInterrupt | click.Abort | Terminated):
        for note in getattr(error, "__notes__", ()):  # what a command has to say of its end
            _say(note)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    if isinstance(error, BrokenPipeError):
        silence_streams()
        return BROKEN_PIPE
    if isinstance(error, EdgeLLMError):
        _say(str(error))
        if not isinstance(error, UsageError):  # a slip on the command line is not worth a line in the log
            log_error(error.exit_code, str(error))
        return error.exit_code
    if isinstance(error, click.UsageError) and type(error).__name__ == "NoArgsIsHelpError":
        _write(sys.stderr, error.format_message() + "\n")  # the help, as it is (Click 8.2 and later)
        return error.exit_code
    if isinstance(error, click.UsageError):
        help_line = f" (try '{error.ctx.command_path} --help')" if error.ctx is not None else ""
        _say(error.format_message() + help_line)
        return error.exit_code
    if isinstance(error, click.ClickException):
        _say(error.format_message())
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
        _say(f"cannot write the output: {_UNWRITABLE[error.errno]}")
        silence(sys.stdout)  # what it still buffers would fail again at the end, and say so once more
        return OutputError.exit_code
    kind = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    log_error(1, f"unexpected {kind}")
    _say(f"unexpected {kind[:500]}; {_keep_traceback(error)}")
    return 1


def silence_streams() -> None:
    """Points the standard streams at nothing, so that the interpreter's last flush does not complain."""
    silence(sys.stdout)
    silence(sys.stderr)


def silence(stream: TextIO | None) -> None:
    """Points one standard stream at nothing; what it still holds is lost."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return
    finally:
        os.close(devnull)


def tell(text: str) -> None:
    """Text for people on standard error. One that cannot take it never stops a command."""
    _write(sys.stderr, text)


def _keep_traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        from edgellm.locations import Locations

        locations = Locations.from_environment()
        folder = locations.ensure(locations.logs)
        path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.write_text(text, encoding="utf-8", errors="replace")
    except (OSError, EdgeLLMError):
        _write(sys.stderr, text)
        return "the traceback is above, since the log folder cannot be written"
    return f"this is a fault of edgellm; the traceback is in {path}"


def _say(message: str) -> None:
    _write(sys.stderr, f"edgellm: {one_line(message)}\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except UnicodeEncodeError:
        _write(stream, text.encode("ascii", "backslashreplace").decode("ascii"))
    except (OSError, ValueError):
        silence(stream)  # else the interpreter's last flush fails, and with it the exit code
