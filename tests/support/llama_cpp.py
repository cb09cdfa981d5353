"""llama.cpp as the judge of GGUF files: tokenization and greedy ids, in a process of its own.

A file that makes llama.cpp abort ends only that process, and the test reads its last words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_START_S = 60.0


class LlamaCppError(Exception):
    """llama.cpp could not load the file or died; the message ends with its log."""


def require_llama_cpp() -> None:
    """Skip the test where llama.cpp is not installed; in CI a missing judge is a failure."""
    from tests.support.oracles import require_oracle

    require_oracle("xllamacpp")


class LlamaCpp:
    """A GGUF file loaded by llama.cpp on the CPU: one thread, f32 KV, no flash attention, no warm-up."""

    def __init__(self, path: Path, *, context: int = 1024, log: Path | None = None) -> None:
        self._log = log or path.with_suffix(".llama.log")
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(path), str(context)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            self._read()
        except LlamaCppError:
            self.close()
            raise

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self._ask("/tokenize", body)["tokens"])

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """``count`` greedy ids after ``token_ids``; end tokens do not stop it."""
        new: list[int] = []
        while len(new) < count:
            # An end token stops the answer; asked again it goes on ("ignore_eos" would forbid it).
            answer = self._complete([*token_ids, *new], count - len(new), 0)
            if not answer["tokens"]:
                break
            new += answer["tokens"]
        return new[:count]

    def top_logprobs(self, token_ids: Sequence[int], count: int = 10) -> list[tuple[int, float]]:
        """The best (id, log-probability) pairs for the token after ``token_ids``, best first.

        Empty where llama.cpp reports none: it holds a token back that ends inside a character.
        """
        steps = self._complete(token_ids, 1, count).get("completion_probabilities", [])
        return [(entry["id"], entry["logprob"]) for step in steps for entry in step["top_logprobs"]]

    def _complete(self, token_ids: Sequence[int], count: int, num_probs: int) -> Any:
        body = {
            "prompt": list(token_ids),
            "n_predict": count,
            "samplers": ["top_k"],
            "top_k": 1,
            "n_probs": num_probs,
            "return_tokens": True,
            "cache_prompt": False,
        }
        return self._ask("/completion", body)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([path, body]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("ANSWER "):
                answer = json.loads(line[7:])
                if "error" in answer:
                    raise LlamaCppError(f"llama.cpp refused: {answer['error']}\n{self._tail()}")
                return answer["value"]
        raise self._dead()

    def _dead(self) -> LlamaCppError:
        self._process.wait()
        return LlamaCppError(f"llama.cpp ended with status {self._process.returncode}\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def _serve(path: str, context: int) -> None:
    """The child: answer [path, body] lines from standard input."""
    import urllib.error
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_batch = params.n_ubatch = context
    params.n_parallel = 1
    params.warmup = False
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True
    params.verbosity = 1
    server = xllamacpp.Server(params)

    def post(route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            server.listening_address + route,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_START_S) as response:
            return json.load(response)

    def answer(value: dict[str, Any]) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    answer({"value": None})
    for line in sys.stdin:
        route, body = json.loads(line)
        try:
            answer({"value": post(route, body)})
        except urllib.error.HTTPError as error:
            answer({"error": error.read().decode(errors="replace")})
    # The server's own shutdown is slow and nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
