"""Names, sources and the local store of models. No torch; the network only in pull."""

from edgellm_models.catalog.catalog import Entry, HubSource, PipSource, load_catalog
from edgellm_models.catalog.resolve import ResolvedModel, is_model_argument, known_names, resolve_model
from edgellm_models.catalog.store import LocalModel, find_local, list_local, remove_local

__all__ = [
    "Entry",
    "HubSource",
    "LocalModel",
    "PipSource",
    "ResolvedModel",
    "find_local",
    "is_model_argument",
    "known_names",
    "list_local",
    "load_catalog",
    "remove_local",
    "resolve_model",
]
