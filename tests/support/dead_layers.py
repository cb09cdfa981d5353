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
