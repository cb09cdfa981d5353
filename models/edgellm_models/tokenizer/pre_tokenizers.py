"""How each family of byte-level BPE cuts a text into words before merging, by its GGUF name
(tokenizer.ggml.pre).

GGUF files state only a name. The patterns, normalizers and merge rules here are those of the tokenizer.json
files that the models were published with; the names and their aliases are those that llama.cpp's converter
writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm_models.errors import BadInputError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letter: str = r"\p{L}", no_mark: str = "") -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}"
        rf"| ?[^\s\p{{L}}{no_mark}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _o200k(suffix: str, digits: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class PreTokenizer:
    """One published way to cut a text."""

    patterns: tuple[str, ...]
    """Applied one after the other (Oniguruma syntax); a match and what lies between matches each become a
    word."""
    nfc: bool = False
    """The text is composed (Unicode NFC) first."""
    ignore_merges: bool = False
    """A word that is itself in the vocabulary is taken whole, without merging."""
    add_bos: bool = False
    """What holds when the file does not say (tokenizer.ggml.add_bos_token)."""


_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_GPT2_PLAIN = PreTokenizer((_GPT2,))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_QWEN2_NO_NFC = PreTokenizer((_cl100k(r"\p{N}"),))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2_PLAIN,
    "phi-2": _GPT2_PLAIN,
    "mpt": _GPT2_PLAIN,
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "mellum": _GPT2_PLAIN,
    "trillion": _GPT2_PLAIN,
    "exaone4": _GPT2_PLAIN,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "minerva-7b": _GPT2_DIGITS,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": PreTokenizer((_cl100k(r"\p{N}{1,3}"),)),
    "smaug-bpe": PreTokenizer((_cl100k(r"\p{N}{1,3}"),)),
    "glm4": PreTokenizer((_cl100k(r"\p{N}{1,3}"),)),
    "chatglm-bpe": PreTokenizer((_cl100k(r"\p{N}{1,3}"),)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2_NO_NFC,
    "stablelm2": PreTokenizer((_cl100k(r"\p{N}"),), nfc=True),
    "qwen35": PreTokenizer((_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), nfc=True),
    "tekken": PreTokenizer((_o200k("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_o200k(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "llama4": PreTokenizer((_o200k(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            _ASCII_PUNCTUATION
            + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
"""By ``tokenizer.ggml.pre``."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The published definition behind a GGUF pre-tokenizer name; BadInputError lists the known ones."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise BadInputError(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are: "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    return found


def build_pre_tokenizer(definition: PreTokenizer) -> Any:
    """The definition as a ``tokenizers`` pipeline that ends in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in definition.patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
