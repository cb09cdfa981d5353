"""A tiny model in which chosen sub-layers do nothing, or next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_tiny


def make_with_dead(
    arch: str,
    folder: Path,
    *,
    num_layers: int,
    attention: Iterable[int],
    feed_forward: Iterable[int],
    scale: float = 0.0,
) -> Path:
    """The output projections of these sub-layers times ``scale``: 0 is dead, 0.01 nearly so."""
    path = make_tiny(arch, folder, num_hidden_layers=num_layers)
    file = path / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in attention]
    names += [f"model.layers.{i}.mlp.down_proj.weight" for i in feed_forward]
    for name in names:
        tensors[name] = tensors[name] * scale
    save_file(tensors, file, {"format": "pt"})
    return path


_SCALES = {"Q4_0": (18, 1), "Q4_1": (20, 2), "Q5_0": (22, 1), "Q5_1": (24, 2), "Q8_0": (34, 1)}
"""Bytes of a block, and how many f16 factors it begins with."""


def make_dead_gguf(
    source: Path,
    target: Path,
    *,
    attention: Iterable[int],
    feed_forward: Iterable[int],
    scale: float = 0.0,
) -> Path:
    """A copy of a GGUF file, the output projections of these sub-layers times ``scale``."""
    import numpy as np
    from gguf import GGUFReader

    names = {f"blk.{i}.attn_output.weight" for i in attention}
    names |= {f"blk.{i}.ffn_down.weight" for i in feed_forward}
    data = bytearray(source.read_bytes())
    found = [tensor for tensor in GGUFReader(source).tensors if tensor.name in names]
    assert len(found) == len(names)
    for tensor in found:
        size, factors = _SCALES[tensor.tensor_type.name]
        start = int(tensor.data_offset)
        blocks = np.frombuffer(data, np.uint8, int(tensor.n_bytes), start).reshape(-1, size)
        scales = blocks[:, : 2 * factors].copy().view(np.float16) * np.float16(scale)
        blocks[:, : 2 * factors] = scales.view(np.uint8)
    target.write_bytes(data)
    return target
