"""Which implementation computes an op on a device: what there is, which is chosen and why.

Pure data: nothing registers itself, and a module is imported only when one of its functions is chosen.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from edgellm_kernels.native_library import load_library, unmet_wish, why_missing

OPS = (
    "embed",
    "add_rms_norm",
    "linear",
    "gate_up",
    "rope_angles",
    "qk_norm_rope_store",
    "plan_attention",
    "paged_attention",
    "lm_head",
)
BACKENDS = ("native", "triton", "torch")
"""In order of preference where nothing is asked for: the first that has the op."""


class KernelUnavailableError(LookupError):
    """The backend that was asked for has no implementation for an op here; the message says what there is."""


@dataclass(frozen=True)
class Implementation:
    """One function that computes an op."""

    op: str
    backend: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    """Compute types that it supports."""
    module: str
    function: str

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


def keep_fused(environ: MutableMapping[str, str] | None = None) -> None:
    """Tells Triton to go on fusing a product with the sum behind it, unless the user has said otherwise.

    That is its default until 3.9, which warns that the next version's will be another; then each weight would
    take an instruction more.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def _torch(op: str, module: str) -> Implementation:
    dtypes = (torch.float32, torch.bfloat16)
    return Implementation(op, "torch", ("cpu", "cuda"), dtypes, f"edgellm_kernels.{module}", op)


def _native(op: str, module: str) -> Implementation:
    return Implementation(op, "native", ("cpu",), (torch.float32,), f"edgellm_kernels.{module}", op)


def _triton(op: str, module: str) -> Implementation:
    dtypes = (torch.float32, torch.bfloat16)
    return Implementation(op, "triton", ("cuda",), dtypes, f"edgellm_kernels.{module}", op)


LEFT_TO_TORCH = {"triton": ("rope_angles",)}
"""Ops that a backend leaves to torch, also where it was asked for by name: cos of a large angle needs a range
reduction that Triton's does not have.
"""
_MIN_CAPABILITY = (8, 0)
"""The Triton kernels multiply in tf32 and load asynchronously."""

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _native("embed", "linear_native"),
    _native("add_rms_norm", "norm_native"),
    _native("linear", "linear_native"),
    _native("gate_up", "linear_native"),
    _native("rope_angles", "attention_native"),
    _native("qk_norm_rope_store", "attention_native"),
    _native("plan_attention", "attention_native"),
    _native("paged_attention", "attention_native"),
    _native("lm_head", "linear_native"),
    _triton("embed", "linear_triton"),
    _triton("add_rms_norm", "norm_triton"),
    _triton("linear", "linear_triton"),
    _triton("gate_up", "linear_triton"),
    _triton("qk_norm_rope_store", "rope_triton"),
    _triton("plan_attention", "attention_triton"),
    _triton("paged_attention", "attention_triton"),
    _triton("lm_head", "linear_triton"),
    _torch("embed", "linear_torch"),
    _torch("add_rms_norm", "norm_torch"),
    _torch("linear", "linear_torch"),
    _torch("gate_up", "linear_torch"),
    _torch("rope_angles", "rope_torch"),
    _torch("qk_norm_rope_store", "rope_torch"),
    _torch("plan_attention", "attention_torch"),
    _torch("paged_attention", "attention_torch"),
    _torch("lm_head", "linear_torch"),
)


def triton_missing() -> str:
    """Why the Triton kernels cannot run on the GPU; empty where nothing speaks against it."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        return "they need a GPU of compute capability 8.0"
    return ""


def available(
    op: str, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> list[Implementation]:
    """The implementations of an op that can run there, the preferred one first."""
    kind = torch.device(device).type
    found = [i for i in IMPLEMENTATIONS if i.op == op and kind in i.devices and dtype in i.dtypes]
    if any(i.backend == "native" for i in found) and load_library() is None:
        found = [i for i in found if i.backend != "native"]
    if any(i.backend == "triton" for i in found) and triton_missing():
        found = [i for i in found if i.backend != "triton"]
    return sorted(found, key=lambda i: BACKENDS.index(i.backend))


def choose(
    op: str, device: torch.device | str, dtype: torch.dtype = torch.float32, preferred: str = "auto"
) -> Implementation:
    """The implementation to use: the first available one, or that of the ``preferred`` backend.

    Raises KernelUnavailableError if there is none: a wish is never replaced silently. What a backend never
    computes (LEFT_TO_TORCH) torch does beside it.
    """
    if preferred not in ("auto", *BACKENDS):
        raise KernelUnavailableError(f"unknown kernels {preferred!r}: choose auto, {', '.join(BACKENDS)}")
    if preferred in ("auto", "native") and torch.device(device).type == "cpu" and unmet_wish():
        raise KernelUnavailableError(unmet_wish())
    found = available(op, device, dtype)
    accepted = {preferred}
    serves = any(i.backend == preferred for i in available("linear", device, dtype))
    if serves and op in LEFT_TO_TORCH.get(preferred, ()):
        accepted.add("torch")
    for implementation in found:
        if preferred == "auto" or implementation.backend in accepted:
            return implementation
    there = ", ".join(i.backend for i in found) or "nothing"
    wanted = "kernels" if preferred == "auto" else f"{preferred} kernels"
    type_name = str(dtype).removeprefix("torch.")
    reason = why_missing() if preferred == "native" and torch.device(device).type == "cpu" else ""
    if reason:
        raise KernelUnavailableError(f"there is no native kernel library: {reason}")
    if preferred == "triton" and torch.device(device).type == "cuda" and triton_missing():
        raise KernelUnavailableError(f"there are no triton kernels here: {triton_missing()}")
    raise KernelUnavailableError(
        f"no {wanted} for {op} on {torch.device(device).type} in {type_name}; available: {there}"
    )


def explain(
    device: torch.device | str, dtype: torch.dtype = torch.float32, preferred: str = "auto"
) -> dict[str, str]:
    """For each op one phrase on what runs it and what else could: the doctor's table."""
    lines = {}
    for op in OPS:
        try:
            chosen = choose(op, device, dtype, preferred)
        except KernelUnavailableError as error:
            lines[op] = str(error)
            continue
        others = [i.backend for i in available(op, device, dtype) if i is not chosen]
        library = load_library() if chosen.backend == "native" else None
        name = chosen.backend if library is None else f"{chosen.backend} {library.backend}"
        lines[op] = name + (f" (also: {', '.join(others)})" if others else "")
    return lines
