"""llama.cpp through xllamacpp as a peer on the same file, in a process of its own that speaks JSON lines."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edgellm_models.errors import EngineError, UsageError

_ANSWER = "ANSWER "
_CHILD = Path(__file__).with_name("llama_cpp_process.py")


@dataclass(frozen=True)
class PeerRun:
    """One answer of llama.cpp, by its own clock."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prompt_tokens: int
    new_tokens: int


class LlamaCppPeer:
    """A GGUF file loaded by llama.cpp on the CPU with the defaults of its own users."""

    def __init__(self, path: Path, *, context: int, threads: int) -> None:
        """UsageError where xllamacpp is not installed or the model is no GGUF file."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise UsageError(
                "--against llama.cpp needs xllamacpp, which is not installed: pip install xllamacpp"
            )
        if path.is_dir() or path.suffix != ".gguf":
            raise UsageError(f"--against llama.cpp needs a GGUF file, which {path} is not")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD), str(path), str(context), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.description: dict[str, Any] = self._read()
        except BaseException:
            self.close()
            raise

    def run(self, token_ids: Sequence[int], new_tokens: int) -> PeerRun:
        """Greedy, without its prompt cache."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([list(token_ids), new_tokens]) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._dead() from None
        return PeerRun(**self._read())

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> LlamaCppPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(_ANSWER):
                return json.loads(line[len(_ANSWER) :])
        raise self._dead()

    def _dead(self) -> EngineError:
        status = self._process.wait()
        self._log.seek(0)
        words = self._log.read(1 << 20).decode(errors="replace").strip().splitlines()[-1:]
        return EngineError(f"llama.cpp ended with status {status} before it answered: {' '.join(words)}")
