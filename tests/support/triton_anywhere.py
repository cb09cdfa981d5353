"""The Triton kernels chosen on a machine without a GPU too, in sizes that suit the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edgellm_kernels import linear_triton, planes_triton, registry


def serve_triton_anywhere(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """For one test: the registry offers the Triton kernels for the CPU as well."""
    everywhere = tuple(
        replace(i, devices=("cpu", "cuda")) if i.backend == "triton" else i for i in registry.IMPLEMENTATIONS
    )
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", everywhere)
    if device.type == "cpu":  # fewer and larger programs to interpret
        large = {"rows": 128, "tokens": 16, "blocks": 4, "warps": 4, "stages": 2}
        sizes = dict.fromkeys(("gemv", "dot16", "dot16_f32", "decode"), large)
        monkeypatch.setattr(linear_triton, "configurations", lambda gpu: sizes)
        monkeypatch.setattr(planes_triton, "configurations", lambda gpu: sizes)
