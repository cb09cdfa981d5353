"""Which way of running steps serves a model, its kernels and its KV pages."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.runner.decode_graphs import DecodeGraphs
from edgellm.runner.step_program import StepProgram
from edgellm_kernels.batch import KVStorage
from edgellm_kernels.ops import Kernels, can_compile_step, native_serves
from edgellm_models.errors import Notice
from edgellm_models.network.decoder import Decoder


def choose_program(decoder: Decoder, kv: Sequence[KVStorage]) -> Decoder | StepProgram:
    """The step program where every op, every weight and the form of the KV pages are native; on a GPU with
    Triton kernels a decoder with captured steps, unless int4 pages or a rope that turns by length need the
    host."""
    if decoder.kernels.device.type == "cuda" and decoder.kernels.chosen["linear"] == "triton":
        by_length = any(rope.spec.switch_length is not None for rope in decoder.ropes)
        if by_length or any(pages.has_int4 for pages in kv):
            return decoder
        return DecodeGraphs(decoder, kv, max_blocks=max(pages.num_blocks for pages in kv))
    native = all(backend == "native" for backend in decoder.kernels.chosen.values())
    if not native or not all(map(native_serves, kv)):
        return decoder
    if not can_compile_step(decoder.weights.layers, decoder.weights.head):
        return decoder
    return StepProgram(decoder)


def kv_left_to_torch(parts: Sequence[Kernels], kv: Sequence[KVStorage], name: str) -> Notice | None:
    """What to say where a part of the model chose kernels for attention that have none for the form of these
    pages, whose type is called ``name``: torch then serves in their place."""
    lacking = {"native": not all(map(native_serves, kv)), "triton": any(pages.has_int4 for pages in kv)}
    backends = [part.chosen["paged_attention"] for part in parts]
    backend = next((backend for backend in backends if lacking.get(backend)), None)
    if backend is None:
        return None
    detail = (
        f"attention over {name} KV is computed by torch, more slowly: the {backend} kernels have none for it"
    )
    if name == "fp8":
        detail += "; --kv-dtype int8 takes the same bytes, rounds less, and is computed by them"
    return Notice("kv_on_torch", detail)
