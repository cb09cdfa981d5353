"""Finds the GGUF name (tokenizer.ggml.pre) of the way in which a tokenizer.json cuts a text into words.

A GGUF file does not hold the pattern, only a name that its readers know. Known published tokenizers are
recognised as llama.cpp's converter does it, by a hash of the ids of one fixed text; others by comparing their
pre-tokenizer with the patterns behind the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.pre_tokenizers import PRE_TOKENIZERS

# The text and the hashes are facts of the format's converter (llama.cpp, get_vocab_base_pre): sha256 over the
# printed list of ids, special tokens included.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis "
    "concatenated) ✅ 🦙🦙 3 33 333 "
    "3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, "
    "'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
KNOWN_HASHES: Mapping[str, str] = {
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
    "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
}
_PREFERRED = ("llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "smollm", "gpt-2")
"""Where several names mean the same, the plain one."""
_GPT2_PATTERN = PRE_TOKENIZERS["gpt-2"].patterns[0]
_DIGIT = r"\p{N}"


@dataclass(frozen=True)
class _Splitting:
    patterns: tuple[str, ...]
    nfc: bool
    ignore_merges: bool


def find_pre_tokenizer(
    tokenizer: Mapping[str, Any], check_ids: Sequence[int] | None
) -> tuple[str, list[Notice]]:
    """The GGUF name for a byte-level tokenizer.json and what that name would change.

    ``check_ids`` are the ids of CHECK_TEXT. BadInputError shows the pattern when no name is known for it.
    """
    if check_ids is not None:
        digest = hashlib.sha256(str(list(check_ids)).encode()).hexdigest()
        if digest in KNOWN_HASHES:
            return KNOWN_HASHES[digest], []
    splitting = _read_splitting(tokenizer)
    names = [
        name for name in (*_PREFERRED, *PRE_TOKENIZERS) if PRE_TOKENIZERS[name].patterns == splitting.patterns
    ]
    if not names:
        raise BadInputError(
            f"tokenizer.json: GGUF has no name for this splitting: {' then '.join(splitting.patterns)!r:.300}"
        )

    def differences(name: str) -> list[str]:
        known = PRE_TOKENIZERS[name]
        found = []
        if known.nfc != splitting.nfc:
            found.append("composes characters (NFC)" if known.nfc else "does not compose characters (NFC)")
        if known.ignore_merges != splitting.ignore_merges:
            found.append(
                "takes known words whole" if known.ignore_merges else "merges known words step by step"
            )
        return found

    best = min(names, key=lambda name: len(differences(name)))
    notices = [
        Notice("pre_tokenizer_differs", f"the GGUF pre-tokenizer {best} {what}, unlike this tokenizer.json")
        for what in differences(best)
    ]
    return best, notices


def _read_splitting(tokenizer: Mapping[str, Any]) -> _Splitting:
    """The pre-tokenizer of a tokenizer.json as the patterns that it applies one after the other."""
    patterns: list[str] = []
    steps = _flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                raise BadInputError(
                    "tokenizer.json: a pre-tokenizer with add_prefix_space cannot be written to GGUF"
                )
            if step.get("use_regex", True):
                patterns.append(_GPT2_PATTERN)
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(_DIGIT)
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            pattern = step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
            if not isinstance(regex, str):
                raise BadInputError(
                    "tokenizer.json: a Split without a Regex pattern cannot be written to GGUF"
                )
            patterns.append(regex)
        else:
            raise BadInputError(f"tokenizer.json: GGUF cannot express the pre-tokenizer step {kind!r:.60}")
    normalizers = _flatten(tokenizer.get("normalizer"), "normalizers")
    kinds = [step.get("type") for step in normalizers]
    if any(kind != "NFC" for kind in kinds):
        raise BadInputError(
            f"tokenizer.json: GGUF cannot express the normalizer {', '.join(map(str, kinds))!r:.100}"
        )
    model = tokenizer.get("model")
    ignore = isinstance(model, Mapping) and bool(model.get("ignore_merges"))
    return _Splitting(tuple(patterns), bool(kinds), ignore)


def _flatten(step: Any, key: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if not isinstance(step, Mapping):
        raise BadInputError(f"tokenizer.json: a {key[:-1]} must be an object")
    if step.get("type") != "Sequence":
        return [step]
    parts = step.get(key)
    if not isinstance(parts, list):
        raise BadInputError(f"tokenizer.json: a Sequence without {key}")
    return [inner for part in parts for inner in _flatten(part, key)]
