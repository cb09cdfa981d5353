"""Triton kernels that are not run but counted: by what each launch would have been compiled for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

MODULES = (*(f"{name}_triton" for name in ("attention", "linear", "norm", "planes", "rope", "sampling")),)
_WRITTEN = ("out", "total_out", "q_out", "peaks", "sums", "factors", "scores", "ids")
"""Names of what kernels write: a launch that is not run leaves zeros there."""


def compiled_for(kernel: Any, arguments: Mapping[str, Any]) -> tuple[object, ...]:
    """What Triton compiles a launch anew for: constants and options, element types, whether a pointer or a
    whole number is a multiple of 16, and whether a number is 1."""
    key: list[object] = []
    names = {parameter.name for parameter in kernel.params}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            key.append(value)
        elif isinstance(value, torch.Tensor):
            key.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, float):
            key.append("float")
        elif parameter.do_not_specialize:
            key.append("int")
        else:
            key.append((value == 1, value % 16 == 0, -(2**31) <= value < 2**31))
    options = sorted((name, value) for name, value in arguments.items() if name not in names)
    return (kernel.__name__, *key, *options)


class CountedKernel:
    """Stands in a module for a kernel: launching it notes its key."""

    def __init__(self, kernel: Any, keys: set[tuple[object, ...]]) -> None:
        self._kernel = kernel
        self._keys = keys

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*places: Any, **named: Any) -> None:
            arguments = dict(zip(self._kernel.arg_names, places, strict=False)) | named
            self._keys.add(compiled_for(self._kernel, arguments))
            for name in _WRITTEN:
                if isinstance(arguments.get(name), torch.Tensor):
                    arguments[name].zero_()

        return launch


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """Puts counted kernels into all modules; the keys that launches have had, which grows."""
    from triton.runtime.jit import JITFunction

    keys: set[tuple[object, ...]] = set()
    for name in MODULES:
        try:
            module = importlib.import_module(f"edgellm_kernels.{name}")
        except ModuleNotFoundError:
            continue
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("_kernel") and isinstance(value, JITFunction):
                monkeypatch.setattr(module, attribute, CountedKernel(value, keys))
    return keys
