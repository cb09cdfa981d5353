"""The chat on a pseudo-terminal, as a person meets it: keys in, a screen out."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "models", "quantize", "tui"))


class Terminal:
    """``edgellm chat`` on a pseudo-terminal, with a screen that understands what it draws. Its model is
    scripted, unless ``module`` is edgellm itself."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        rows: int = 24,
        module: str = "tests.support.fake_chat",
        **extra: str | None,
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
        environment["TEXTUAL_ANIMATIONS"] = "none"
        for name, value in extra.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.process: Any = pexpect.spawn(
            sys.executable,
            ["-m", module, "chat", *arguments],
            cwd=str(ROOT),
            env=environment,
            dimensions=(rows, columns),
            timeout=30,
        )

    def read(self) -> None:
        """Feeds the screen what has come."""
        try:
            data = self.process.read_nonblocking(65536, timeout=0.05)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return
        self.raw += data
        # pyte takes private modes and kitty sequences that it does not know for text; drop them.
        self._stream.feed(re.sub(rb"\x1b\[[<>=?][0-9;]*[a-zA-Z$]*[puqhlmy]", self._keep_known, data))

    @staticmethod
    def _keep_known(found: re.Match[bytes]) -> bytes:
        return found[0] if re.fullmatch(rb"\x1b\[\?(25|1049)[hl]", found[0]) else b""

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, condition: Callable[[], object] | str, timeout_s: float = 60.0) -> None:
        """Reads until a text is on the screen or a condition holds."""
        wanted = condition
        check = (lambda: wanted in self.text) if isinstance(wanted, str) else wanted
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            if check():
                return
            assert time.monotonic() < deadline, f"never seen: {condition}\n{self.text}\n{self.raw[-2000:]!r}"

    def send(self, text: str) -> None:
        self.process.send(text)

    def end(self) -> int:
        """Waits for the end of the process and returns its exit code (or 128 + signal)."""
        deadline = time.monotonic() + 60
        while self.process.isalive():
            self.read()
            assert time.monotonic() < deadline, f"still running\n{self.text}"
        for _ in range(3):
            self.read()
        self.process.close()
        if self.process.exitstatus is None:
            return 128 + self.process.signalstatus
        return int(self.process.exitstatus)

    def resize(self, columns: int, rows: int) -> None:
        """As a person draws the window larger or smaller."""
        self.process.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def kill(self) -> None:
        self.process.close(force=True)
