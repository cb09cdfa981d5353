"""A child process whose output a test reads in parts: nothing waits in a buffer that communicate() skips."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def start_child(arguments: Sequence[str], *, cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """The process, without standard input. Its pipes are unbuffered: ``communicate`` reads the descriptor, so
    what a buffered read had taken beyond its count would be lost.
    """
    return subprocess.Popen(
        arguments,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=env,
    )


def read_exactly(process: subprocess.Popen[bytes], count: int) -> bytes:
    """The next ``count`` bytes of its output; AssertionError when it ends before."""
    assert process.stdout is not None
    found = b""
    while len(found) < count:
        part = process.stdout.read(count - len(found))
        assert part, f"the output ended after {found!r}"
        found += part
    return found
