"""From an opened checkpoint to a decoder: tensors checked against the spec, joined, in kernel form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from edgellm_kernels.ops import Kernels, KernelUnavailableError, load_kernels, native_missing
from edgellm_kernels.weights import (
    BlockQuantWeight,
    DenseWeight,
    IntWeight,
    LinearPart,
    LinearWeight,
    StackedWeight,
    prepare,
)
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.errors import BadInputError, Notice, ResourceError
from edgellm_models.network import read_spec
from edgellm_models.network.decoder import Decoder, DecoderWeights
from edgellm_models.network.hold import choose_hold, free_memory_bytes, give_back_memory
from edgellm_models.network.layers import LayerWeights
from edgellm_models.network.spec import ModelSpec, RopeSpec
from edgellm_models.network.spec_checks import MAX_FACTOR, MIN_FACTOR

_Made = TypeVar("_Made")
_HOLDS = ("auto", "native", "planes", "dense", "blocks")
_OWN_HOLDS = {"native": "native", "triton": "planes"}
"""The packed form that a backend's linears take; others take dense weights and blocks."""


def build_decoder(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    hold: str = "auto",
    kernels: str = "auto",
    activations: str = "auto",
) -> Decoder:
    """Load a model's weights, tensor by tensor: peak memory is the final size and one tensor.

    Args:
        dtype: what linears compute in, float32 or bfloat16. The residual stream is f32 in any case.
        hold: ``native`` and ``planes`` (packed for the native and the GPU kernels: the file's size),
            ``dense`` (decoded once), ``blocks`` (decoded at every call: slow, small) or ``auto``: what the
            kernels pack, else by the free memory. With dense or blocks, auto kernels are torch's.
        kernels: auto, torch, triton or native. activations: auto, exact, int16 or int8, see ops.load_kernels.

    Raises:
        BadInputError: the file lacks a tensor or one has another shape than the model's sizes ask for.
        ResourceError: the kernels are not available on the device, or the memory does not suffice.
    """
    if hold not in _HOLDS:
        raise ValueError(f"hold must be one of {', '.join(_HOLDS)}, not {hold!r}")
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    missing = ""
    if kernels == "auto":
        if hold in ("dense", "blocks"):
            kernels = "torch"
        elif torch.device(device).type == "cpu" and dtype == torch.float32:
            missing = native_missing()
    try:
        chosen = load_kernels(device, dtype, kernels, activations)
    except KernelUnavailableError as error:
        raise ResourceError(str(error)) from error
    loader = _Loader(checkpoint, spec, chosen)
    if missing:
        detail = f"torch computes, more slowly, since there is no native kernel library: {missing}"
        loader.notices.append(Notice("native_kernels_missing", detail))
    needed = loader.check()
    free = free_memory_bytes() if chosen.device.type == "cpu" else None
    own = _OWN_HOLDS.get(chosen.chosen["linear"])
    if hold != "auto" and (hold != own if own else hold in _OWN_HOLDS.values()):
        raise ValueError(f"{chosen.chosen['linear']} kernels do not compute with weights held as {hold!r}")
    loader.hold = own or choose_hold(hold, needed, free)
    if loader.hold == "blocks" and hold == "auto":
        assert free is not None
        detail = (
            f"weights are kept as the file's blocks and decoded at every step, which is slow: decoded they "
            f"take "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        )
        loader.notices.append(Notice("weights_kept_as_blocks", detail))
    with _memory_errors(needed):
        spec = replace(spec, ropes=tuple(loader.rope(rope, i) for i, rope in enumerate(spec.ropes)))
        weights = loader.load()
    give_back_memory()
    decoder = Decoder(spec, weights, chosen, [*checkpoint.notices, *loader.notices])
    decoder.notices += (loader.form_notice(decoder.weight_bytes),)
    return decoder


def build_part(
    checkpoint: Checkpoint,
    layers: range,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
    activations: str = "auto",
) -> Decoder:
    """A decoder of successive layers of a model: the embedding is in the part that begins the model, the head
    in the one that ends it. Raises what ``build_decoder`` raises."""
    spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
    try:
        chosen = load_kernels(device, dtype, kernels, activations)
    except KernelUnavailableError as error:
        raise ResourceError(str(error)) from error
    loader = _Loader(checkpoint, spec, chosen)
    needed = loader.check() * len(layers) // spec.num_layers
    free = free_memory_bytes() if chosen.device.type == "cpu" else None
    loader.hold = _OWN_HOLDS.get(chosen.chosen["linear"]) or choose_hold("auto", needed, free)
    with _memory_errors(needed):
        spec = replace(spec, ropes=tuple(loader.rope(rope, i) for i, rope in enumerate(spec.ropes)))
        weights = loader.load_part(layers)
    notices = [*checkpoint.notices, *loader.notices] if layers.start == 0 else []
    return Decoder(spec, weights, chosen, notices, layers.start)


class LayerLoader:
    """Loads single layers of a model as dense f32, for tools that never hold the whole of it."""

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device | str = "cpu") -> None:
        """Checks every tensor's shape at once. Raises what ``build_decoder`` raises."""
        spec = read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors())
        self.kernels = load_kernels(device, torch.float32, "torch")
        self._loader = _Loader(checkpoint, spec, self.kernels)
        self._loader.check()
        self.spec = replace(
            spec, ropes=tuple(self._loader.rope(rope, i) for i, rope in enumerate(spec.ropes))
        )
        """The model's shape, with the rotary factors that a GGUF keeps in tensors."""
        self.used = frozenset(self._loader.used)
        """Canonical names of the tensors that the model computes with."""

    def layer(self, layer: int) -> LayerWeights:
        """One layer's weights; q and k rows in half-split rotary order."""
        return self._loader._layer(layer)

    def embedding(self) -> DenseWeight | BlockQuantWeight:
        """The embedding in the form of the file: [vocab, hidden]."""
        table = self._loader._weight("token_embd")
        assert isinstance(table, DenseWeight | BlockQuantWeight), "integer grids hold linears only"
        return table

    def head(self) -> LinearWeight:
        """The output head in the form of the file, the embedding where they are tied: [vocab, hidden]."""
        return self.embedding() if self.spec.tied_embeddings else self._loader._weight("output")

    def release_pages(self) -> None:
        """Gives back the memory of what was read of the file so far."""
        self._loader.checkpoint.release_pages()

    def output_norm(self) -> torch.Tensor:
        """The gain of the last norm: [hidden]."""
        return self._loader._gain("output_norm")


@contextmanager
def _memory_errors(needed: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise ResourceError(
            f"not enough memory for the weights ({needed / 1e9:.1f} GB as floats): "
            "close other programs, or take a smaller or more strongly quantized model"
        ) from error


class _Loader:
    """Asks the checkpoint for each tensor that the spec needs, by canonical name and with its shape."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, kernels: Kernels) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.kernels = kernels
        self.infos = checkpoint.tensors()
        self.hold = "dense"
        self.notices: list[Notice] = []
        self.used: set[str] = set()
        self.file_types: set[str] = set()

    # --- names and shapes, before anything is read ---

    def _linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """The layer's matrices by short name, as the file has them (fused or apart), with their shapes."""
        spec = self.spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {}
        if f"blk.{layer}.attn_qkv.weight" in self.infos:
            shapes["attn_qkv"] = (q + 2 * kv, spec.hidden_size)
        else:
            shapes |= {"attn_q": (q, spec.hidden_size), "attn_k": (kv, spec.hidden_size)}
            shapes["attn_v"] = (kv, spec.hidden_size)
        shapes["attn_output"] = (spec.hidden_size, q)
        if f"blk.{layer}.ffn_gate.weight" not in self.infos and spec.architecture == "phi3":
            shapes["ffn_up"] = (2 * spec.ffn_size, spec.hidden_size)
        else:
            shapes["ffn_gate"] = shapes["ffn_up"] = (spec.ffn_size, spec.hidden_size)
        shapes["ffn_down"] = (spec.hidden_size, spec.ffn_size)
        return shapes

    def _gains(self) -> dict[str, int]:
        """The layer's norm gains by short name, with their lengths."""
        spec = self.spec
        gains = {"attn_norm": spec.hidden_size, "ffn_norm": spec.hidden_size}
        if spec.qk_norm:
            gains |= {"attn_q_norm": spec.head_dim, "attn_k_norm": spec.head_dim}
        if spec.post_norms:
            gains |= {"post_attention_norm": spec.hidden_size, "post_ffw_norm": spec.hidden_size}
        return gains

    def check(self) -> int:
        """Every needed tensor is there in the right shape; returns the bytes of all weights held dense."""
        spec = self.spec
        table = (spec.vocab_size, spec.hidden_size)
        itemsize = self.kernels.dtype.itemsize
        self._expect("token_embd.weight", table)
        self._expect("output_norm.weight", (spec.hidden_size,))
        # The head is decoded whole, tied or not; of an untied embedding only rows are.
        total = table[0] * table[1] * itemsize
        if not spec.tied_embeddings:
            self._expect("output.weight", table)
        for layer in range(spec.num_layers):
            for name, length in self._gains().items():
                self._expect(f"blk.{layer}.{name}.weight", (length,))
            for name, shape in self._linears(layer).items():
                self._expect(f"blk.{layer}.{name}.weight", shape)
                bias = f"blk.{layer}.{name}.bias"
                if bias in self.infos or name in spec.required_biases:
                    self._expect(bias, shape[:1])
                total += shape[0] * shape[1] * itemsize
        self._check_ropes()
        self._report_unused()
        return total

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.infos.get(name)
        if info is None:
            if name == "output.weight":
                raise BadInputError(
                    "tensor output.weight (lm_head.weight) is missing, and the tie_word_embeddings of "
                    "config.json says that the head is no copy of the embedding: the model is incomplete"
                )
            raise BadInputError(f"tensor {name} is missing: the model is incomplete or damaged")
        if tuple(info.shape) != shape:
            raise BadInputError(
                f"tensor {name} has the shape {list(info.shape)}, but the model's sizes ask for {list(shape)}"
            )
        self.used.add(name)

    def _check_ropes(self) -> None:
        pairs = self.spec.ropes[0].dims // 2
        for name in self._factor_tensors(self.spec.ropes[0], 0):
            self._expect(name, (pairs,))

    def _factor_tensors(self, rope: RopeSpec, index: int) -> list[str]:
        """Names of the tensors that complete a rope; in a GGUF they belong to the global layers' rope."""
        if self.checkpoint.file_format != "gguf" or index > 0:
            return []
        names = []
        if rope.scaling == "longrope":
            names += ["rope_factors_long.weight", "rope_factors_short.weight"]
        if "rope_freqs.weight" in self.infos:
            names.append("rope_freqs.weight")
        return names

    def _report_unused(self) -> None:
        left = sorted(set(self.infos) - self.used)
        if self.spec.tied_embeddings and "output.weight" in left:
            left.remove("output.weight")
            detail = (
                "the file holds an output head, but by its config the embedding is the head: that is used"
            )
            self.notices.append(Notice("tied_head_ignored", detail))
        # Old files store the rotary frequencies, which follow from the config.
        left = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
        if left:
            shown = ", ".join(left[:5]) + (" ..." if len(left) > 5 else "")
            detail = f"{len(left)} tensors are no part of a {self.spec.architecture} model: {shown}"
            self.notices.append(Notice("tensors_ignored", detail))

    # --- loading ---

    def rope(self, rope: RopeSpec, index: int) -> RopeSpec:
        """The rope with the factors that a GGUF keeps in tensors."""
        factors = {name: self._factors(name) for name in self._factor_tensors(rope, index)}
        return replace(
            rope,
            long_factors=factors.get("rope_factors_long.weight", rope.long_factors),
            short_factors=factors.get("rope_factors_short.weight", rope.short_factors),
            freq_divisors=factors.get("rope_freqs.weight", rope.freq_divisors),
        )

    def _factors(self, name: str) -> tuple[float, ...]:
        values: list[float] = self.checkpoint.vector(name).tolist()
        if not all(MIN_FACTOR <= value <= MAX_FACTOR for value in values):
            raise BadInputError(f"tensor {name} must hold positive numbers of at most {MAX_FACTOR:g}")
        return tuple(values)

    def load(self) -> DecoderWeights:
        """All weights. The largest comes first, while there is little else in memory."""
        table = self._weight("token_embd")
        if not self.spec.tied_embeddings:
            head = self._prepare(self._weight("output"), "lm_head")
            embedding = prepare(table, self.kernels.device, "embed", self.hold, self.kernels.dtype)
        else:
            # One tensor serves both: the head is read whole at every step, so its form decides.
            head = embedding = self._prepare(table, "lm_head")
        assert not isinstance(embedding, StackedWeight | IntWeight)
        del table
        self._released(head)
        layers = tuple(self._released(self._layer(layer)) for layer in range(self.spec.num_layers))
        return DecoderWeights(embedding, layers, self._gain("output_norm"), head)

    def load_part(self, layers: range) -> DecoderWeights:
        """The weights of some layers. What is no part of them, embedding or head, stands for the other."""
        if layers.start == 0:
            table = self._weight("token_embd")
            ends = prepare(table, self.kernels.device, "embed", self.hold, self.kernels.dtype)
        else:
            name = "token_embd" if self.spec.tied_embeddings else "output"
            ends = self._prepare(self._weight(name), "lm_head")
        assert not isinstance(ends, StackedWeight | IntWeight)
        made = tuple(self._released(self._layer(layer)) for layer in layers)
        return DecoderWeights(ends, made, self._gain("output_norm"), ends)

    def _released(self, made: _Made) -> _Made:
        """Gives the file's pages back where the weights are copies of them: they would count twice."""
        if self.hold != "blocks":
            self.checkpoint.release_pages()
        if self.hold == "dense":  # between weights that stay, the scratch memory of decoding would pile up
            give_back_memory()
        return made

    def _layer(self, layer: int) -> LayerWeights:
        prefix = f"blk.{layer}."
        gains = {name: self._gain(prefix + name) for name in self._gains()}
        names = self._linears(layer)
        qkv: LinearWeight
        if "attn_qkv" in names:
            qkv = self._weight(prefix + "attn_qkv")
        else:
            q = self._unpermuted(self._weight(prefix + "attn_q"), self.spec.num_heads)
            k = self._unpermuted(self._weight(prefix + "attn_k"), self.spec.num_kv_heads)
            qkv = StackedWeight((q, k, self._weight(prefix + "attn_v")))
        up = self._weight(prefix + "ffn_up")
        gate_up: LinearWeight = up
        if "ffn_gate" in names:
            gate_up = StackedWeight((self._weight(prefix + "ffn_gate"), up))
        return LayerWeights(
            attn_norm=gains["attn_norm"],
            qkv=self._prepare(qkv, "linear"),
            attn_output=self._prepare(self._weight(prefix + "attn_output"), "linear"),
            ffn_norm=gains["ffn_norm"],
            gate_up=self._prepare(gate_up, "gate_up"),
            down=self._prepare(self._weight(prefix + "ffn_down"), "linear"),
            q_norm=gains.get("attn_q_norm"),
            k_norm=gains.get("attn_k_norm"),
            post_attention_norm=gains.get("post_attention_norm"),
            post_ffn_norm=gains.get("post_ffw_norm"),
        )

    def _prepare(self, weight: LinearWeight, op: str) -> LinearWeight:
        give_back = self.checkpoint.release_pages  # a large table and its copy would be there at once
        made = prepare(weight, self.kernels.device, op, self.hold, self.kernels.dtype, give_back)
        if self.hold == "dense":
            give_back()  # floats are a copy, or the file's own, which are read again when they are used
        return made

    def _weight(self, name: str) -> LinearPart:
        weight = self.checkpoint.weight(f"{name}.weight")
        self.file_types.add(self.infos[f"{name}.weight"].type_name)
        if f"{name}.bias" in self.used:
            weight = replace(weight, bias=self.checkpoint.vector(f"{name}.bias"))
        return weight

    def _gain(self, name: str) -> torch.Tensor:
        gain = self.checkpoint.vector(f"{name}.weight").to(self.kernels.device)
        return gain + self.spec.norm_offset if self.spec.norm_offset else gain

    def _unpermuted(self, weight: LinearPart, heads: int) -> LinearPart:
        """Rows of q or k from llama.cpp's interleaved rotary order into the half-split one.

        In the file rows 2i and 2i + 1 of a head turn together, here rows i and i + dims/2; rows behind the
        rotated ones stay. q has ``num_heads`` heads and k ``num_kv_heads``. Rows may be blocks: a row is
        whole blocks.
        """
        if not self.spec.permuted_qk:
            return weight
        assert not isinstance(weight, IntWeight), "no file of integer grids has its rows permuted"
        dims, head_dim = self.spec.ropes[0].dims, self.spec.head_dim
        in_head = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, head_dim)]
        order = (torch.arange(heads)[:, None] * head_dim + torch.tensor(in_head)).flatten()
        bias = None if weight.bias is None else weight.bias[order]
        return replace(weight, data=weight.data[order], bias=bias)

    def form_notice(self, weight_bytes: int) -> Notice:
        """In which form the weights are held and computed with: a line for the log."""
        compute = {torch.float32: "f32", torch.bfloat16: "bf16"}[self.kernels.dtype]
        if self.kernels.activations != "exact" and not self.file_types <= {"F32", "F16", "BF16"}:
            # Dense matrices are multiplied in floats all the same.
            if self.kernels.chosen["linear"] == "triton":
                bits = {"int16": 15, "int8": 8}[self.kernels.activations]
                compute = f"{compute}, of single rows in {bits}-bit integers"
            else:
                compute = "16-bit integers"
        held = f"held as {compute}" if self.hold == "dense" else "held as in the file"
        detail = (
            f"weights of type {', '.join(sorted(self.file_types))} are {held} ({weight_bytes / 1e6:.0f} MB, "
            f"{self.checkpoint.file_bytes / 1e6:.0f} MB in the file) and computed with in {compute}"
        )
        return Notice("weight_form", detail)
