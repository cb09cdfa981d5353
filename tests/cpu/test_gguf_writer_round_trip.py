"""Our own decoder computes the same from a folder and from the GGUF file that was written of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_quantize.writers import write_dense_gguf
from tests.support.conversion_cases import CASES
from tests.support.paged import PagedRun
from tests.support.tiny_models import make_tiny

_YARN_BETAS = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-window": ("phi3", {"sliding_window": 12}),
    "mistral-window": ("mistral", {"sliding_window": 12}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "llama-yarn-betas": ("llama", {"rope_scaling": {**_YARN_BETAS, "original_max_position_embeddings": 64}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
}
"""What llama.cpp ignores or lacks but our files carry."""


def _logits(path: Path, ids: list[int]) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    try:
        decoder = build_decoder(checkpoint)
        return PagedRun(decoder).step([("a", ids)])[0]
    finally:
        checkpoint.close()


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_the_file_computes_what_the_folder_computes(case: str, tmp_path: Path) -> None:
    """C13, D15, D01: past the fixtures' windows and original contexts."""
    arch, overrides = (CASES | MORE)[case]
    folder = make_tiny(arch, tmp_path / "m", **overrides)
    out = write_dense_gguf(folder, tmp_path / "m.gguf", "f32").path
    ids = torch.randint(0, 440, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    expected, found = _logits(folder, ids), _logits(out, ids)
    scale = expected.abs().max().item()
    assert scale > 5.0
    assert (expected - found).abs().max().item() < 1e-4 * scale
