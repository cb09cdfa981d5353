"""llama.cpp with slots, in a process of its own that also counts the processor time of what it answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.bench.json_child import JsonChild

_CHILD = Path(__file__).with_name("llama_cpp_slots.py")


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


class LlamaCppServer(JsonChild):
    """A GGUF file loaded by llama.cpp on the CPU, otherwise with its own defaults."""

    def __init__(
        self, path: Path, *, context: int, threads: int, slots: int = 1, kv_type: str = "f16"
    ) -> None:
        """``context``: of each slot."""
        numbers = [str(n) for n in (context, threads, slots)]
        super().__init__([sys.executable, "-I", str(_CHILD), str(path), *numbers, kv_type])
        self.description: dict[str, Any] = self.read()

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of the process, file pages included."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, reuse: bool = False) -> Answered:
        """Greedy, all prompts at once. ``reuse``: a prompt that a slot holds is not read again."""
        return Answered(**self.ask([[list(ids) for ids in prompts], new_tokens, reuse]))
