"""``--gpu-layers``: how many of a model's layers run on the GPU, and the model and its KV in two parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm_models.errors import BadInputError, Notice, ResourceError

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm_kernels.batch import KVStorage
    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec
    from edgellm_models.network.split_decoder import SplitDecoder

RESERVE_BYTES = 600_000_000
"""Of the card, for activations and logits."""
FALLBACK_CONTEXT = 4096
"""Tokens that auto keeps room for where no context was asked for."""


def parse_layers(asked: str) -> int | None:
    """N of ``--gpu-layers N``; None is auto. BadInputError for anything else."""
    if asked == "auto":
        return None
    if not re.fullmatch(r"[0-9]{1,4}", asked):
        raise BadInputError(f"--gpu-layers must be auto or a number of layers, 0 or more, not {asked!r}")
    return int(asked)


def layers_on_gpu(
    num_layers: int, layer_bytes: int, end_bytes: int, kv_layer_bytes: int, free_bytes: int
) -> int:
    """For auto: how many last layers fit on the card beside their KV, embedding, head and the reserve."""
    if layer_bytes + kv_layer_bytes <= 0:
        return num_layers
    room = free_bytes - RESERVE_BYTES - end_bytes
    return max(0, min(num_layers, room // (layer_bytes + kv_layer_bytes)))


def split_for(
    checkpoint: Checkpoint, asked: str, context: int | None, device: str, free_bytes: int | None
) -> tuple[int, Notice | None]:
    """The layers that stay on the CPU, from the first on, and what to say of it.

    Raises BadInputError for what is no number, ResourceError where layers are wanted on a GPU that is not
    there.
    """
    from edgellm_models.network import read_spec

    wanted = parse_layers(asked)
    if device != "cuda":
        if wanted:
            raise ResourceError(
                f"--gpu-layers {wanted}: the model runs on the CPU here; --device cuda needs a usable GPU, "
                "and --gpu-layers auto or 0 does without"
            )
        return 0, None
    infos = checkpoint.tensors()
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, infos)
    layers = spec.num_layers
    in_layers = sum(info.nbytes for name, info in infos.items() if name.startswith("blk."))
    ends = sum(info.nbytes for info in infos.values()) - in_layers
    if wanted is None:
        if free_bytes is None:
            return 0, None
        tokens = min(context or FALLBACK_CONTEXT, spec.context_length)
        kv_layer = tokens * 4 * spec.num_kv_heads * spec.head_dim  # K and V in bf16
        wanted = layers_on_gpu(layers, in_layers // layers, ends, kv_layer, free_bytes)
    here = layers - min(wanted, layers)
    if not here:
        return 0, None
    detail = (
        f"{layers - here} of {layers} layers run on the GPU, the first {here} on the CPU with KV in host "
        f"memory ({in_layers * (layers - here) // layers / 1e6:.0f} and "
        f"{in_layers * here // layers / 1e6:.0f} MB of weights)"
    )
    return here, Notice("gpu_layers", detail)


def build_split(
    checkpoint: Checkpoint,
    on_cpu: int,
    num_layers: int,
    devices: tuple[str, str] = ("cpu", "cuda"),
    kernels: tuple[str, str] = ("auto", "auto"),
) -> SplitDecoder:
    """The model with its first ``on_cpu`` layers on the first device, the others on the second, where a GPU
    multiplies in 16 bits unless torch computes."""
    import torch

    from edgellm_models.network.build import build_part
    from edgellm_models.network.split_decoder import SplitDecoder

    first = build_part(checkpoint, range(on_cpu), device=devices[0], kernels=kernels[0])
    dtype = torch.bfloat16 if devices[1] == "cuda" and kernels[1] != "torch" else torch.float32
    last = build_part(
        checkpoint, range(on_cpu, num_layers), device=devices[1], dtype=dtype, kernels=kernels[1]
    )
    return SplitDecoder(first, last)


def allocate_split(
    spec: ModelSpec,
    num_blocks: Sequence[int],
    kv: KVType,
    on_cpu: int,
    devices: tuple[str, str] = ("cpu", "cuda"),
) -> tuple[KVStorage, ...]:
    """The pages of each group where its layers are. BadInputError for int4, whose tail lies on one device."""
    from edgellm.cache.kv_storage import allocate_storage
    from edgellm_kernels.batch import split_storage

    if kv.has_tail:
        raise BadInputError("a KV cache of type int4 cannot lie on two devices: use int8, or --gpu-layers 0")
    ranges = range(on_cpu), range(on_cpu, spec.num_layers)
    parts = [
        allocate_storage(spec, num_blocks, kv, device, layers=layers)
        for device, layers in zip(devices, ranges, strict=True)
    ]
    return tuple(split_storage(group) for group in zip(*parts, strict=True))


def shared_room(free_gpu: int | None, free_cpu: int | None, on_cpu: int, num_layers: int) -> int | None:
    """Bytes that a cache of all layers may take when each device holds its own layers' share of it."""
    rooms = [
        free * num_layers // layers
        for free, layers in ((free_gpu, num_layers - on_cpu), (free_cpu, on_cpu))
        if free is not None and layers
    ]
    return min(rooms, default=None)
