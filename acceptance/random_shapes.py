"""GGUF files of large shapes with random weights in Q4_0: sizes, memory and speed do not depend on values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK, BLOCK_BYTES = 32, 18
"""Weights and bytes of a Q4_0 block."""
OUTPUT_GAIN = 20.0
"""Gives logits a standard deviation of about 10, as real ones have: of equally likely tokens drawing keeps
more numbers."""
_PIECE = 1 << 18
"""Random blocks that are made once and repeated."""


@dataclass(frozen=True)
class LlamaShape:
    """A llama of published sizes."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    context: int = 8192

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns by tensor name."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {"token_embd.weight": (self.vocab, self.hidden)}
        if not self.tied:
            found["output.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, rows, columns in (
                ("attn_q", query, self.hidden),
                ("attn_k", kv, self.hidden),
                ("attn_v", kv, self.hidden),
                ("attn_output", self.hidden, query),
                ("ffn_gate", self.ffn, self.hidden),
                ("ffn_up", self.ffn, self.hidden),
                ("ffn_down", self.hidden, self.ffn),
            ):
                found[f"blk.{layer}.{name}.weight"] = (rows, columns)
        return found

    @property
    def file_bytes(self) -> int:
        """Of the matrices; norms and the vocabulary are a thousandth of that."""
        return sum(rows * columns // BLOCK * BLOCK_BYTES for rows, columns in self.matrices.values())


SHAPES = {
    "llama-1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "llama-8b": LlamaShape(4096, 14336, 32, 32, 8, 128, 128256, tied=False),
}


def write_shape(shape: LlamaShape, path: Path) -> Path:
    """Writes the file, tensor by tensor."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    letters = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    tokens = [*letters, "to", *(f"token{i}" for i in range(shape.vocab - 257))]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * shape.vocab)
    writer.add_token_merges(["t o"])
    writer.add_bos_token_id(shape.vocab - 2)
    writer.add_eos_token_id(shape.vocab - 1)
    norms = {"output_norm.weight"} | {
        f"blk.{layer}.{name}.weight" for layer in range(shape.layers) for name in ("attn_norm", "ffn_norm")
    }
    for name in sorted(norms):
        writer.add_tensor_info(name, (shape.hidden,), np.dtype(np.float32), 4 * shape.hidden)
    for name, (rows, columns) in shape.matrices.items():
        size = rows * columns // BLOCK * BLOCK_BYTES
        writer.add_tensor_info(
            name, (rows, columns // BLOCK * BLOCK_BYTES), np.dtype(np.uint8), size,
            raw_dtype=gguf.GGMLQuantizationType.Q4_0,
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    piece = _blocks()
    for name in sorted(norms):
        gain = OUTPUT_GAIN if name == "output_norm.weight" else 1.0
        writer.write_tensor_data(np.full(shape.hidden, gain, dtype=np.float32))
    for rows, columns in shape.matrices.values():
        count = rows * columns // BLOCK
        data = np.resize(piece, (count, BLOCK_BYTES)) if count > _PIECE else piece[:count]
        writer.write_tensor_data(np.ascontiguousarray(data).reshape(rows, -1))
    writer.close()
    return path


def _blocks() -> np.ndarray:
    """[_PIECE, 18] uint8: an f16 scale of about 0.01 and sixteen random bytes."""
    rng = np.random.default_rng(8)
    blocks = rng.integers(0, 256, (_PIECE, BLOCK_BYTES), dtype=np.uint8)
    scales = rng.uniform(0.002, 0.004, _PIECE).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks
