"""llama.cpp with slots, in a process of its own that also counts the processor time of what it answers.

Run as a file it is that process and imports nothing of ours: a line of JSON is a group of requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Answered:
    """What a group of requests took."""

    prefill_s: float
    """By llama.cpp's own clock, of the first request."""
    decode_s: float
    """The same, from its first token to its last."""
    processor_s: float
    """Of the whole process for the whole group."""
    wall_s: float


class LlamaCppServer:
    """A GGUF file loaded by llama.cpp on the CPU, otherwise with its own defaults."""

    def __init__(
        self, path: Path, *, context: int, threads: int, slots: int = 1, kv_type: str = "f16"
    ) -> None:
        """``context``: of each slot."""
        command = [sys.executable, "-I", __file__, str(path)]
        command += [str(n) for n in (context, threads, slots)] + [kv_type]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.description: dict[str, Any] = self._read()

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of the process, file pages included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, reuse: bool = False) -> Answered:
        """Greedy, all prompts at once. ``reuse``: a prompt that a slot holds is not read again."""
        assert self._process.stdin is not None
        line = json.dumps([[list(ids) for ids in prompts], new_tokens, reuse])
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return Answered(**self._read())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> LlamaCppServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}")


def serve(path: str, context: int, threads: int, slots: int, kv_type: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context * slots
    params.n_parallel = slots
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}")
    server = xllamacpp.Server(params)

    def ask(ids: list[int], new_tokens: int, reuse: bool, into: list[Any]) -> None:
        body = {
            "prompt": ids,
            "n_predict": new_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": reuse,
        }
        request = urllib.request.Request(
            server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            into.append(json.load(response)["timings"])

    def answer(value: Any) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    answer(
        {
            "system": " ".join(str(xllamacpp.get_system_info()).split()),
            "flash_attention": params.flash_attn_type.name.removeprefix("LLAMA_FLASH_ATTN_TYPE_").lower(),
            "kv_type": kv_type,
            "batch": params.n_batch,
            "ubatch": params.n_ubatch,
        }
    )
    for line in sys.stdin:
        prompts, new_tokens, reuse = json.loads(line)
        timings: list[Any] = []
        wall, processor = time.monotonic(), time.process_time()
        asking = [threading.Thread(target=ask, args=(ids, new_tokens, reuse, timings)) for ids in prompts]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        answer(
            {
                "prefill_s": timings[0]["prompt_ms"] / 1e3,
                "decode_s": timings[0]["predicted_ms"] / 1e3,
                "processor_s": time.process_time() - processor,
                "wall_s": time.monotonic() - wall,
            }
        )
    os._exit(0)  # the server's own shutdown is slow and nothing is left to save


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
