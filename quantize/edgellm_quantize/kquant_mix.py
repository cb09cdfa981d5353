"""Which tensor gets which type: llama-quantize's mixtures, fallbacks for odd shapes, the user's own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgellm_kernels.ggml_types import GGML_TYPES_BY_NAME
from edgellm_models.errors import Notice, UsageError
from edgellm_quantize.recipe import GGUF_DENSE_TYPES, GGUF_TYPES
from edgellm_quantize.sizes import size_change

FILE_TYPE_IDS = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10},
    **{"Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17},
    **{"Q6_K": 18, "Q2_K_S": 21, "BF16": 32},
}
"""general.file_type (llama.h, enum llama_ftype)."""
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Where rows are no whole number of blocks of 256."""
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj")
_SEVENTY_B = {"llama": 80, "qwen2": 80, "deci": 80}
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class ModelShape:
    """What the mixtures ask of a model."""

    architecture: str
    """general.architecture."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // max(1, self.num_kv_heads)

    @property
    def is_seventy_b(self) -> bool:
        """Eighty layers with grouped queries: llama.cpp's 70B class, whose attn_v is small."""
        layers = _SEVENTY_B.get(self.architecture)
        grouped = self.architecture != "llama" or self.num_heads != self.num_kv_heads
        return layers == self.num_layers and grouped


@dataclass(frozen=True)
class Fallback:
    """A tensor whose rows do not fit its type."""

    name: str
    wanted: str
    got: str
    columns: int
    extra_bytes: int
    """What the tensor takes beyond the bits of ``wanted``; negative where it takes less."""


@dataclass(frozen=True)
class Mixture:
    """The types of a file's tensors."""

    type_name: str
    tensors: dict[str, str]
    """Tensor name to type, in the order of the input."""
    fallbacks: tuple[Fallback, ...]
    overridden: tuple[str, ...]
    """Names that a pattern of the user's decided."""

    def notices(self) -> tuple[Notice, ...]:
        """The fallbacks in one sentence."""
        if not self.fallbacks:
            return ()
        kinds = Counter((entry.wanted, entry.got, entry.columns) for entry in self.fallbacks)
        parts = [
            f"{count} of {wanted} became {got} (rows of {columns})"
            for (wanted, got, columns), count in sorted(kinds.items())
        ]
        extra = sum(entry.extra_bytes for entry in self.fallbacks)
        detail = (
            f"{len(self.fallbacks)} of {len(self.tensors)} tensors have rows that are no multiple of their "
            f"type's block: {'; '.join(parts)}: {size_change(extra)}"
        )
        return (Notice("type_fallback", detail),)


def choose_types(
    type_name: str,
    tensors: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
    *,
    has_imatrix: bool = False,
    overrides: Sequence[tuple[str, str]] = (),
) -> Mixture:
    """Types of all tensors of a model, as llama-quantize gives them for ``type_name``.

    ``tensors`` maps GGUF names to shapes, outermost dimension first. ``overrides`` are (regular expression,
    type): the first that is found in a name decides, and such a tensor is not counted in the mixture's "every
    third layer". UsageError for a type that is not known. Source: llama.cpp, src/llama-quant.cpp.
    """
    if type_name not in GGUF_TYPES:
        raise UsageError(f"type {type_name!r} is not known; known are {', '.join(GGUF_TYPES)}")
    patterns = [(re.compile(pattern), kind) for pattern, kind in overrides]
    rules = _Rules(type_name, tensors, shape, has_imatrix)
    chosen: dict[str, str] = {}
    fallbacks: list[Fallback] = []
    overridden: list[str] = []
    for name in sorted(tensors, key=_layer_of):
        dims = tensors[name]
        if not is_quantized(name, dims):
            chosen[name] = "F32"
            continue
        kind = next((kind for pattern, kind in patterns if pattern.search(name)), None)
        if kind is not None:
            overridden.append(name)
        else:
            kind = rules.type_of(name)
        got = fitting_type(kind, dims[-1])
        if got != kind:
            extra = math.prod(dims) * (_bytes_per_weight(got) - _bytes_per_weight(kind))
            fallbacks.append(Fallback(name, kind, got, dims[-1], round(extra)))
        chosen[name] = got
    return Mixture(type_name, {name: chosen[name] for name in tensors}, tuple(fallbacks), tuple(overridden))


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor takes the file's type at all: matrices that are no norm, router or tiny table."""
    return len(shape) >= 2 and name.endswith("weight") and not any(part in name for part in _KEPT)


def fitting_type(kind: str, columns: int) -> str:
    """``kind``, or what llama-quantize takes in its place where rows of ``columns`` are not whole blocks."""
    if columns % GGML_TYPES_BY_NAME[kind].block_elements == 0:
        return kind
    smaller = _FALLBACKS.get(kind, kind)
    return smaller if columns % GGML_TYPES_BY_NAME[smaller].block_elements == 0 else "F16"


def _bytes_per_weight(kind: str) -> float:
    entry = GGML_TYPES_BY_NAME[kind]
    return entry.block_bytes / entry.block_elements


def _layer_of(name: str) -> int:
    match = _BLOCK.match(name)
    return int(match[1]) if match else -1


def _use_more_bits(index: int, count: int) -> bool:
    """The first and last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def default_type(type_name: str) -> str:
    """The type of a mixture's plain tensors: Q4_K of Q4_K_M."""
    if type_name in GGML_TYPES_BY_NAME:
        return type_name
    return type_name[: type_name.index("_K") + 2]


class _Rules:
    """The mixture of one model. Calls come in the order of the layers: attn_v and ffn_down are counted."""

    def __init__(
        self, mix: str, tensors: Mapping[str, tuple[int, ...]], shape: ModelShape, has_imatrix: bool
    ) -> None:
        self._mix = mix
        self._default = default_type(mix)
        self._tensors = tensors
        self._shape = shape
        self._has_imatrix = has_imatrix
        self._num_values = sum(_is_value(name) for name in tensors)
        self._values_seen = 0
        self._downs_seen = 0

    def type_of(self, name: str) -> str:
        """The type before the shape is looked at."""
        if self._mix in GGUF_DENSE_TYPES:
            return self._default
        if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in self._tensors):
            return self._head(self._tensors[name][-1])
        if _is_value(name):
            self._values_seen += 1
            return self._value(self._values_seen - 1)
        if "attn_k.weight" in name:
            return "Q8_0" if self._shape.num_experts == 8 else self._default
        if "ffn_down" in name:
            self._downs_seen += 1
            # Experts of a layer are several tensors: there the layer is read from the name.
            index = _layer_of(name) if self._shape.num_experts > 1 else self._downs_seen - 1
            return self._down(index)
        if "attn_output.weight" in name:
            return self._attention_output()
        return self._default

    def _head(self, columns: int) -> str:
        if self._default == "Q8_0" or columns % GGML_TYPES_BY_NAME[self._default].block_elements:
            return "Q8_0"
        return "Q6_K"

    def _value(self, index: int) -> str:
        mix, kind = self._mix, self._default
        grouped = self._shape.queries_per_kv >= 4
        if mix == "Q2_K":
            kind = "Q4_K" if grouped else "Q3_K"
        elif mix == "Q2_K_S" and grouped:
            kind = "Q4_K"
        elif mix == "Q3_K_M":
            kind = "Q5_K" if index < 2 else "Q4_K"
        elif mix == "Q3_K_L":
            kind = "Q5_K"
        elif mix in ("Q4_K_M", "Q5_K_M") and _use_more_bits(index, self._num_values):
            kind = "Q6_K"
        elif mix == "Q4_K_S" and index < 4:
            kind = "Q5_K"
        if self._shape.is_seventy_b and kind in ("Q3_K", "Q4_K"):
            kind = "Q5_K"
        return "Q8_0" if self._shape.num_experts == 8 else kind

    def _down(self, index: int) -> str:
        mix, layers = self._mix, self._shape.num_layers
        if mix == "Q2_K":
            return "Q3_K"
        if mix == "Q2_K_S" and index < layers // 8:
            return "Q4_K"
        if mix == "Q3_K_M":
            return "Q5_K" if index < layers // 16 else "Q4_K"
        if mix == "Q3_K_L":
            return "Q5_K"
        if mix in ("Q4_K_M", "Q5_K_M") and _use_more_bits(index, layers):
            return "Q6_K"
        if mix == "Q4_K_S" and index < layers // 8:
            return "Q5_K"
        if mix in ("Q4_0", "Q5_0") and self._has_imatrix and index < layers // 8:
            return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[mix]
        return self._default

    def _attention_output(self) -> str:
        if self._shape.num_experts == 8:
            raised = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
            return "Q5_K" if self._mix in raised else self._default
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(self._mix, self._default)


def _is_value(name: str) -> bool:
    """attn_v, or what holds it: the fused q, k and v, and latent attention's kv_b."""
    return any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))
