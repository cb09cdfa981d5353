"""GPTQ, AWQ and compressed-tensors folders written and read by the published formulas, one code at a time.

Nothing of the project is used: this is the other side of every test of its readers and writers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Grid:
    """One linear on an integer grid, and the f32 values that it stands for."""

    codes: np.ndarray
    """[N, K]"""
    scales: np.ndarray
    """[N, groups] f16"""
    zeros: np.ndarray
    """[N, groups]"""
    index: np.ndarray
    """[K]: group of each column."""

    @property
    def values(self) -> np.ndarray:
        steps = self.codes.astype(np.int64) - self.zeros.astype(np.int64)[:, self.index]
        return (self.scales.astype(np.float64)[:, self.index] * steps).astype(np.float32)


def make_grid(
    weight: np.ndarray, bits: int, group: int, *, asym: bool, shuffled: bool = False, least_zero: int = 0
) -> Grid:
    """Round to nearest; with ``shuffled`` the groups are drawn from all columns (act-order)."""
    rows, columns = weight.shape
    index = np.arange(columns) // group
    if shuffled:
        index = np.random.default_rng(columns).permutation(index)
    groups, top = index.max() + 1, (1 << bits) - 1
    scales, zeros = np.zeros((rows, groups)), np.zeros((rows, groups), dtype=np.int64)
    for g in range(groups):
        part = weight[:, index == g].astype(np.float64)
        if asym:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = np.maximum((high - low) / top, 1e-6)
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g]), least_zero, top)
        else:
            scales[:, g] = np.maximum(2 * np.abs(part).max(1) / top, 1e-6)
            zeros[:, g] = 1 << (bits - 1)
    halves = scales.astype(np.float16)
    codes = np.rint(weight / halves.astype(np.float64)[:, index]) + zeros[:, index]
    return Grid(np.clip(codes, 0, top).astype(np.int64), halves, zeros, index)


def _stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """One row of codes as words: code i begins at bit i * bits."""
    whole = 0
    for place, code in enumerate(codes.tolist()):
        whole |= int(code) << (place * bits)
    words = len(codes) * bits // 32
    return np.array([whole >> (32 * i) & 0xFFFFFFFF for i in range(words)], dtype=np.uint32)


def _unstream(words: np.ndarray, bits: int) -> np.ndarray:
    whole = sum(int(word) << (32 * i) for i, word in enumerate(words.tolist()))
    return np.array([whole >> (bits * i) & ((1 << bits) - 1) for i in range(32 * len(words) // bits)])


def _rows(matrix: np.ndarray, function: Any, bits: int) -> np.ndarray:
    return np.stack([function(row, bits) for row in matrix])


def _tensor(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32))


def gptq_tensors(
    stem: str, grid: Grid, bits: int, *, version: int, with_index: bool = True
) -> dict[str, torch.Tensor]:
    """v1 takes one off every zero point (so none may be 0), v2 stores them."""
    stored = grid.zeros - (1 if version == 1 else 0)
    assert stored.min() >= 0
    tensors = {
        f"{stem}.qweight": _tensor(_rows(grid.codes, _stream, bits).T),
        f"{stem}.qzeros": _tensor(_rows(stored.T, _stream, bits)),
        f"{stem}.scales": torch.from_numpy(np.ascontiguousarray(grid.scales.T)),
    }
    if with_index:
        tensors[f"{stem}.g_idx"] = torch.from_numpy(grid.index.astype(np.int32))
    return tensors


def gptq_values(tensors: dict[str, torch.Tensor], stem: str, bits: int, *, version: int) -> np.ndarray:
    """[N, K]: W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])."""
    codes = _rows(tensors[f"{stem}.qweight"].numpy().view(np.uint32).T, _unstream, bits)
    zeros = _rows(tensors[f"{stem}.qzeros"].numpy().view(np.uint32), _unstream, bits)
    zeros = zeros + (1 if version == 1 else 0)
    index = tensors[f"{stem}.g_idx"].numpy()
    scales = tensors[f"{stem}.scales"].numpy().T
    return Grid(codes, scales, zeros.T, index).values


def awq_tensors(stem: str, grid: Grid) -> dict[str, torch.Tensor]:
    def pack(matrix: np.ndarray) -> torch.Tensor:  # [rows, N] -> [rows, N / 8]
        words = np.zeros((matrix.shape[0], matrix.shape[1] // 8), dtype=np.uint32)
        for word in range(words.shape[1]):
            for nibble, column in enumerate(AWQ_ORDER):
                words[:, word] |= matrix[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * nibble)
        return _tensor(words)

    return {
        f"{stem}.qweight": pack(grid.codes.T),
        f"{stem}.qzeros": pack(grid.zeros.T),
        f"{stem}.scales": torch.from_numpy(np.ascontiguousarray(grid.scales.T)),
    }


def awq_values(tensors: dict[str, torch.Tensor], stem: str, group: int) -> np.ndarray:
    def unpack(words: np.ndarray) -> np.ndarray:
        out = np.zeros((words.shape[0], words.shape[1] * 8), dtype=np.int64)
        for word in range(words.shape[1]):
            for nibble, column in enumerate(AWQ_ORDER):
                out[:, 8 * word + column] = (words[:, word] >> np.uint32(4 * nibble)) & 15
        return out

    codes = unpack(tensors[f"{stem}.qweight"].numpy().view(np.uint32)).T
    zeros = unpack(tensors[f"{stem}.qzeros"].numpy().view(np.uint32)).T
    scales = tensors[f"{stem}.scales"].numpy().T
    return Grid(codes, scales, zeros, np.arange(codes.shape[1]) // group).values


def compressed_tensors(stem: str, grid: Grid, bits: int, *, asym: bool) -> dict[str, torch.Tensor]:
    columns = grid.codes.shape[1]
    assert columns * bits % 32 == 0
    tensors = {
        f"{stem}.weight_packed": _tensor(_rows(grid.codes, _stream, bits)),
        f"{stem}.weight_scale": torch.from_numpy(grid.scales),
        f"{stem}.weight_shape": torch.tensor(grid.codes.shape, dtype=torch.int64),
    }
    if asym:
        tensors[f"{stem}.weight_zero_point"] = _tensor(_rows(grid.zeros.T, _stream, bits).T)
    return tensors


def compressed_values(tensors: dict[str, torch.Tensor], stem: str, bits: int) -> np.ndarray:
    rows, columns = tensors[f"{stem}.weight_shape"].tolist()
    codes = _rows(tensors[f"{stem}.weight_packed"].numpy().view(np.uint32), _unstream, bits)[:, :columns]
    scales = tensors[f"{stem}.weight_scale"].numpy()
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if f"{stem}.weight_zero_point" in tensors:
        packed = tensors[f"{stem}.weight_zero_point"].numpy().view(np.uint32).T
        zeros = _rows(packed, _unstream, bits).T[:rows]
    return Grid(codes, scales, zeros, np.arange(columns) // (columns // scales.shape[1])).values


def is_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every shard."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def pack_folder(folder: Path, section: dict[str, Any], make: Any, **grid: Any) -> dict[str, np.ndarray]:
    """Replace a dense folder's linears by packed ones; returns the f32 values that each now stands for.

    ``make(stem, grid)`` gives the tensors of a linear; ``grid`` are arguments of make_grid.
    """
    dense = all_tensors(folder)
    tensors, values = {}, {}
    for name, tensor in dense.items():
        if not is_linear(name):
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        made = make_grid(tensor.float().numpy(), **grid)
        values[name] = made.values
        tensors |= make(stem, made)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return values
