"""Names, sources and the local store of models. No torch; the network only in pull."""

from __future__ import annotations

from edgellm_models.catalog.catalog import Entry, HubSource, PipSource, load_catalog
from edgellm_models.catalog.pull import DEFAULT_STALL_S, iterate_pull, pull_model
from edgellm_models.catalog.resolve import (
    ResolvedModel,
    is_mistyped,
    is_model_argument,
    known_names,
    resolve_model,
)
from edgellm_models.catalog.store import LocalModel, find_local, list_local, remove_local

__all__ = [
    "DEFAULT_STALL_S",
    "Entry",
    "HubSource",
    "LocalModel",
    "PipSource",
    "ResolvedModel",
    "find_local",
    "is_mistyped",
    "is_model_argument",
    "iterate_pull",
    "known_names",
    "list_local",
    "load_catalog",
    "pull_model",
    "remove_local",
    "resolve_model",
]
