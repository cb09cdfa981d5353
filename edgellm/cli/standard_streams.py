"""The standard streams as a process finds them: closed ones, and ones that cannot take every character."""

from __future__ import annotations

import codecs
import os
import sys

_ESCAPE = "edgellm_escape"


def occupy_streams() -> None:
    """Gives closed standard streams a descriptor, so that no file opened later gets theirs and what is meant
    for them. A closed standard error then takes and drops everything; ``sys.stdout`` stays None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the life of the process)


class EscapeWatch:
    """Lets standard output write as escapes what its encoding lacks, and remembers that it did."""

    def __init__(self) -> None:
        self.encoding = ""
        """The encoding that lacked a character; empty as long as none did."""
        codecs.register_error(_ESCAPE, self._escape)
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors=_ESCAPE)

    def _escape(self, error: UnicodeError) -> tuple[str | bytes, int]:
        if isinstance(error, UnicodeEncodeError):
            self.encoding = error.encoding
        return codecs.backslashreplace_errors(error)
