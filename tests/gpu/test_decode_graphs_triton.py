"""Decode steps in static buffers on the Triton kernels against the torch twins, in a quantized model."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.oracles import require_oracle

require_oracle("gguf")

from edgellm.runner.decode_graphs import CudaGraphs, DecodeGraphs, EagerReplay
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_quantize.writers import write_quantized_gguf
from tests.support.paged import PagedRun, relative_error
from tests.support.tiny_models import make_tiny
from tests.support.triton_anywhere import serve_triton_anywhere


def test_steps_of_a_quantized_model(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two tokens, one sequence twice, three in the room of four, over poisoned buffers; the
    second step of a size replays what the first recorded. On a GPU as a CUDA graph."""
    serve_triton_anywhere(monkeypatch, device)
    folder = make_tiny("qwen3", tmp_path / "model", quantizable=True, num_hidden_layers=1)
    write_quantized_gguf(folder, tmp_path / "q.gguf", "Q4_0")
    steps = [
        [("a", [5, 9])],
        [("a", [4])],
        [("a", [7])],
        [("a", [3]), ("b", [8]), ("c", [9])],
    ]
    found = {}
    for kernels in ("torch", "triton"):
        where = device if kernels == "triton" else torch.device("cpu")
        decoder = build_decoder(open_checkpoint(tmp_path / "q.gguf"), device=where, kernels=kernels)
        run = PagedRun(decoder)
        if kernels == "triton":
            run.storages = [
                replace(pages, keys=pages.keys.to(device), values=pages.values.to(device))
                for pages in run.storages
            ]
            graphs = EagerReplay() if device.type == "cpu" else CudaGraphs()
            program = DecodeGraphs(decoder, run.storages, max_blocks=16, graphs=graphs, poison=True)
            run.decoder = program
        found[kernels] = torch.cat([part.cpu().clone() for step in steps for part in run.step(step)])
    assert relative_error(found["triton"], found["torch"]) < 1e-4
    assert program.counts.eager == 0 and program.counts.replayed == 1
