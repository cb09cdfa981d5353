"""What the chat screen costs: decoding with it beside decoding without, and an idle chat's processor time."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from acceptance.harness import ROOT, Figure
from acceptance.idle import processor_seconds
from tests.support.real_models import real_model

MODEL = "smollm2-135m"
QUESTION = "Write a long story about a lighthouse keeper, a storm and a ship."
TOKENS = 400
PAIRS = 5
IDLE_S = 20.0
ROOTS = [str(ROOT / part) for part in ("", "kernels", "models", "quantize", "tui")]
OPTIONS = ["--temp", "0", "--max-tokens", str(TOKENS)]


def environment(home: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(ROOTS), "EDGELLM_HOME": home, "TERM": "xterm-256color"}


class Terminal:
    """``edgellm chat`` in a terminal of its own, whose output is read and thrown away."""

    def __init__(self, arguments: Sequence[str], home: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgellm", "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment(home), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def read(self, seconds: float) -> None:
        """Takes what the program writes for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.seen = (self.seen + os.read(self.master, 65536))[-200_000:]

    def wait(self, text: bytes, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the screen never showed {text!r}")
            self.read(0.2)

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        self.write("\x11")  # Ctrl+Q
        end = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self.read(0.2)
            except OSError:  # the other end is closed
                break
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def start_server(home: str) -> tuple[subprocess.Popen[str], str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "serve", str(real_model(MODEL)), "--port", "0", "--json",
         "--spec", "off"],  # else later answers are looked up in earlier ones and end within a few steps
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(home),
    )  # fmt: skip
    assert server.stdout is not None
    ready = json.loads(server.stdout.readline())
    return server, str(ready.get("url") or ready["address"])


async def without_screen(address: str) -> float:
    """Tokens per second of one answer that nobody draws."""
    from edgellm.client.http_client import HttpClient
    from edgellm.contracts import ChatMessage, Finished, SamplingParams

    client = await HttpClient.connect(address)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS)
    rate = 0.0
    async for event in client.stream_chat("plain", [ChatMessage("user", QUESTION)], sampling):
        if isinstance(event, Finished):
            rate = event.timings.decode_tokens_per_s
    await client.close()
    return rate


def saved_rates(home: str) -> list[float]:
    """Of the answers in the history, the oldest first."""
    from edgellm.history.store import HistoryStore

    store = HistoryStore(next(Path(home).rglob("chats.db")))
    try:
        chats = sorted(store.list_chats(), key=lambda chat: chat.created)
        answers = [m for chat in chats for m in store.branch(chat.id) if m.timings is not None]
        return [m.timings.decode_tokens_per_s for m in answers if m.timings is not None]
    finally:
        store.close()


def with_screen(address: str, home: str) -> float:
    """Tokens per second of one answer that the screen shows while it is written."""
    terminal = Terminal(["--url", address, *OPTIONS], home)
    try:
        terminal.wait(b"Ask anything")
        terminal.read(2.0)
        before = len(saved_rates(home)) if list(Path(home).rglob("chats.db")) else 0
        terminal.write(QUESTION)
        terminal.read(1.0)
        terminal.write("\r")
        for _ in range(600):
            terminal.read(0.5)
            rates = saved_rates(home)
            if len(rates) > before and rates[-1] > 0:
                return rates[-1]
        raise RuntimeError("the answer never ended")
    finally:
        terminal.close()


def idle_share(home: str) -> float:
    """Of one core, over the screen and the engine that it started, at rest after an answer."""
    terminal = Terminal([str(real_model(MODEL)), *OPTIONS[:2], "--max-tokens", "16"], home)
    try:
        terminal.wait(b"Ask anything")
        terminal.read(2.0)
        terminal.write("Hello\r")
        terminal.read(30.0)  # the answer, layer skip's calibration, and until the cursor no longer blinks
        children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children")
        processes = [terminal.process.pid, *map(int, children.read_text(encoding="ascii").split())]
        begin, before = time.monotonic(), sum(map(processor_seconds, processes))
        terminal.read(IDLE_S)
        return (sum(map(processor_seconds, processes)) - before) / (time.monotonic() - begin)
    finally:
        terminal.close()


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as home:
        server, address = start_server(home)
        try:
            asyncio.run(without_screen(address))  # the first answer warms the engine
            plain, drawn = [], []
            for _ in range(PAIRS):
                plain.append(asyncio.run(without_screen(address)))
                drawn.append(with_screen(address, home))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
        ratio = statistics.median(b / a for a, b in zip(plain, drawn, strict=True))
        yield Figure(
            f"{MODEL}: decoding with the screen to decoding without", round(ratio, 3), "ratio",
            "at least 0.95", ratio >= 0.95,
            detail={"without": plain, "with": drawn, "load": os.getloadavg()[0]},
        )  # fmt: skip
        share = idle_share(home)
        yield Figure(
            f"{MODEL}: processor time of an idle chat, screen and engine", round(100 * share, 2),
            "% of a core", "under 1 %", share < 0.01, detail={"seconds": IDLE_S},
        )  # fmt: skip
