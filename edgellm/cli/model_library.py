"""The models of this user for the screen: a contracts.ModelLibrary over catalog, store and planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.contracts import ChatBackend, MemoryPlan, ModelInfo
from edgellm_models.errors import NotFoundError, Notice, PullProgress, UsageError

if TYPE_CHECKING:
    from edgellm.cli.runtime import OnNotice
    from edgellm_models.catalog import Entry, LocalModel


def _ignore(notice: Notice) -> None:
    """The log has it already."""


class LocalLibrary:
    """Models of the catalog, those that were pulled, and what they need on this machine."""

    def __init__(self, on_notice: OnNotice = _ignore, *, ctx: int | None = None) -> None:
        """``ctx``: the context that plans are for; None is half of what fits, as the engine takes it."""
        self._on_notice = on_notice
        self._ctx = ctx

    def list(self) -> Sequence[ModelInfo]:
        """Those that are here have a path."""
        from edgellm.cli.options import models_folder
        from edgellm_models.catalog import list_local, load_catalog

        catalog = load_catalog()
        local = {model.name: model for model in list_local(models_folder())}
        names = [*catalog, *(name for name in local if name not in catalog)]
        found = [_info(name, catalog.get(name), local.get(name)) for name in names]
        return [info if info.name in catalog else _from_header(info) for info in found]

    def pull(self, name: str) -> Iterator[PullProgress]:
        """Fetches a model; closing the iterator stops it, and the next pull goes on from there."""
        from edgellm.cli.options import models_folder
        from edgellm.locations import Locations
        from edgellm_models.catalog import iterate_pull, resolve_model

        locations = Locations.from_environment()
        locations.ensure(locations.models)
        resolved = resolve_model(name, models_folder())
        if resolved.path is not None:
            yield PullProgress(0, 0, "here", "done")
            return
        if resolved.entry is None:
            raise NotFoundError(f"{name} has no source to fetch it from")
        yield from iterate_pull(resolved.entry, models_folder(), on_notice=self._on_notice)

    def remove(self, name: str) -> int:
        """Deletes a pulled model; returns the bytes that are free again."""
        from edgellm.cli.options import models_folder
        from edgellm_models.catalog import remove_local

        return remove_local(name, models_folder())

    def plan(self, name: str, context: int | None = None) -> MemoryPlan:
        """From headers, or before a pull from the catalog, with the KV that the engine takes by itself."""
        from edgellm.cache.kv_sizes import auto_kv_types
        from edgellm.cli.options import models_folder
        from edgellm.planning.machine import free_memory
        from edgellm.planning.planner import Machine, Wish, make_plan
        from edgellm.planning.shape import catalog_shape, config_bits_per_weight, shape_of
        from edgellm_kernels.native_library import find_library
        from edgellm_models.catalog import resolve_model
        from edgellm_models.checkpoint.headers import read_header
        from edgellm_models.network import read_spec

        resolved = resolve_model(name, models_folder())
        if resolved.path is None:
            shape = catalog_shape(resolved.entry) if resolved.entry is not None else None
            if shape is None:
                raise NotFoundError(f"the catalog knows too little of {name} to plan it before it is fetched")
        else:
            header = read_header(resolved.path)
            spec = read_spec(header.file_format, header.metadata, header.tensors)
            shape = shape_of(spec, header.tensors, bits_per_weight=config_bits_per_weight(header.metadata))
        free = free_memory()
        kv_dtype = auto_kv_types("cpu", exact=find_library() is None)[0]
        wanted = min(context or self._ctx or shape.context_length, shape.context_length)
        plan = make_plan(shape, Wish(context=wanted, kv_dtype=kv_dtype), Machine(memory_bytes=free))
        if context is None and self._ctx is None and free and plan.kv_bytes > free // 2:
            # What the engine does when nobody asks for a context: what fits in half of the free memory.
            wanted = max(256, free // 2 // max(1, plan.kv_bytes_per_token))
            plan = make_plan(shape, Wish(context=wanted, kv_dtype=kv_dtype), Machine(memory_bytes=free))
        return MemoryPlan(
            plan.weight_bytes,
            plan.kv_bytes_per_token,
            plan.kv_bytes,
            plan.workspace_bytes,
            free or 0,
            plan.context,
        )

    async def open(self, name: str) -> ChatBackend:
        """The screen opens models through its openers, which know the chat's settings."""
        raise UsageError(f"open {name} through the chat that uses it")


def _from_header(info: ModelInfo) -> ModelInfo:
    """What the catalog does not know of a model is in its file; one that cannot be read says nothing."""
    from math import prod

    from edgellm_models.checkpoint.headers import read_header
    from edgellm_models.checkpoint.reader import commonest_type
    from edgellm_models.errors import EdgeLLMError
    from edgellm_models.network import read_spec
    from edgellm_models.tokenizer import load_chat_templates

    path = Path(info.path)
    try:
        header = read_header(path)
        spec = read_spec(header.file_format, header.metadata, header.tensors)
        templates = load_chat_templates(path, header.file_format, header.metadata)
    except EdgeLLMError:
        return info
    tensors = header.tensors.values()
    return replace(
        info,
        architecture=spec.architecture,
        file_format=header.file_format,
        quantization=commonest_type(tensors) or "",
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        context_length=spec.context_length,
        trained_context=spec.context_length,
        has_chat_template=templates is not None,
    )


def _info(name: str, entry: Entry | None, local: LocalModel | None) -> ModelInfo:
    size = local.bytes if local else (entry.weight_bytes if entry else None)
    context = (entry.context if entry else None) or 0
    return ModelInfo(
        name=name,
        path=str(local.path) if local else "",
        architecture=entry.family if entry else "",
        file_format="",
        quantization=entry.quantization if entry else "",
        parameters=(entry.parameters if entry else None) or 0,
        file_bytes=size or 0,
        context_length=context,
        trained_context=context,
        has_chat_template=bool(entry and entry.chat),
        licence=(entry.licence if entry else local.licence if local else ""),
    )
