"""Which model families are read, and how the two file forms name them: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import metadata_int, metadata_str

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Canonical families."""

GGUF_ARCHITECTURES = tuple(name for name in FAMILIES if name != "mistral")
"""Values of general.architecture; a GGUF file of a Mistral model says llama."""

_GGUF_KINDS = {
    "mmproj": "a vision projector that belongs to another model file",
    "adapter": "a LoRA adapter, not a model",
    "imatrix": "an importance matrix, not a model",
}
"""general.type values of files that are no language model."""
_GGUF_VISION = ("clip", "mmproj", "siglip")

_HF_MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}


def _supported_list() -> str:
    return ", ".join(FAMILIES) + " (SmolLM2 and, in GGUF files, Mistral are of the architecture llama)"


def gguf_architecture(metadata: Mapping[str, Any], label: str) -> str:
    """The canonical family of a GGUF file. BadInputError names what was found and lists what is supported."""
    if "general.architecture" not in metadata:
        raise BadInputError(
            f"{label}: the key general.architecture is missing, so the model family is unknown; "
            f"supported: {_supported_list()}"
        )
    found = metadata_str(metadata, "general.architecture")
    kind = metadata.get("general.type")
    if found in _GGUF_VISION:
        raise BadInputError(
            f"{label}: this is a vision file ({found}), not a language model: give the model's file"
        )
    if isinstance(kind, str) and kind in _GGUF_KINDS:
        raise BadInputError(f"{label}: this is {_GGUF_KINDS[kind]} (general.type {kind})")
    if found not in GGUF_ARCHITECTURES:
        raise BadInputError(
            f"{label}: the architecture {found[:60]!r} is not supported; supported: {_supported_list()}"
        )
    if metadata_int(metadata, f"{found}.expert_count", 0) > 0:
        raise BadInputError(
            f"{label}: this {found} model is a mixture of experts, which is not supported; dense models of "
            f"these families are: {_supported_list()}"
        )
    return found


def hf_architecture(config: Mapping[str, Any], label: str) -> str:
    """The canonical family of a config.json, from model_type or else from architectures.

    A multimodal config counts by its text part, when that is of a supported family and the whole is one too.
    """
    model_type = metadata_str(config, "model_type", "")
    if not model_type:
        model_type = _from_class_name(config)
    family = _HF_MODEL_TYPES.get(model_type)
    text = config.get("text_config")
    if family is not None and isinstance(text, Mapping):
        inner = metadata_str(text, "model_type", model_type)
        family = _HF_MODEL_TYPES.get(inner)
        model_type = f"{model_type} with the text part {inner}"
    if family is None:
        named = (
            f"the architecture {model_type[:80]!r} is not supported"
            if model_type
            else "it names no architecture (model_type)"
        )
        raise BadInputError(f"{label}: {named}; supported: {_supported_list()}")
    return family


def _from_class_name(config: Mapping[str, Any]) -> str:
    """``LlamaForCausalLM`` -> ``llama``; used where model_type is absent."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0].split("For")[0].lower()
    return ""
