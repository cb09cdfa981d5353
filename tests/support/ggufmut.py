"""GGUFMUT: builds, takes apart, damages, byte-swaps and splits tiny GGUF files, without the project's own
reader.

``Document`` is a GGUF file taken apart; ``write`` puts it together in either byte order. ``fields`` finds the
byte offset of every header field by name, and ``overwrite`` changes one of them in place, so that everything
else stays as it was.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"} | {
    U64: "Q",
    I64: "q",
    F64: "d",
}
BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
} | {
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "I32": (26, 1, 4),
    "F64": (28, 1, 8),
    "BF16": (30, 1, 2),
}
"""name -> type id, weights and bytes of a block."""


@dataclass(frozen=True)
class Entry:
    """One metadata entry; an array's ``value`` is (element type, list)."""

    key: str
    type_id: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """One tensor; ``ne`` has the row length first, as the file has."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    data: bytes


@dataclass(frozen=True)
class Document:
    """A whole GGUF file."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    version: int = 3
    alignment: int = 32

    def with_entry(self, key: str, type_id: int, value: Any) -> Document:
        """The same with ``key`` set, in its old place or at the end."""
        entry = Entry(key, type_id, value)
        if any(old.key == key for old in self.entries):
            return replace(self, entries=tuple(entry if old.key == key else old for old in self.entries))
        return replace(self, entries=(*self.entries, entry))

    def without(self, name: str) -> Document:
        """The same without the metadata key or tensor ``name``."""
        return replace(
            self,
            entries=tuple(entry for entry in self.entries if entry.key != name),
            tensors=tuple(tensor for tensor in self.tensors if tensor.name != name),
        )

    def with_tensor(self, tensor: Tensor) -> Document:
        """The same with ``tensor`` in place of the one of its name, or at the end."""
        if any(old.name == tensor.name for old in self.tensors):
            changed = tuple(tensor if old.name == tensor.name else old for old in self.tensors)
            return replace(self, tensors=changed)
        return replace(self, tensors=(*self.tensors, tensor))


@dataclass
class _Writer:
    order: str
    out: bytearray = field(default_factory=bytearray)
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    def put(self, name: str, code: str, value: Any) -> None:
        self.fields[name] = (len(self.out), code)
        self.out += struct.pack(self.order + code, value)

    def text(self, name: str, value: str) -> None:
        raw = value.encode("utf-8", errors="surrogateescape")
        self.put(f"{name}.length", "Q", len(raw))
        self.fields[name] = (len(self.out), f"{len(raw)}s")
        self.out += raw

    def value(self, name: str, type_id: int, value: Any) -> None:
        if type_id == STRING:
            self.text(f"{name}.value", value)
        elif type_id == ARRAY:
            element, items = value
            self.put(f"{name}.element_type", "I", element)
            self.put(f"{name}.count", "Q", len(items))
            for index, item in enumerate(items):
                self.value(f"{name}[{index}]", element, item)
        else:
            self.put(f"{name}.value", CODES[type_id], value)


def write_with_fields(
    document: Document, *, big_endian: bool = False
) -> tuple[bytes, dict[str, tuple[int, str]]]:
    """The bytes of a file and, by name, the offset and struct code of every header field.

    Names: ``version``, ``tensor_count``, ``kv_count``, ``KEY`` (its text), ``KEY.length``, ``KEY.type``,
    ``KEY.value``, ``KEY.value.length``, ``KEY.element_type``, ``KEY.count``, ``TENSOR.num_dims``,
    ``TENSOR.ne0``, ``TENSOR.type``, ``TENSOR.offset``.
    """
    writer = _Writer(">" if big_endian else "<")
    writer.out += b"GGUF"
    writer.put("version", "I", document.version)
    writer.put("tensor_count", "Q", len(document.tensors))
    writer.put("kv_count", "Q", len(document.entries))
    for entry in document.entries:
        writer.text(entry.key, entry.key)
        writer.put(f"{entry.key}.type", "I", entry.type_id)
        writer.value(entry.key, entry.type_id, entry.value)
    offset = 0
    for tensor in document.tensors:
        writer.text(tensor.name, tensor.name)
        writer.put(f"{tensor.name}.num_dims", "I", len(tensor.ne))
        for index, extent in enumerate(tensor.ne):
            writer.put(f"{tensor.name}.ne{index}", "Q", extent)
        writer.put(f"{tensor.name}.type", "I", tensor.type_id)
        writer.put(f"{tensor.name}.offset", "Q", offset)
        offset += len(tensor.data) + -len(tensor.data) % document.alignment
    for tensor in document.tensors:
        writer.out += bytes(-len(writer.out) % document.alignment)
        writer.out += tensor.data
    writer.out += bytes(-len(writer.out) % document.alignment)
    return bytes(writer.out), writer.fields


def write(document: Document, *, big_endian: bool = False) -> bytes:
    """The bytes of a file. A big-endian one keeps its tensor data as it is: only the header matters to its
    tests."""
    return write_with_fields(document, big_endian=big_endian)[0]


def overwrite(document: Document, name: str, value: Any, code: str | None = None) -> bytes:
    """The file with one header field overwritten in place."""
    data, fields = write_with_fields(document)
    offset, own_code = fields[name]
    changed = bytearray(data)
    struct.pack_into("<" + (code or own_code), changed, offset, value)
    return bytes(changed)


def split(document: Document, count: int) -> list[bytes]:
    """``count`` shards as llama.cpp's gguf-split writes them: metadata in the first, split.* keys in each."""
    step = -(-len(document.tensors) // count)
    shards = []
    for number in range(count):
        keys = (
            Entry("split.no", U16, number),
            Entry("split.count", U16, count),
            Entry("split.tensors.count", I32, len(document.tensors)),
        )
        own = document.entries if number == 0 else ()
        tensors = document.tensors[number * step : (number + 1) * step]
        shards.append(write(replace(document, entries=(*own, *keys), tensors=tensors)))
    return shards


def shard_name(stem: str, number: int, count: int) -> str:
    """``stem-00001-of-00003.gguf`` for number 1 of 3."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def random_tensor(name: str, ne: tuple[int, ...], type_name: str, seed: int = 0) -> Tensor:
    """A tensor of small finite values: random codes under scales around 0.01."""
    type_id, elements, block_bytes = BLOCKS[type_name]
    rng = np.random.default_rng([seed, *name.encode()])
    count = math.prod(ne)
    if type_name in ("F32", "F64", "I32"):
        kind = {"F32": "<f4", "F64": "<f8", "I32": "<i4"}[type_name]
        return Tensor(name, ne, type_id, rng.normal(0, 2, count).astype(kind).tobytes())
    if type_name in ("F16", "BF16"):
        values = rng.normal(0, 1, count).astype("<f4")
        raw = values.astype("<f2") if type_name == "F16" else (values.view("<u4") >> 16).astype("<u2")
        return Tensor(name, ne, type_id, raw.tobytes())
    blocks = rng.integers(0, 256, (count // elements, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(rng.uniform(0.005, 0.02, (len(blocks), 2)).astype("<f2").tobytes(), np.uint8)
    scale = scale.reshape(-1, 4)
    if type_name == "Q4_K":
        blocks[:, :4] = scale
    elif type_name == "Q6_K":
        blocks[:, 208:] = scale[:, :2]
    else:
        blocks[:, :2] = scale[:, :2]
    return Tensor(name, ne, type_id, blocks.tobytes())


def tiny_document(
    *, layers: int = 2, hidden: int = 64, ffn: int = 96, vocab: int = 32, matrix_type: str = "F32"
) -> Document:
    """A llama-shaped model with a byte-level vocabulary of ``vocab`` entries; complete, though without
    sense."""
    entries = (
        Entry("general.architecture", STRING, "llama"),
        Entry("general.name", STRING, "tiny"),
        Entry("general.alignment", U32, 32),
        Entry("general.tags", ARRAY, (STRING, ["a", "b"])),
        Entry("llama.block_count", U32, layers),
        Entry("llama.context_length", U32, 128),
        Entry("llama.embedding_length", U32, hidden),
        Entry("llama.feed_forward_length", U32, ffn),
        Entry("llama.attention.head_count", U32, 4),
        Entry("llama.attention.head_count_kv", U32, 2),
        Entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        Entry("llama.rope.freq_base", F32, 10000.0),
        Entry("tokenizer.ggml.model", STRING, "gpt2"),
        Entry("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{i}" for i in range(vocab)])),
        Entry("tokenizer.ggml.scores", ARRAY, (F32, [float(-i) for i in range(vocab)])),
        Entry("tokenizer.ggml.token_type", ARRAY, (I32, [1] * vocab)),
        Entry("tokenizer.ggml.add_bos_token", BOOL, True),
        Entry("x.wide", U64, 1 << 40),
    )
    tensors = [
        random_tensor("token_embd.weight", (hidden, vocab), matrix_type),
        random_tensor("output_norm.weight", (hidden,), "F32"),
    ]
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (hidden, hidden // 2),
        "attn_v": (hidden, hidden // 2),
        "attn_output": (hidden, hidden),
        "ffn_gate": (hidden, ffn),
        "ffn_up": (hidden, ffn),
        "ffn_down": (ffn, hidden),
    }
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            tensors.append(random_tensor(f"blk.{layer}.{norm}.weight", (hidden,), "F32"))
        for stem, ne in shapes.items():
            tensors.append(random_tensor(f"blk.{layer}.{stem}.weight", ne, matrix_type))
    return Document(entries, tuple(tensors))
