"""Tokenizers, incremental decoding and chat templates. Nothing heavy is imported before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm_models.tokenizer.base import Tokenizer
    from edgellm_models.tokenizer.chat_template import ChatTemplates


def load_tokenizer(path: Path, file_format: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model.

    ``file_format`` and ``metadata`` are those of its ``Checkpoint``: GGUF key-values, or the parsed
    config.json of the folder ``path``. BadInputError names the file or field that is wrong.
    """
    if file_format == "gguf":
        from edgellm_models.tokenizer.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata)
    from edgellm_models.tokenizer.from_hf import tokenizer_from_hf

    return tokenizer_from_hf(path, metadata)


def load_chat_templates(path: Path, file_format: str, metadata: Mapping[str, Any]) -> ChatTemplates | None:
    """The chat templates that a model states; None for a base model that has none."""
    from edgellm_models.tokenizer.chat_template import chat_templates_from_gguf, chat_templates_from_hf

    return chat_templates_from_gguf(metadata) if file_format == "gguf" else chat_templates_from_hf(path)


def load_sampling_defaults(
    path: Path, file_format: str, metadata: Mapping[str, Any]
) -> dict[str, float | int]:
    """The sampling values that a model's makers recommend, by ``SamplingParams`` field name; empty if
    none."""
    from edgellm_models.tokenizer.sampling_defaults import sampling_from_gguf, sampling_from_hf

    return sampling_from_gguf(metadata) if file_format == "gguf" else sampling_from_hf(path)
