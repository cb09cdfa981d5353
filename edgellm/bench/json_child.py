"""A process that answers lines of JSON with lines of JSON: what it dies of ends no program but its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MARK = "ANSWER "
"""Before each answer: whatever else libraries print is passed over."""
_LAST_WORDS = 1 << 16
_END_S = 5.0


class ChildDiedError(Exception):
    """The process ended before it answered."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"ended with status {status} before it answered")
        self.status = status
        self.words = words
        """The end of what it wrote to standard error, whole lines."""


class JsonChild:
    """Started at once; ends when its standard input does, and is killed when it does not."""

    def __init__(
        self, command: Sequence[str], *, log: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """``log`` takes what it writes to standard error; None is a file that goes with the process."""
        # It lives as long as the process.
        self._log = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Any) -> Any:
        """The answer to ``question``. ChildDiedError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._dead() from None
        return self.read()

    def read(self) -> Any:
        """The next answer. ChildDiedError."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise self._dead()

    def last_words(self) -> str:
        """The end of what it has written to standard error."""
        end = self._log.seek(0, 2)
        self._log.seek(max(0, end - _LAST_WORDS))
        return self._log.read(_LAST_WORDS).decode(errors="replace").strip()

    def close(self) -> None:
        if self._log.closed:
            return
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):  # it died with something unread
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _dead(self) -> ChildDiedError:
        status = self._process.wait()
        return ChildDiedError(status, self.last_words())
