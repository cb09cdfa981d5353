"""Dense twins of real models: dequantized and rescaled by factors that cancel, off the old grid.

Quantizing a dequantized file again is nearly lossless and proves nothing. The twin is the same function.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.network import read_spec
from edgellm_quantize.capture import STAGES
from edgellm_quantize.folding import fold_all, fold_width

LEAST, MOST = 0.8, 1.25


def twin_tensors(checkpoint: Checkpoint, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor that changes, f32 by canonical name.

    Norm gain against the linears behind it, v against the output projection, up against down, by random
    channel factors in [0.8, 1.25].
    """
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    rng = np.random.default_rng(seed)
    changed: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        factors = {
            stage: torch.from_numpy(rng.uniform(LEAST, MOST, fold_width(spec, stage)).astype(np.float32))
            for stage in STAGES
        }
        changed |= fold_all(checkpoint, spec, layer, factors)
    return changed


def write_twin_gguf(source: Path, out: Path, seed: int = 0) -> Path:
    """The twin of a GGUF file as a GGUF file of f32 tensors, all other metadata as in the source."""
    import gguf

    checkpoint = open_checkpoint(source)
    changed = twin_tensors(checkpoint, seed)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, checkpoint.architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, info in checkpoint.tensors().items():
        if name in changed:
            values = changed[name]
        elif len(info.shape) == 2:
            from edgellm_quantize.grids import dequantize

            values = dequantize(checkpoint.weight(name))
        else:
            values = checkpoint.vector(name)
        writer.add_tensor(name, values.reshape(info.shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint.close()
    return out
