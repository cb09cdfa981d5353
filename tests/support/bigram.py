"""BIGRAM: scripted models whose greedy output is the chain of tokens that a test asks for.

Llama-shaped, hidden = vocabulary, identity embedding, zero output projections, unit norms: the residual
stream is the one-hot vector of the last token; the head gives its successor logit 20 and all others 0.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_models import tiny_config, tiny_gguf, write_model_folder
from tests.support.tiny_styles import BPE_STYLES
from tests.support.tiny_tokenizers import (
    TinyTokenizer,
    added_entry,
    bpe_files,
    byte_alphabet,
    spm_json,
    tokenizer_config,
)

Piece = str | bytes
"""Text, or raw bytes where a token holds part of a character."""
LOGIT = 20.0
_EPS = 1e-5
_BOS, _UNK = "<s>", "<unk>"
# SentencePiece piece types (sentencepiece_model.proto).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True)
class _Script:
    """What the vocabulary must hold."""

    pieces: tuple[Piece, ...]
    special: tuple[str, ...]
    added: tuple[str, ...]
    eos: str
    add_bos: bool
    encodable: bool
    chat_template: Any

    def ordinary(self) -> list[Piece]:
        """Pieces that are neither special nor added, in order, without repeats."""
        return [piece for piece in dict.fromkeys(self.pieces) if piece not in self.special + self.added]


def _as_bytes(piece: Piece) -> bytes:
    return piece.encode("utf-8") if isinstance(piece, str) else piece


def _bpe_vocabulary(script: _Script) -> tuple[TinyTokenizer, dict[Piece, int]]:
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    ids: dict[Piece, int] = {}
    for piece in script.ordinary():
        spelled = "".join(alphabet[byte] for byte in _as_bytes(piece))
        # Every prefix becomes an entry, so that merging from the left reaches the piece.
        first = 2 if script.encodable else len(spelled)
        for length in range(first, len(spelled) + 1):
            if spelled[:length] not in vocab:
                vocab[spelled[:length]] = len(vocab)
                if script.encodable:
                    merges.append((spelled[: length - 1], spelled[length - 1]))
        ids[piece] = vocab[spelled]
    if not merges:  # llama.cpp refuses a BPE vocabulary without merges
        vocab.setdefault("zz", len(vocab))
        merges.append(("z", "z"))
    entries = []
    for text in dict.fromkeys((_BOS, script.eos, *script.special, *script.added)):
        entries.append(added_entry(len(vocab) + len(entries), text, text not in script.added))
    ids |= {entry["content"]: entry["id"] for entry in entries}
    style = replace(BPE_STYLES["llama3"], special=(), bos=_BOS, eos=script.eos, pad=None)
    style = replace(style, add_bos=script.add_bos)
    by_id = {token_id: text for text, token_id in vocab.items()}
    by_id |= {entry["id"]: entry["content"] for entry in entries}
    files = bpe_files(style, vocab, merges, entries, script.chat_template)
    return _tokenizer("bigram_bpe", files, by_id, ids, script), ids


def _spm_vocabulary(script: _Script) -> tuple[TinyTokenizer, dict[Piece, int]]:
    table: dict[str, tuple[float, int]] = {
        _UNK: (0.0, _UNKNOWN),
        _BOS: (0.0, _CONTROL),
        script.eos: (0.0, _CONTROL),
    }
    table |= {text: (0.0, _CONTROL) for text in script.special if text not in table}
    table |= {text: (0.0, _USER_DEFINED) for text in script.added if text not in table}
    table |= {f"<0x{byte:02X}>": (0.0, _BYTE) for byte in range(256)}
    spelling: dict[Piece, str] = {}
    normal: dict[str, None] = {}
    for piece in script.ordinary():
        if isinstance(piece, bytes):
            if len(piece) != 1:
                raise ValueError(f"a SentencePiece vocabulary holds single bytes or text, not {piece!r}")
            spelling[piece] = f"<0x{piece[0]:02X}>"
            continue
        text = spelling[piece] = piece.replace(" ", "▁")
        if script.encodable:
            normal |= dict.fromkeys(text[:length] for length in range(2, len(text) + 1))
        normal[text] = None
    characters = sorted({character for text in ["▁", *normal] for character in text})
    for rank, text in enumerate([text for text in normal if len(text) > 1] + characters):
        table.setdefault(text, (-float(rank), _NORMAL))
    names = list(table)
    index = {text: position for position, text in enumerate(names)}
    ids: dict[Piece, int] = {piece: index[text] for piece, text in spelling.items()}
    ids |= {text: index[text] for text in (_BOS, script.eos, *script.special, *script.added)}
    entries = [
        added_entry(position, text, table[text][1] != _USER_DEFINED)
        for position, text in enumerate(names)
        if table[text][1] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    document = spm_json(
        [(text, score, kind == _NORMAL) for text, (score, kind) in table.items()],
        entries,
        dummy_prefix=True,
        bos=(_BOS, index[_BOS]) if script.add_bos else None,
    )
    config = tokenizer_config(
        entries,
        bos=_BOS,
        eos=script.eos,
        pad=None,
        unk=_UNK,
        add_bos=script.add_bos,
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=script.chat_template,
        legacy=True,
    )
    files = {
        "tokenizer.model": sentencepiece_model(
            [(text, score, kind) for text, (score, kind) in table.items()]
        ),
        "tokenizer.json": json.dumps(document, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
    }
    return _tokenizer("bigram_spm", files, dict(enumerate(names)), ids, script), ids


def _tokenizer(
    style: str, files: dict[str, bytes], by_id: dict[int, str], ids: dict[Piece, int], script: _Script
) -> TinyTokenizer:
    return TinyTokenizer(
        style=style,
        files=files,
        vocab_size=len(by_id),
        bos_id=ids[_BOS],
        eos_id=ids[script.eos],
        pad_id=None,
        eos_ids=(ids[script.eos],),
        pieces=tuple(by_id[index] for index in range(len(by_id))),
    )


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """One protobuf field: int as varint, float as 32 bits, text and bytes with their length."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def sentencepiece_model(pieces: Iterable[tuple[str, float, int]], *, dummy_prefix: bool = True) -> bytes:
    """A tokenizer.model (sentencepiece_model.proto) of BPE type; (text, score, type) in id order."""
    table = list(pieces)
    out = b"".join(
        _field(1, _field(1, text) + _field(2, float(score)) + _field(3, kind)) for text, score, kind in table
    )
    names = [text for text, _, _ in table]
    trainer = _field(3, 2) + _field(4, len(table)) + _field(35, 1)
    trainer += _field(40, names.index(_UNK)) + _field(41, names.index(_BOS)) + _field(42, 2) + _field(43, -1)
    normalizer = _field(1, "identity") + _field(3, int(dummy_prefix)) + _field(4, 0) + _field(5, 1)
    return out + _field(2, trainer) + _field(3, normalizer)


def bigram_tensors(
    successor: dict[int, int],
    default: int,
    hidden: int,
    layers: int,
    *,
    ffn: int = 32,
    heads: int = 2,
    head_dim: int = 16,
) -> dict[str, torch.Tensor]:
    """The weights: token t is followed by ``successor.get(t, default)``. One key-value head."""
    rng = np.random.default_rng(0)
    head = torch.zeros(hidden, hidden)
    # RMSNorm scales a one-hot row by 1/sqrt(1/hidden + eps).
    value = LOGIT * (1 / hidden + _EPS) ** 0.5
    for token in range(hidden):
        head[successor.get(token, default), token] = value
    tensors = {
        "model.embed_tokens.weight": torch.eye(hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }

    def draw(rows: int) -> torch.Tensor:
        return torch.from_numpy((rng.standard_normal((rows, hidden)) / hidden**0.5).astype(np.float32))

    for index in range(layers):
        name = f"model.layers.{index}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": draw(heads * head_dim),
            f"{name}.self_attn.k_proj.weight": draw(head_dim),
            f"{name}.self_attn.v_proj.weight": draw(head_dim),
            f"{name}.self_attn.o_proj.weight": torch.zeros(hidden, heads * head_dim),
            f"{name}.mlp.gate_proj.weight": draw(ffn),
            f"{name}.mlp.up_proj.weight": draw(ffn),
            f"{name}.mlp.down_proj.weight": torch.zeros(hidden, ffn),
        }
    return tensors


def make_bigram(
    folder: Path,
    chain: Sequence[Piece],
    *,
    eos: str = "</s>",
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    pieces: Sequence[Piece] = (),
    more_chains: Sequence[Sequence[Piece]] = (),
    loop: bool = False,
    layers: int = 1,
    dead_layers: int = 0,
    tokenizer: str = "bpe",
    chat_template: Any = None,
    add_bos: bool = True,
    encodable: bool = True,
    generation_eos: Sequence[str] = (),
    context: int = 4096,
) -> Path:
    """Write a scripted model as a Hugging Face folder and return it; ``bigram_gguf`` makes its GGUF.

    Greedy output is ``chain``, then ``eos`` (or with ``loop`` the chain again) after any prompt whose last
    token is in no chain; a last prompt token that is in a chain is followed by its successor there. An end
    token in the middle of the chain is followed by the next piece, as ``ignore_eos`` needs it.

    ``special`` are control tokens, ``added`` user-defined (shown, matched whole); both may be in a chain.
    ``pieces`` are further vocabulary for prompts. ``more_chains`` start when the prompt ends in their first
    piece. ``encodable`` false leaves out the merges that let text be tokenized into the pieces: long chains
    stay small. ``dead_layers`` only cost time: 50 to 100 bring an eager torch engine to about 20 tokens/s.
    ``generation_eos`` are end tokens that only generation_config.json names (field report D11).
    """
    if not chain:
        raise ValueError("the chain is empty")
    used = [piece for sequence in (chain, *more_chains) for piece in sequence]
    script = _Script((*used, *pieces), tuple(special), tuple(added), eos, add_bos, encodable, chat_template)
    make = {"bpe": _bpe_vocabulary, "spm": _spm_vocabulary}[tokenizer]
    words, ids = make(script)
    counts = Counter(ids[piece] for piece in used)
    repeated = [words.pieces[token_id] for token_id, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"a chain visits a token once; repeated: {repeated}")
    successor: dict[int, int] = {}
    for sequence in (chain, *more_chains):
        for piece, following in itertools.pairwise(sequence):
            successor[ids[piece]] = ids[following]
        successor.setdefault(ids[sequence[-1]], ids[sequence[0]] if loop else ids[eos])
    hidden = -(-words.vocab_size // 64) * 64
    config = tiny_config(
        "llama",
        words,
        quantizable=False,
        hidden_size=hidden,
        vocab_size=hidden,
        intermediate_size=32,
        num_hidden_layers=layers + dead_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=_EPS,
        max_position_embeddings=context,
        rope_theta=10000.0,
        torch_dtype="float32",
    )
    tensors = bigram_tensors(successor, ids[chain[0]], hidden, layers + dead_layers)
    generation = (
        {"eos_token_id": [ids[eos], *(ids[text] for text in generation_eos)]} if generation_eos else None
    )
    write_model_folder(folder, config, tensors, words, generation_config=generation)
    return folder


def bigram_gguf(hf_folder: Path, out: Path, dtype: str = "f32") -> Path:
    """The GGUF form of a scripted model."""
    return tiny_gguf(hf_folder, out, dtype)
