"""Eight streams at once: our server beside llama.cpp's with eight slots, and beside our engine alone."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acceptance.harness import Figure, version
from tests.support.command_line import ROOT, command_environment
from tests.support.real_models import real_model

MODEL = os.environ.get("EDGELLM_TEST_SERVED_MODEL", "smollm2-135m")
STREAMS = int(os.environ.get("EDGELLM_TEST_SERVER_STREAMS", "8"))
TOKENS = int(os.environ.get("EDGELLM_TEST_SERVER_TOKENS", "64"))
PAIRS = int(os.environ.get("EDGELLM_TEST_SERVER_PAIRS", "3"))
CONTEXT = 512
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


def run() -> Iterator[Figure]:
    path = real_model(MODEL)
    threads = len(os.sched_getaffinity(0))
    arguments = ["serve", str(path), "--port", "0", "--json", "--threads", str(threads), "--ctx", "8192"]
    ours = _started([sys.executable, "-m", "edgellm", *arguments], lambda line: json.loads(line)["address"])
    peer_arguments = [str(path), str(STREAMS), str(CONTEXT), str(threads)]
    theirs = _started(
        [sys.executable, "-c", PEER, *peer_arguments],
        lambda line: line.removeprefix("ADDRESS ").strip() if line.startswith("ADDRESS ") else None,
    )
    try:
        speeds: dict[str, list[float]] = {"ours": [], "peer": [], "engine": []}
        firsts: dict[str, list[float]] = {"ours": [], "peer": []}
        servers = {"ours": ours[1], "peer": theirs[1]}
        for address in servers.values():
            asyncio.run(_streams(address, "warm", 4))
        for turn in range(PAIRS):
            for name in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
                speed, first = asyncio.run(_streams(servers[name], f"{turn}", TOKENS))
                speeds[name].append(speed)
                firsts[name].append(first)
    finally:
        for process, _ in (ours, theirs):
            process.terminate()
            process.wait(30)
    for _ in range(PAIRS):
        speeds["engine"].append(_engine_alone(path, threads))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    peer = f"llama-server of xllamacpp {version('xllamacpp')}, {STREAMS} slots: {medians['peer']:.1f} tok/s"
    detail = {"tokens_per_s": speeds, "first_token_s": firsts, "threads": threads}
    ratio = statistics.median(a / b for a, b in zip(speeds["ours"], speeds["peer"], strict=True))
    yield Figure(
        f"{MODEL}: {STREAMS} streams through the server, beside llama-server",
        ratio,
        f"times its tokens per second (ours {medians['ours']:.1f} tok/s)",
        "at least 1.2",
        ratio >= 1.2,
        peer,
        detail,
    )
    share = medians["ours"] / medians["engine"]
    yield Figure(
        f"{MODEL}: {STREAMS} streams through the server, beside the engine alone",
        share,
        f"of its tokens per second (engine {medians['engine']:.1f} tok/s)",
        "at least 0.9",
        share >= 0.9,
    )
    first = {name: statistics.median(values) for name, values in firsts.items()}
    yield Figure(
        f"{MODEL}: time to first token of {STREAMS} streams at once",
        first["ours"],
        "s, median over the streams",
        "not above the peer's",
        first["ours"] <= first["peer"],
        f"{peer.split(',')[0]}: {first['peer']:.2f} s",
    )


def _started(command: list[str], read: Any) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**command_environment(), "OMP_NUM_THREADS": ""},
    )
    assert process.stdout is not None
    for line in process.stdout:
        address = read(line)
        if address:
            return process, address
    raise RuntimeError(f"{command[:4]} ended with {process.wait()}")


def _prompt(stream: int, name: str) -> str:
    return f"Run {name}, stream {stream}: tell a long story of a lighthouse keeper and number {stream * 31}."


async def _streams(address: str, name: str, tokens: int) -> tuple[float, float]:
    """Tokens per second of all streams together, and the median time to the first token."""
    import httpx2

    firsts: list[float] = []
    counts: list[int] = []

    async def ask(client: Any, stream: int) -> None:
        body = {
            "messages": [{"role": "user", "content": _prompt(stream, name)}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first = time.monotonic(), None
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    counts.append(chunk["usage"]["completion_tokens"])
                if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                    first = time.monotonic() - begin
        firsts.append(first or 0.0)

    begin = time.monotonic()
    async with httpx2.AsyncClient(base_url=address, timeout=600) as client:
        await asyncio.gather(*(ask(client, stream) for stream in range(STREAMS)))
    spent = time.monotonic() - begin
    assert counts == [tokens] * STREAMS, counts
    return sum(counts) / spent, statistics.median(firsts)


def _engine_alone(path: Path, threads: int) -> float:
    """Tokens per second of the same requests without a server, in a process of its own."""
    code = (
        "import sys, time, json\n"
        "from acceptance import server_peer\n"
        "print(json.dumps(server_peer.engine_speed(sys.argv[1], int(sys.argv[2]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(threads)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**command_environment(), "OMP_NUM_THREADS": ""},
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def engine_speed(path: str, threads: int) -> float:
    """Tokens per second of the engine stepping through all streams' requests at once."""
    from edgellm.chat.request import build_request, chat_encoder
    from edgellm.cli.runtime import load_runtime
    from edgellm.config import EngineConfig
    from edgellm.contracts import ChatMessage, SamplingParams

    runtime = load_runtime(EngineConfig(threads=threads, ctx=8192).resolve(environ={}), Path(path), MODEL)
    encoder, _ = chat_encoder(runtime.tokenizer, runtime.load_templates(), model_name=MODEL)

    def once(name: str, tokens: int) -> float:
        begin = time.monotonic()
        for stream in range(STREAMS):
            messages = [ChatMessage("user", _prompt(stream, name))]
            sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
            built = build_request(encoder, messages, sampling, context_length=8192)
            runtime.core.submit(built.request)
        count = 0
        while runtime.core.has_work():
            count += sum(len(event.token_ids) for event in runtime.core.step())
        return count / (time.monotonic() - begin)

    once("warm", 4)
    return once("0", TOKENS)
