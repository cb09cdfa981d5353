"""llama.cpp as the judge of GGUF files: tokenization and greedy ids, in a process of its own.

A file that makes llama.cpp abort ends only that process, and the test reads its last words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from edgellm.bench.json_child import ChildDiedError, JsonChild

_CHILD = Path(__file__).with_name("llama_cpp_process.py")


class LlamaCppError(Exception):
    """llama.cpp could not load the file or died; the message ends with its log."""


def require_llama_cpp() -> None:
    """Skip the test where llama.cpp is not installed; in CI a missing judge is a failure."""
    from tests.support.oracles import require_oracle

    require_oracle("xllamacpp")


class LlamaCpp:
    """A GGUF file loaded by llama.cpp on the CPU: one thread, f32 KV, no flash attention, no warm-up."""

    def __init__(self, path: Path, *, context: int = 1024, log: Path | None = None) -> None:
        self._child = JsonChild(
            [sys.executable, str(_CHILD), str(path), str(context)],
            log=log or path.with_suffix(".llama.log"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            self._take(self._child.read)
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
        self._child.close()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return self._take(lambda: self._child.ask([path, body]))

    def _take(self, read: Callable[[], Any]) -> Any:
        try:
            answer = read()
        except ChildDiedError as error:
            raise LlamaCppError(f"llama.cpp ended with status {error.status}\n{_tail(error.words)}") from None
        if "error" in answer:
            raise LlamaCppError(f"llama.cpp refused: {answer['error']}\n{_tail(self._child.last_words())}")
        return answer["value"]


def _tail(words: str) -> str:
    return "\n".join(words.splitlines()[-15:])
