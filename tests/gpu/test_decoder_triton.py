"""A whole decoder on the Triton kernels gives the logits of the torch ones: dense and quantized weights."""

# ruff: noqa: E402 (what is imported below needs the oracle)
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.oracles import require_oracle

require_oracle("gguf")

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_quantize.writers import write_quantized_gguf
from tests.support.paged import PagedRun, relative_error
from tests.support.tiny_models import make_tiny
from tests.support.triton_anywhere import serve_triton_anywhere


@pytest.mark.skipif(torch.cuda.is_available(), reason="PagedRun makes its tables on the CPU")
def test_a_quantized_model(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and one more token of a family with every norm, windows and a tied head, in Q4_K_M."""
    serve_triton_anywhere(monkeypatch, device)
    folder = make_tiny("gemma3", tmp_path / "model", quantizable=True, num_hidden_layers=2)
    write_quantized_gguf(folder, tmp_path / "q.gguf", "Q4_K_M")
    found = {}
    for kernels in ("torch", "triton"):
        decoder = build_decoder(open_checkpoint(tmp_path / "q.gguf"), device=device, kernels=kernels)
        run = PagedRun(decoder)
        parts = [*run.step([("a", [5, 9])]), *run.step([("a", [4])])]
        found[kernels] = torch.cat(parts)
        assert decoder.kernels.chosen["linear"] == kernels
    assert relative_error(found["triton"], found["torch"]) < 1e-4
