"""The network: what a model's files say of its shape, and the one decoder that runs every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_models.network.spec import ModelSpec, TensorShape

__all__ = ["ModelSpec", "read_spec"]


def read_spec(file_format: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> ModelSpec:
    """What the decoder must know of a model.

    Args:
        file_format: ``gguf`` or ``safetensors``.
        metadata: GGUF key-value metadata, or the parsed config.json.
        tensors: what the file holds by canonical name (anything with a ``shape``); empty to plan without
        weights.

    Factor tables that a GGUF keeps in tensors (rope_freqs.weight ...) are filled in when the decoder is
    built. Raises BadInputError, naming the key, for what is missing, out of range or not supported.
    """
    if file_format == "gguf":
        from edgellm_models.network.gguf_spec import read_gguf_spec

        return read_gguf_spec(metadata, tensors)
    if file_format == "safetensors":
        from edgellm_models.network.config_spec import read_config_spec

        return read_config_spec(metadata, tensors)
    raise ValueError(f"file_format must be gguf or safetensors, not {file_format!r}")
