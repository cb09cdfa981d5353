"""The native library's functions on tensors, for any back end and number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from edgellm_kernels.ggml_blocks import dequantize
from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_kernels.native_library import (
    NativeLibrary,
    built_libraries,
    open_library,
    runnable_libraries,
    why_missing,
)
from edgellm_kernels.weights import BlockLayout

BLOCK_TYPES = [layout.value for layout in BlockLayout]
DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82)} | {
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where the f16 scales of a block lie, in bytes."""


def random_rows(type_name: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows as in a file: random codes and sub-scales, normal scales."""
    if type_name in DENSE_TYPES:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, k, generator=generator).to(DENSE_TYPES[type_name])
    generator = np.random.default_rng(seed)
    kind = GGML_TYPES_BY_NAME[type_name]
    blocks = generator.integers(0, 256, (n * (k // kind.block_elements), kind.block_bytes), dtype=np.uint8)
    for at in _HALVES[type_name]:
        scales = (generator.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(n, -1))


def decoded(type_name: str, rows: torch.Tensor, k: int) -> torch.Tensor:
    """f32 [N, K] by the torch decoders."""
    return rows.float() if type_name in DENSE_TYPES else dequantize(rows, BlockLayout[type_name], k)


@dataclass(frozen=True)
class Native:
    """One back end with a pool of its own."""

    library: NativeLibrary
    pool: int

    def pack(self, type_name: str, rows: torch.Tensor, n: int, k: int) -> torch.Tensor:
        kind = GGML_TYPES_BY_NAME[type_name]
        out = torch.empty(-(-n // 8) * 8 * kind.row_bytes(k), dtype=torch.uint8)
        arguments = (kind.type_id, rows.data_ptr(), n, k, out.data_ptr(), out.numel())
        self.library.call("edgellm_pack", self.pool, *arguments)
        return out

    def decode(self, type_name: str, packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
        ids, out = torch.arange(n), torch.empty(n, k)
        kind = GGML_TYPES_BY_NAME[type_name].type_id
        arguments = (kind, packed.data_ptr(), n, k, ids.data_ptr(), n, 1.0, out.data_ptr())
        self.library.call("edgellm_decode_rows", self.pool, *arguments)
        return out

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        rows, k = x.shape
        blocks = torch.empty(rows * k // 32 * 80, dtype=torch.uint8)
        self.library.call("edgellm_quantize", self.pool, x.data_ptr(), rows, k, blocks.data_ptr())
        return blocks

    def linear(
        self,
        type_name: str,
        packed: torch.Tensor,
        n: int,
        x: torch.Tensor,
        *,
        exact: bool = False,
        bias: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape[0], n)
        blocks = None if exact else self.quantize(x)
        self.library.call(
            "edgellm_linear",
            self.pool,
            GGML_TYPES_BY_NAME[type_name].type_id,
            packed.data_ptr(),
            n,
            x.shape[1],
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            None if blocks is None else blocks.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            n,
            None if add is None else add.data_ptr(),
        )
        return out


@contextmanager
def native(backend: str, threads: int = 1) -> Iterator[Native]:
    """A back end (see ``backends``) with a pool of ``threads``, which ends with the block."""
    built = built_libraries()
    assert backend in built, why_missing()
    library = open_library(built[backend])
    handle = ctypes.c_void_p()
    library.call("edgellm_pool_new", threads, ctypes.addressof(handle))
    assert handle.value is not None
    try:
        yield Native(library, handle.value)
    finally:
        library.call("edgellm_pool_delete", handle.value)


def backends() -> list[str]:
    """The back ends that this processor runs."""
    return list(runnable_libraries())
