"""Mean KL divergence of a model from its dense twin in f32, over windows that calibration never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from acceptance.quality_text import held_out_windows
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint
from edgellm_models.network.build import LayerLoader
from edgellm_models.tokenizer import load_chat_templates, load_tokenizer
from edgellm_quantize.capture import open_stream

WINDOW, UNSCORED = 512, 128
_AT_ONCE = 8
"""Windows that run at once."""
_HEAD_ROWS = 256


def encoder(checkpoint: Checkpoint) -> Callable[[str], list[int]]:
    """Text to ids, special tokens as such."""
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    return lambda text: tokenizer.encode(text, add_special=False, parse_special=True)


def run_layers(loader: LayerLoader, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """f32 [windows, tokens, hidden] before the last norm, in f32 weights and activations; windows are of one
    length."""
    stream = open_stream(loader, windows, _AT_ONCE * WINDOW)
    for index in range(loader.spec.num_layers):
        stream.forward(loader.layer(index), index)
    return torch.cat([part.view(-1, len(windows[0]), loader.spec.hidden_size) for part in stream.state()])


def output_head(loader: LayerLoader) -> Callable[[torch.Tensor], torch.Tensor]:
    """The last norm and the head: f32 [rows, hidden] to logits [rows, vocabulary]."""
    norm, head = loader.output_norm(), loader.head()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        prepared, _ = loader.kernels.add_rms_norm(None, hidden, norm, loader.spec.rms_eps)
        return loader.kernels.lm_head(prepared, head, loader.spec.final_softcap).float()

    return logits


def hidden_states(checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """f32 [windows, scored, hidden] before the last norm."""
    return run_layers(LayerLoader(checkpoint), windows)[:, UNSCORED:].contiguous()


def divergences(
    twin: Checkpoint, wanted: torch.Tensor, model: Checkpoint, found: torch.Tensor
) -> torch.Tensor:
    """KL(twin || model) of every scored token [windows, scored]; logits are made a few rows at a time."""
    heads = [
        (output_head(LayerLoader(checkpoint)), hidden.view(-1, hidden.shape[-1]))
        for checkpoint, hidden in ((twin, wanted), (model, found))
    ]
    rows = []
    for start in range(0, len(heads[0][1]), _HEAD_ROWS):
        part = slice(start, start + _HEAD_ROWS)
        logs = [logits(hidden[part]).log_softmax(-1) for logits, hidden in heads]
        rows.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    return torch.cat(rows).view(wanted.shape[:2])


def twin_loss(twin_path: Path, opener: Callable[[], Checkpoint], scored: int) -> dict[str, Any]:
    """Mean KL and its standard error over windows, whose tokens are not independent of each other.

    The twin's hidden states are kept in a file beside it.
    """
    with closing(open_checkpoint(twin_path)) as twin:
        templates = load_chat_templates(twin.path, twin.file_format, twin.metadata)
        windows, kinds = held_out_windows(encoder(twin), templates, scored, WINDOW, UNSCORED)
        reference = twin_path.with_name(f"reference-{len(windows)}.pt")
        if not reference.exists():
            torch.save(hidden_states(twin, windows), reference)
        wanted = torch.load(reference, weights_only=True)
        model = opener()
        try:
            found = divergences(twin, wanted, model, hidden_states(model, windows))
        finally:
            model.close()
    means = found.mean(1).double()
    by_kind = {
        kind: float(means[[i for i, k in enumerate(kinds) if k == kind]].mean())
        for kind in sorted(set(kinds))
    }
    return {
        "kl": float(means.mean()),
        "standard_error": float(means.std()) / len(means) ** 0.5,
        "by_kind": by_kind,
        "scored": found.numel(),
    }
