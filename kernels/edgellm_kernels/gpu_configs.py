"""Launch sizes of the GPU kernels, as data per GPU in tuned/, and which kernel serves how many rows."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

DENSE_FROM_ROWS = 257
"""From so many rows on a weight is decoded once and multiplied by the library's own product."""
DOT_REGISTERS = 255
"""What ptxas may give a thread of the tensor-core product. Left alone it keeps to a rounder number and spills
a few, although shared memory bounds how many programs run at once."""
SPLIT_PROGRAMS = 256
"""A product of fewer programs than this is split along K, where K is long enough."""


def kernel_for_rows(rows: int) -> str:
    """gemv, dot16, dot32, dot64 or dense."""
    if rows <= 1:
        return "gemv"
    if rows >= DENSE_FROM_ROWS:
        return "dense"
    return "dot16" if rows <= 16 else "dot32" if rows <= 32 else "dot64"


def splits_of_k(programs: int, steps: int) -> int:
    """How many programs share the K of one product of ``steps`` loop steps: 1, 2, 4 or 8, none below 8 steps.

    From shapes alone: a result does not depend on the machine.
    """
    splits = 1
    while splits < 8 and programs * splits * 2 <= SPLIT_PROGRAMS and steps >= splits * 16:
        splits *= 2
    return splits


def file_name(gpu: str) -> str:
    """The tuned file of a GPU's name: lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


@functools.cache
def configurations(gpu: str = "") -> Mapping[str, Mapping[str, int]]:
    """Launch sizes by kernel: the defaults, and over them what was tuned for this GPU. Read once."""
    folder = resources.files("edgellm_kernels") / "tuned"
    found: dict[str, dict[str, int]] = json.loads((folder / "default.json").read_text(encoding="utf-8"))
    own = folder / file_name(gpu)
    if gpu and own.is_file():
        for kernel, sizes in json.loads(own.read_text(encoding="utf-8")).items():
            found[kernel] = {**found.get(kernel, {}), **sizes}
    return found


def sizes_of(found: Mapping[str, Mapping[str, int]], kernel: str, form: str) -> Mapping[str, int]:
    """The launch sizes of a kernel for one form of weights: those of "kernel form" go before "kernel"."""
    return {**found[kernel], **found.get(f"{kernel} {form}", {})}


def dot_sizes(
    found: Mapping[str, Mapping[str, int]], kernel: str, form: str, half: bool
) -> Mapping[str, int]:
    """Those of dot16, dot32 or dot64. Three tf32 products (not ``half``) need more registers than one in f16,
    so they may have sizes of their own.
    """
    own = f"{kernel}_f32"
    return sizes_of(found, kernel if half or own not in found else own, form)


@dataclass(frozen=True)
class AttentionTile:
    """How a program of the paged attention is cut."""

    rows: int
    """Queries times the heads that share keys."""
    keys: int
    """Keys of a step."""
    warps: int
    stages: int
    precision: str = "tf32"
    """Of the products. Pages of up to 16 bits are exact in tf32, which keeps 11 bits of q and the weights."""


def attention_tile(
    rows: int, head_dim: int, quantized: bool, exact: bool, hopper: bool = False, fp8: bool = False
) -> AttentionTile:
    """The tile for so many rows of a KV head; sizes that spill no register on any GPU that is checked.

    ``head_dim``: the larger of K's and V's. ``quantized``: int8 or fp8 pages. ``exact``: f32 compute.
    ``hopper``: compute capability 9, where four warps multiply 64 rows together. ``fp8``: among the pages are
    some of fp8, whose decoding takes registers that other sizes do not have.
    """
    if exact:
        if head_dim > 128:
            if fp8:
                return AttentionTile(16, 32, 8, 1, "ieee")
            return AttentionTile(16, 16, 4, 1, "ieee") if quantized else AttentionTile(16, 32, 8, 1, "ieee")
        # NOTE: of short heads ptxas spills with four warps: it keeps to 128 registers. So it does below.
        return AttentionTile(16, 16, 2 if head_dim <= 64 and not fp8 else 4, 1, "tf32x3")
    few = 16 if rows <= 16 else 32
    if head_dim > 128:
        # NOTE: of 32 rows ptxas spills with eight warps on sm_86, and over int8 pages with four on sm_90.
        return AttentionTile(few, 16, 8 if quantized and few == 32 else 4, 2)
    if rows > 32 and head_dim > 64 and hopper and fp8:
        return AttentionTile(32, 32, 4, 1)
    if rows > 32 and head_dim > 64 and hopper:
        return AttentionTile(64, 16, 4, 2)  # ptxas spills with eight warps, and with 32 keys of padded heads
    if rows > 32:
        return AttentionTile(64, 32, 8, 2)
    if head_dim > 64 or few == 32:
        return AttentionTile(few, 32, 4 if few == 16 or not quantized else 8, 1 if quantized else 2)
    if fp8:
        return AttentionTile(few, 32, 2, 1)
    return AttentionTile(few, 64, 4, 1) if quantized else AttentionTile(few, 64, 2, 2)
