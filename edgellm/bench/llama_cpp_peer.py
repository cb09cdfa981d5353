"""llama.cpp through xllamacpp as a peer on the same file, in a process of its own that speaks JSON lines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edgellm.bench.json_child import ChildDiedError, JsonChild
from edgellm_models.errors import EngineError, UsageError

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
        self._child = JsonChild([sys.executable, "-I", str(_CHILD), str(path), str(context), str(threads)])
        try:
            self.description: dict[str, Any] = self._answer(self._child.read)
        except BaseException:
            self.close()
            raise

    def run(self, token_ids: Sequence[int], new_tokens: int) -> PeerRun:
        """Greedy, without its prompt cache."""
        return PeerRun(**self._answer(lambda: self._child.ask([list(token_ids), new_tokens])))

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> LlamaCppPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ChildDiedError as error:
            last = " ".join(error.words.splitlines()[-1:])
            raise EngineError(f"llama.cpp {error}: {last}") from None
