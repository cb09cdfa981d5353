"""edgellm: run and quantize language models on your own machine. Public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.config import EngineConfig as EngineConfig
    from edgellm.contracts import ChatMessage as ChatMessage
    from edgellm.contracts import ConstraintSpec as ConstraintSpec
    from edgellm.contracts import FinishReason as FinishReason
    from edgellm.contracts import GenerationRequest as GenerationRequest
    from edgellm.contracts import SamplingParams as SamplingParams
    from edgellm.contracts import TokenEvent as TokenEvent
    from edgellm.engine.async_engine import AsyncEngine as AsyncEngine
    from edgellm.engine.engine import Engine as Engine
    from edgellm.llm import LLM as LLM
    from edgellm_models.errors import EdgeLLMError as EdgeLLMError
    from edgellm_models.errors import Notice as Notice

_HOMES = {
    "LLM": "edgellm.llm",
    "AsyncEngine": "edgellm.engine.async_engine",
    "ChatMessage": "edgellm.contracts",
    "ConstraintSpec": "edgellm.contracts",
    "EdgeLLMError": "edgellm_models.errors",
    "Engine": "edgellm.engine.engine",
    "EngineConfig": "edgellm.config",
    "FinishReason": "edgellm.contracts",
    "GenerationRequest": "edgellm.contracts",
    "Notice": "edgellm_models.errors",
    "SamplingParams": "edgellm.contracts",
    "TokenEvent": "edgellm.contracts",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("edgellm")
        except PackageNotFoundError:
            return "0.0.0+source"
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'edgellm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
