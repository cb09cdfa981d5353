"""What both kinds of metadata share: bounds, rules that every spec must meet, the check of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm_models.errors import BadInputError
from edgellm_models.network.spec import ModelSpec, TensorShape

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_FFN = 1 << 22
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 1 << 14
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MAX_FACTOR = 1e6
MIN_FACTOR = 1e-6
MAX_ROPE_BASE = 1e18


def check_layers_exist(num_layers: int, key: str, tensors: Mapping[str, TensorShape]) -> None:
    """A layer count that the file's tensors do not reach is found before anything of that size is made."""
    if not tensors:
        if num_layers > MAX_LAYERS:
            raise BadInputError(
                f"{key} is {num_layers}, more than the {MAX_LAYERS} layers that are supported"
            )
        return
    for layer in range(num_layers):
        name = f"blk.{layer}.attn_norm.weight"
        if name not in tensors:
            raise BadInputError(
                f"tensor {name} is missing: {key} says {num_layers} layers; the file is incomplete or damaged"
            )


def vocab_rows(tensors: Mapping[str, TensorShape]) -> int | None:
    """Rows of the embedding in the file; None where the file does not hold one."""
    info = tensors.get("token_embd.weight")
    return info.shape[0] if info is not None and len(info.shape) == 2 else None


def windows_by_layer(window: int | None, sliding: Sequence[bool]) -> list[int | None]:
    return [window if is_sliding else None for is_sliding in sliding]


def check_spec(spec: ModelSpec) -> ModelSpec:
    """Relations between the numbers; each number by itself was checked where it was read."""
    if spec.num_heads % spec.num_kv_heads:
        raise BadInputError(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads evenly"
        )
    for rope in spec.ropes:
        if not 2 <= rope.dims <= spec.head_dim or rope.dims % 2:
            raise BadInputError(
                f"rotary embedding over {rope.dims} elements does not fit heads of {spec.head_dim}: "
                "it must be an even number of at least 2"
            )
        if rope.scaling == "dynamic" and rope.dims < 4:
            raise BadInputError(f"dynamic rope scaling needs at least 4 rotated elements, not {rope.dims}")
        if rope.scaling in ("yarn", "llama3", "longrope", "dynamic") and (rope.original_context or 0) < 2:
            raise BadInputError(
                f"{rope.scaling} rope scaling needs an original context of 2 or more, not "
                f"{rope.original_context}"
            )
        if rope.scaling == "yarn" and rope.base <= 1:
            raise BadInputError(f"yarn rope scaling needs a base above 1, not {rope.base}")
    return spec
