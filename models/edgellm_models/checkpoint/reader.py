"""What every reader of model files offers: metadata, tensor names and weights, without arithmetic on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgellm_models.errors import Notice

if TYPE_CHECKING:  # a header can be read, and `show` answered, without loading torch
    import torch

    from edgellm_kernels.weights import LinearPart


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file declares it."""

    name: str
    """The canonical name (see tensor_names.py), or the file's own where it has no canonical one."""
    file_name: str
    """The name inside the file."""
    shape: tuple[int, ...]
    """Outermost dimension first: [N, K] for a linear."""
    type_name: str
    """F32, F16, BF16, F8_E4M3, Q4_K, INT4 (an integer grid: GPTQ, AWQ) ..."""
    nbytes: int


def commonest_type(infos: Iterable[TensorInfo]) -> str | None:
    """The type that most weights of the matrices have; None without a matrix."""
    weights: Counter[str] = Counter()
    for info in infos:
        if len(info.shape) == 2:
            weights[info.type_name] += math.prod(info.shape)
    return max(weights, key=weights.__getitem__, default=None)


class Checkpoint(Protocol):
    """An opened model. Weights stay in the memory-mapped file until they are asked for."""

    path: Path
    """The file or folder that was opened."""
    file_format: str
    """``gguf`` or ``safetensors``."""
    architecture: str
    """Canonical family: llama, mistral, qwen2, qwen3, gemma2, gemma3 or phi3."""
    metadata: Mapping[str, Any]
    """GGUF: the key-value metadata with native Python values. Hugging Face: the parsed config.json."""
    notices: Sequence[Notice]
    """What was read differently from how it lies in the file."""
    file_bytes: int

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by canonical name."""
        ...

    def has(self, name: str) -> bool: ...

    def weight(self, name: str) -> LinearPart:
        """A 2-D weight in the form of the file, without bias. BadInputError names a missing tensor."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A norm gain, bias or factor table as f32, one dimension."""
        ...

    def release_pages(self) -> None:
        """Gives back the memory of what was read so far. Tensors stay valid: their pages are read again."""
        ...

    def close(self) -> None: ...
