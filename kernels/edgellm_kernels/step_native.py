"""The step program of the native library: all layers and the head of a pass in one foreign call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from edgellm_kernels.batch import ForwardBatch, KVStorage
from edgellm_kernels.native_library import load_library
from edgellm_kernels.native_structs import (
    MAX_PARTS,
    STEP_OPS,
    Pages,
    StepCall,
    StepLayer,
    StepLinear,
    StepModel,
    StepRope,
    Tables,
    check_sizes,
    fill_pages,
    fill_rows,
    fill_tables,
)
from edgellm_kernels.native_threads import pool
from edgellm_kernels.weights import LinearWeight, NativeWeight, StackedWeight

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
SKIPS_ATTENTION, SKIPS_FEED_FORWARD = 1, 2
"""Bits of a layer in ``NativeStep.run``'s ``skipped``."""


class LayerTensors(Protocol):
    """One layer's weights by the names of the network's LayerWeights."""

    @property
    def attn_norm(self) -> torch.Tensor: ...
    @property
    def qkv(self) -> LinearWeight: ...
    @property
    def attn_output(self) -> LinearWeight: ...
    @property
    def ffn_norm(self) -> torch.Tensor: ...
    @property
    def gate_up(self) -> LinearWeight: ...
    @property
    def down(self) -> LinearWeight: ...
    @property
    def q_norm(self) -> torch.Tensor | None: ...
    @property
    def k_norm(self) -> torch.Tensor | None: ...
    @property
    def post_attention_norm(self) -> torch.Tensor | None: ...
    @property
    def post_ffn_norm(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class StepSpec:
    """What the program must know of a model besides its weights."""

    hidden: int
    heads: int
    ffn: int
    activation: str
    exact: bool
    """f32 activations in the linears."""
    eps: float
    query_scale: float
    softcap: float | None
    """Of attention scores."""
    embedding_scale: float
    ropes: tuple[tuple[torch.Tensor, float], ...]
    """Frequencies [pairs] and factor of each rope."""
    places: tuple[tuple[int, int, int, int | None], ...]
    """By layer: KV group, index within the group, rope, window."""


def _parts(weight: LinearWeight) -> tuple[NativeWeight, ...] | None:
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    packed = tuple(part for part in parts if isinstance(part, NativeWeight))
    return packed if len(packed) == len(parts) <= MAX_PARTS else None


def can_compile(layers: Sequence[LayerTensors], head: LinearWeight) -> bool:
    """Whether every weight is packed."""
    linears = [w for layer in layers for w in (layer.qkv, layer.attn_output, layer.gate_up, layer.down)]
    return load_library() is not None and all(_parts(weight) is not None for weight in (*linears, head))


def _linear(weight: LinearWeight) -> StepLinear:
    parts = _parts(weight)
    assert parts is not None, "can_compile was not asked"
    linear = StepLinear(parts=len(parts), k=parts[0].in_features)
    for index, part in enumerate(parts):
        linear.formats[index], linear.rows[index] = part.type_id, part.out_features
        linear.data[index] = part.data.data_ptr()
        linear.biases[index] = None if part.bias is None else part.bias.data_ptr()
        linear.orders[index] = None if part.order is None else part.order.data_ptr()
    return linear


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor.data_ptr()


class NativeStep:
    """A compiled program. Holds the weights whose addresses it uses."""

    def __init__(
        self,
        spec: StepSpec,
        layers: Sequence[LayerTensors],
        output_norm: torch.Tensor,
        head: LinearWeight,
        embedding: LinearWeight,
    ) -> None:
        library = load_library()
        assert library is not None, "compiled without a native library"
        check_sizes(library)
        self._library = library
        self.spec = spec
        self.vocab_size = head.shape[0]
        self.embeds = isinstance(embedding, NativeWeight)
        """Whether the program looks token ids up itself; otherwise it is given their rows."""
        self._keep = (tuple(layers), output_norm, head, embedding)
        made = (StepLayer * len(layers))()
        for layer, into, (group, _, rope, window) in zip(layers, made, spec.places, strict=True):
            for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm", "post_attention_norm", "post_ffn_norm"):
                setattr(into, name, _address(getattr(layer, name)))
            for name in ("qkv", "attn_output", "gate_up", "down"):
                setattr(into, name, _linear(getattr(layer, name)))
            into.group, into.rope, into.window = group, rope, window or 0
        ropes = (StepRope * len(spec.ropes))()
        for (frequencies, factor), into_rope in zip(spec.ropes, ropes, strict=True):
            into_rope.frequencies, into_rope.pairs = _address(frequencies), frequencies.shape[0]
            into_rope.factor = factor
        self.num_groups = 1 + max(group for group, *_ in spec.places)
        model = StepModel(
            layers=ctypes.addressof(made),
            ropes=ctypes.addressof(ropes),
            output_norm=_address(output_norm),
            head=_linear(head),
            num_layers=len(layers),
            num_ropes=len(ropes),
            num_groups=self.num_groups,
            hidden=spec.hidden,
            heads=spec.heads,
            ffn=spec.ffn,
            activation=_ACTIVATIONS[spec.activation],
            exact=int(spec.exact),
            eps=spec.eps,
            query_scale=spec.query_scale,
            softcap=spec.softcap or 0.0,
            embedding_scale=spec.embedding_scale,
        )
        if self.embeds:
            model.embedding = _linear(embedding)
        handle = ctypes.c_void_p()
        library.call("edgellm_step_new", ctypes.addressof(model), ctypes.addressof(handle))
        assert handle.value is not None
        self._step = handle.value
        weakref.finalize(self, library.call, "edgellm_step_delete", self._step)
        self._pages: tuple[tuple[KVStorage, ...], ctypes.Array[Pages]] | None = None

    def run(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVStorage],
        embedded: torch.Tensor | None = None,
        angles: Sequence[torch.Tensor | None] = (),
        *,
        with_logits: bool,
        skipped: bytes | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Logits [rows, vocab] of the batch's logit rows, or what goes into the head: the last sub-layer's
        output, not yet added, and the residual, [rows, hidden] each. K and V go into ``kv``.

        ``angles``: by rope, its frequencies [tokens, pairs] where they differ from token to token.
        ``skipped``: by layer, SKIPS_ATTENTION and SKIPS_FEED_FORWARD of what is left out; the first and the
        last layer stay whole.
        """
        tokens, rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        tables = (Tables * self.num_groups)()
        for group, into in zip(batch.groups, tables, strict=True):
            fill_tables(into, group)
            assert group.slot_mapping.shape[0] == tokens
        assert batch.token_ids.dtype == batch.logit_rows.dtype == torch.int64
        call = StepCall(
            token_ids=batch.token_ids.data_ptr(),
            embedded=None if embedded is None else _address(embedded),
            pages=ctypes.addressof(self._layer_pages(tuple(kv))),
            groups=ctypes.addressof(tables),
            logit_rows=batch.logit_rows.data_ptr(),
            num_logit_rows=rows,
        )
        if skipped is not None:
            assert len(skipped) == len(self.spec.places)
            call.skipped = ctypes.cast(ctypes.c_char_p(skipped), ctypes.c_void_p)
        fill_rows(call.rows, batch)
        assert call.rows.tokens == tokens and (self.embeds or embedded is not None)
        if any(own is not None for own in angles):
            addresses = (ctypes.c_void_p * len(angles))(*(_address(own) for own in angles))
            call.angles = ctypes.addressof(addresses)
        out: tuple[torch.Tensor, ...]
        if with_logits:
            out = (torch.empty((rows, self.vocab_size), dtype=torch.float32),)
            call.logits = out[0].data_ptr()
        else:
            out = tuple(torch.empty((2, rows, self.spec.hidden), dtype=torch.float32))
            call.last_x, call.last_residual = out[0].data_ptr(), out[1].data_ptr()
        self.call(ctypes.addressof(call))
        return out

    def call(self, address: int) -> None:
        """Runs the StepCall that lies there."""
        library = self._library
        library.call("edgellm_step_run", pool(library), self._step, address)

    def _layer_pages(self, kv: tuple[KVStorage, ...]) -> ctypes.Array[Pages]:
        """The pages of every layer, filled once for the storages that come again and again."""
        known = self._pages
        if known is not None and len(known[0]) == len(kv) and all(map(_same, known[0], kv)):
            return known[1]
        made = (Pages * len(self.spec.places))()
        for (group, index, _, _), into in zip(self.spec.places, made, strict=True):
            fill_pages(into, kv[group], index)
        self._pages = (kv, made)
        return made

    def take_seconds(self) -> dict[str, float]:
        """Seconds spent in each kind of op since the last call."""
        seconds = (ctypes.c_double * len(STEP_OPS))()
        self._library.call("edgellm_step_seconds", self._step, ctypes.addressof(seconds))
        return dict(zip(STEP_OPS, seconds, strict=True))


def _same(a: KVStorage, b: KVStorage) -> bool:
    return a is b


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits.max(dim=-1)`` of f32 rows: the largest value and its first place; NaN where there is one."""
    library = load_library()
    assert library is not None and logits.dtype == torch.float32
    logits = logits.contiguous()
    rows, n = logits.shape
    values, places = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    library.call(
        "edgellm_largest",
        pool(library),
        logits.data_ptr(),
        rows,
        n,
        values.data_ptr(),
        places.data_ptr(),
    )
    return values, places
