"""Which implementation computes an op on a device: what there is, which is chosen and why.

Pure data: nothing registers itself, and a module is imported only when one of its functions is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from edgellm_kernels.native_library import load_library, why_missing

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


def _torch(op: str, module: str) -> Implementation:
    dtypes = (torch.float32, torch.bfloat16)
    return Implementation(op, "torch", ("cpu", "cuda"), dtypes, f"edgellm_kernels.{module}", op)


def _native(op: str, module: str) -> Implementation:
    return Implementation(op, "native", ("cpu",), (torch.float32,), f"edgellm_kernels.{module}", op)


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


def available(
    op: str, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> list[Implementation]:
    """The implementations of an op that can run there, the preferred one first."""
    kind = torch.device(device).type
    found = [i for i in IMPLEMENTATIONS if i.op == op and kind in i.devices and dtype in i.dtypes]
    if any(i.backend == "native" for i in found) and load_library() is None:
        found = [i for i in found if i.backend != "native"]
    return sorted(found, key=lambda i: BACKENDS.index(i.backend))


def choose(
    op: str, device: torch.device | str, dtype: torch.dtype = torch.float32, preferred: str = "auto"
) -> Implementation:
    """The implementation to use: the first available one, or that of the ``preferred`` backend.

    Raises KernelUnavailableError if there is none: a wish is never replaced silently.
    """
    if preferred not in ("auto", *BACKENDS):
        raise KernelUnavailableError(f"unknown kernels {preferred!r}: choose auto, {', '.join(BACKENDS)}")
    found = available(op, device, dtype)
    for implementation in found:
        if preferred in ("auto", implementation.backend):
            return implementation
    there = ", ".join(i.backend for i in found) or "nothing"
    wanted = "kernels" if preferred == "auto" else f"{preferred} kernels"
    type_name = str(dtype).removeprefix("torch.")
    reason = why_missing() if preferred == "native" and torch.device(device).type == "cpu" else ""
    if reason:
        raise KernelUnavailableError(f"there is no native kernel library: {reason}")
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
        lines[op] = chosen.backend + (f" (also: {', '.join(others)})" if others else "")
    return lines
