"""What quantized KV costs in the real models: KL against f32 KV over one context, scored in small chunks."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.tokenizer import load_tokenizer
from tests.support.greedy_prompts import LONG_PROMPT
from tests.support.paged import PagedRun
from tests.support.real_models import real_model

CHUNK = 16
SCORED = 400


@cache
def decoder(name: str) -> Decoder:
    return build_decoder(open_checkpoint(real_model(name)))


@cache
def token_ids(name: str) -> tuple[int, ...]:
    checkpoint = open_checkpoint(real_model(name))
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    ids = tokenizer.encode(LONG_PROMPT)[:SCORED]
    assert len(ids) == SCORED
    return tuple(ids)


def score(name: str, kv_type: str | tuple[str, str], tails: bool = True) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after every token of the context."""
    run = PagedRun(decoder(name), num_blocks=80, block_size=16, kv_type=kv_type, tails=tails)
    ids = token_ids(name)
    with torch.inference_mode():
        parts = [run.step([("a", ids[i : i + CHUNK])])[0] for i in range(0, len(ids), CHUNK)]
    return torch.cat(parts).log_softmax(-1)


@cache
def exact(name: str) -> torch.Tensor:
    return score(name, "f32")


def kl(name: str, kv_type: str | tuple[str, str], tails: bool = True) -> float:
    """Mean KL divergence of the distributions from those with f32 KV, in nats per token."""
    reference, ours = exact(name), score(name, kv_type, tails)
    assert torch.isfinite(ours).all()
    found = float((reference.exp() * (reference - ours)).sum(-1).mean())
    print(f"{name} {kv_type}{'' if tails else ' without tail'}: KL {found:.2e}")
    return found


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_quantized_kv_stays_close_to_exact_kv(name: str) -> None:
    """The promised bounds over 400 tokens (acceptance takes 4,096); NaN bytes elsewhere. Of fp8, for which
    nothing is promised, what was measured twice over; int8 in the same bytes is closer."""
    assert 1e-7 < kl(name, "int8") <= 0.002
    assert kl(name, "int8") < kl(name, "fp8") <= 0.006
    assert 1e-5 < kl(name, "int4") <= 0.05


@pytest.mark.real_model
def test_errors_in_keys_and_in_values() -> None:
    """Each alone stays within the bounds of both; mixed int8 keys with int4 values are better than int4."""
    name = "smollm2-135m"
    assert kl(name, ("int8", "f32")) <= 0.002 and kl(name, ("f32", "int8")) <= 0.002
    assert kl(name, ("fp8", "f32")) <= 0.006 and kl(name, ("f32", "fp8")) <= 0.001
    assert kl(name, ("int4", "f32")) <= 0.05 and kl(name, ("f32", "int4")) <= 0.05
