"""A checkpoint with some tensors replaced: the model as it is after part of it was quantized or rescaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.checkpoint.reader import Checkpoint, TensorInfo
from edgellm_models.errors import Notice

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight, LinearPart


class OverlayCheckpoint:
    """Implements reader.Checkpoint: ``base`` with f32 tensors put over its own, in the base's conventions

    (row order, stored norm gains). ``replaced`` may be changed between reads; ``encoded`` does the same with
    matrices that are kept as blocks, an eighth of the memory.
    """

    def __init__(self, base: Checkpoint, replaced: dict[str, torch.Tensor] | None = None) -> None:
        self.base = base
        self.replaced = {} if replaced is None else replaced
        self.encoded: dict[str, BlockQuantWeight] = {}
        self.path: Path = base.path
        self.file_format: str = base.file_format
        self.architecture: str = base.architecture
        self.metadata: Mapping[str, Any] = base.metadata
        self.notices: Sequence[Notice] = base.notices
        self.file_bytes: int = base.file_bytes

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.base.tensors()

    def has(self, name: str) -> bool:
        return self.base.has(name)

    def weight(self, name: str) -> LinearPart:
        from edgellm_kernels.weights import DenseWeight

        if name in self.encoded:
            return self.encoded[name]
        found = self.replaced.get(name)
        return self.base.weight(name) if found is None else DenseWeight(found)

    def vector(self, name: str) -> torch.Tensor:
        found = self.replaced.get(name)
        return self.base.vector(name) if found is None else found

    def release_pages(self) -> None:
        self.base.release_pages()

    def close(self) -> None:
        self.base.close()
