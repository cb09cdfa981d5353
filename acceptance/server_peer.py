"""Eight streams at once: our server beside llama.cpp's with eight slots, and beside our engine alone.

Everything is loaded once and takes turns. On a machine with other work, EDGELLM_TEST_SERVER_THREADS=1 and the
processor seconds are what compares: llama.cpp's threads wait for each other by spinning.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acceptance.harness import Figure, version
from tests.support.command_line import ROOT, command_environment
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
STREAMS = int(os.environ.get("EDGELLM_TEST_SERVER_STREAMS", "8"))
TOKENS = int(os.environ.get("EDGELLM_TEST_SERVER_TOKENS", "64"))
PAIRS = int(os.environ.get("EDGELLM_TEST_SERVER_PAIRS", "3"))
THREADS = int(os.environ.get("EDGELLM_TEST_SERVER_THREADS", "0")) or len(os.sched_getaffinity(0))
CONTEXT = 512
FIRST_TEXT = re.compile(rb'"content": ?"[^"]')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
PEER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
params.n_ctx, params.n_parallel, params.n_gpu_layers, params.fit_params = slots * context, slots, 0, False
params.cache_ram_mib = 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.verbosity = 0
server = xllamacpp.Server(params)
print("ADDRESS " + server.listening_address, flush=True)
sys.stdin.read()
"""


@dataclass
class Turn:
    """One run of all streams."""

    tokens_per_s: float
    """Of all streams together."""
    first_token_s: float
    """Median over the streams."""
    processor_s: float
    """Of the process that answers, per 1,000 tokens."""


@dataclass
class Contender:
    """A process that answers all streams, and what it did."""

    process: subprocess.Popen[str]
    ask: Callable[[str, int], tuple[float, float]]
    """Name of the run and tokens per stream to tokens per second and time to first token."""
    turns: list[Turn] = field(default_factory=list)

    def run(self, name: str, tokens: int) -> Turn:
        before = processor_seconds(self.process.pid)
        speed, first = self.ask(name, tokens)
        spent = processor_seconds(self.process.pid) - before
        return Turn(speed, first, 1000 * spent / (STREAMS * tokens))

    def median(self, of: str) -> float:
        return statistics.median(getattr(turn, of) for turn in self.turns)


def run() -> Iterator[Figure]:
    path = real_model(MODEL)
    contenders: dict[str, Contender] = {}
    try:
        for spec in ("auto", "off"):
            contenders[f"server, --spec {spec}"] = _server(path, spec)
            contenders[f"engine, --spec {spec}"] = _engine(path, spec)
        contenders["peer"] = _peer(path)
        for contender in contenders.values():
            contender.run("warm", 4)
        for turn in range(PAIRS):
            names = list(contenders)
            for name in names if turn % 2 == 0 else reversed(names):
                contenders[name].turns.append(contenders[name].run(f"{turn}", TOKENS))
    finally:
        for contender in contenders.values():
            contender.process.terminate()
            contender.process.wait(30)
    for spec in ("auto", "off"):
        yield from _figures(contenders, spec)


def _figures(contenders: dict[str, Contender], spec: str) -> Iterator[Figure]:
    ours, engine, peer = (contenders[n] for n in (f"server, --spec {spec}", f"engine, --spec {spec}", "peer"))
    words = f"llama-server of xllamacpp {version('xllamacpp')}, {STREAMS} slots"
    title = f"{MODEL}, --spec {spec}, {THREADS} threads: {STREAMS} streams through the server"
    detail = {
        name: [vars(turn) for turn in contender.turns]
        for name, contender in (("server", ours), ("engine", engine), ("peer", peer))
    }
    ratio = _ratio(ours, peer, "tokens_per_s")
    yield Figure(
        f"{title}, beside llama-server",
        ratio,
        f"times its tokens per second (ours {ours.median('tokens_per_s'):.1f} tok/s)",
        "at least 1.2",
        ratio >= 1.2,
        f"{words}: {peer.median('tokens_per_s'):.1f} tok/s",
        detail,
    )
    share = _ratio(ours, engine, "tokens_per_s")
    yield Figure(
        f"{title}, beside the engine alone",
        share,
        f"of its tokens per second (engine {engine.median('tokens_per_s'):.1f} tok/s)",
        "at least 0.9",
        share >= 0.9,
    )
    first, theirs = ours.median("first_token_s"), peer.median("first_token_s")
    yield Figure(
        f"{title}, time to first token",
        first,
        f"s, median over the streams (engine alone {engine.median('first_token_s'):.2f} s)",
        "not above the peer's",
        first <= theirs,
        f"{words}: {theirs:.2f} s",
    )
    yield Figure(
        f"{title}, processor time beside llama-server",
        _ratio(peer, ours, "processor_s"),
        f"times less (ours {ours.median('processor_s'):.2f} s per 1,000 tokens, "
        f"engine alone {engine.median('processor_s'):.2f} s)",
        "none",
        True,
        f"{words}: {peer.median('processor_s'):.2f} s",
    )


def _ratio(above: Contender, below: Contender, of: str) -> float:
    pairs = zip(above.turns, below.turns, strict=True)
    return statistics.median(getattr(a, of) / getattr(b, of) for a, b in pairs)


# --- the three kinds ---


def _server(path: Path, spec: str) -> Contender:
    options = ["--threads", str(THREADS), "--ctx", "8192", "--spec", spec]
    command = [sys.executable, "-m", "edgellm", "serve", str(path), "--port", "0", "--json", *options]
    process, address = started(command, lambda line: json.loads(line)["address"])
    return Contender(process, lambda name, tokens: asyncio.run(ask_streams(address, name, tokens)))


def _peer(path: Path) -> Contender:
    command = [sys.executable, "-c", PEER, str(path), *(str(n) for n in (STREAMS, CONTEXT, THREADS))]
    process, address = started(
        command, lambda line: line.removeprefix("ADDRESS ").strip() if line.startswith("ADDRESS ") else None
    )
    return Contender(process, lambda name, tokens: asyncio.run(ask_streams(address, name, tokens)))


def _engine(path: Path, spec: str) -> Contender:
    """The same requests without a server, in a process of its own."""
    code = "import sys\nfrom acceptance import server_peer\nserver_peer.engine_loop(*sys.argv[1:])\n"
    process, _ = started([sys.executable, "-c", code, str(path), spec], lambda line: line)

    def ask(name: str, tokens: int) -> tuple[float, float]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([name, tokens]) + "\n")
        process.stdin.flush()
        speed, first = json.loads(process.stdout.readline())
        return speed, first

    return Contender(process, ask)


def started(command: list[str], read: Any) -> tuple[subprocess.Popen[str], str]:
    """A process that is ready, and what ``read`` made of the line that says so."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**command_environment(), "OMP_NUM_THREADS": str(THREADS)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        address = read(line)
        if address:
            return process, address
    raise RuntimeError(f"{command[:4]} ended with {process.wait()}")


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, since it began."""
    line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = line.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _prompt(stream: int, name: str) -> str:
    return f"Run {name}, stream {stream}: tell a long story of a lighthouse keeper and number {stream * 31}."


async def ask_streams(address: str, name: str, tokens: int, streams: int = STREAMS) -> tuple[float, float]:
    """Tokens per second of all streams together, and the median time to the first token.

    The client reads bytes and little else: it shares the processor with what is measured.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")

    async def ask(stream: int) -> tuple[float, int]:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": _prompt(stream, name)}],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        begin, first, data = time.monotonic(), None, bytearray()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        while found := await reader.read(1 << 16):
            data += found
            if first is None and FIRST_TEXT.search(data):
                first = time.monotonic() - begin
        writer.close()
        counts = COMPLETION_TOKENS.findall(data)
        if first is None or not counts or int(counts[-1]) != tokens:
            raise RuntimeError(f"{address}: not {tokens} tokens: {bytes(data[-400:])!r}")
        return first, int(counts[-1])

    begin = time.monotonic()
    answers = await asyncio.gather(*(ask(stream) for stream in range(streams)))
    spent = time.monotonic() - begin
    return sum(count for _, count in answers) / spent, statistics.median(first for first, _ in answers)


def engine_loop(path: str, spec: str) -> None:
    """Answers lines of [name, tokens] with [tokens per second, time to first token] of all streams' requests,
    stepped at once."""
    from edgellm.chat.request import build_request, chat_encoder
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from edgellm.contracts import ChatMessage, SamplingParams

    settings = EngineConfig(threads=THREADS, ctx=8192, spec=spec).resolve(environ={})
    runtime = load_runtime(settings, Path(path), MODEL)
    encoder, _ = chat_encoder(runtime.tokenizer, runtime.load_templates(), model_name=MODEL)
    print("ready", flush=True)
    for line in sys.stdin:
        name, tokens = json.loads(line)
        begin = time.monotonic()
        for stream in range(STREAMS):
            messages = [ChatMessage("user", _prompt(stream, name))]
            sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
            built = build_request(encoder, messages, sampling, context_length=8192)
            runtime.core.submit(built.request)
        firsts: dict[str, float] = {}
        count = 0
        while runtime.core.has_work():
            for event in runtime.core.step():
                count += len(event.token_ids)
                if event.token_ids:
                    firsts.setdefault(event.request_id, time.monotonic() - begin)
        speed = count / (time.monotonic() - begin)
        print(json.dumps([speed, statistics.median(firsts.values())]), flush=True)
