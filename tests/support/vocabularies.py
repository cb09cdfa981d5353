"""Small GGUF tokenizer metadata for tests: a trained byte-level BPE and a SentencePiece vocabulary."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tests.support.corpus import corpus_lines

BPE_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def trained_bpe(size: int = 1200) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Pieces in id order and merges learned from the corpus without any splitting into words.

    Since merges may cross what a pre-tokenizer would cut, every difference in cutting shows in the ids.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]{1,14}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = "\n".join(corpus_lines()) + "'ll 'LL 'S 're 12 123 1234 \r\n\r\n  \t\t !!! !? ,. é 中文 x'sy"
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(pieces), tuple((left, right) for left, right in model["merges"])


def bpe_fields(pre: str | None = "gpt-2", user_defined: tuple[str, ...] = ("<think>",)) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE vocabulary: pieces, then control tokens, then user-defined ones."""
    pieces, merges = trained_bpe()
    tokens = [*pieces, *BPE_SPECIAL, *user_defined]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(pieces) + [3] * len(BPE_SPECIAL) + [4] * len(user_defined),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    return fields


SPM_WORDS = (
    "▁", "▁le", "ad", "in", "g", "▁leading", "▁lead", "ing", "▁x", "▁analysis", "▁a", "na", "ly", "sis",
    "ana", "▁ana", "lysis", "▁final", "▁f", "al", "inal", "he", "ll", "o", "▁he", "llo", "▁hello", "▁hell",
    "h", "e", "l", "a", "d", "n", "i", "y", "s", "f", "x", "en", "▁en", "▁end",
)  # fmt: skip


def spm_fields(add_space_prefix: bool = True, extra: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE vocabulary with byte tokens, tags as user-defined tokens and
    ``extra`` (text, type) entries at the end."""
    words = sorted(dict.fromkeys(SPM_WORDS), key=lambda word: (len(word) == 1, -len(word)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<tag>", "</tag>", *words]
    types = [2, 3, 3] + [6] * 256 + [4, 4] + [1] * len(words)
    scores = [0.0] * 261 + [-float(rank) for rank in range(len(words))]
    for text, kind in extra:
        tokens.append(text)
        types.append(kind)
        scores.append(-1000.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }
