"""fp8 KV: codes and rows by the format's definition; in the engine one text, however it comes about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.cli.runtime import load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.speculative.ngram import NgramDrafter
from edgellm.speculative.speculator import Speculator
from edgellm_kernels.kv_store_torch import dequantize, quantize_fp8
from tests.support import e4m3
from tests.support.engines import LoadedEngine, Result, load_engine, run_all
from tests.support.native_cases import needs_native
from tests.support.tiny_models import make_tiny

BLOCK, NEW = 8, 24
CLOSE = 0.02
"""torch sums one row in another order than several, and a code that flips moves logits by less than this."""


# --- rows ---


def test_every_e4m3_code_is_read_as_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    back = dequantize(codes.view(-1, 1), torch.full((256, 1), 0.5, dtype=torch.float16)).flatten().tolist()
    for code in range(256):
        if code & 127 == 127:
            assert math.isnan(back[code])
        else:
            assert back[code] * 2 == float(e4m3.value(code)), code


def test_fp8_takes_the_nearest_code_halves_to_even() -> None:
    """Rows whose scale is 1: at every value and midpoint, and the f32 on either side of it."""
    x = e4m3.telling_values()
    rows = torch.stack((x, torch.full_like(x, 448.0)), dim=-1)
    codes, scales = quantize_fp8(rows)
    assert bool((scales == 1).all())
    assert torch.equal(codes[:, 0].view(torch.uint8), e4m3.nearest_codes(x.tolist()))
    assert bool((codes[:, 1].view(torch.uint8) == 126).all())


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_fp8_is_off_by_at_most_a_sixteenth_of_an_element(size: float) -> None:
    x = torch.randn((40, 3, 64)) * size
    x[0] = 0
    x[1, :, 5] *= 100  # an outlier costs no other element anything
    f, scales = quantize_fp8(x)
    assert f.dtype == torch.float8_e4m3fn and scales.dtype == torch.float16 and scales.shape == (40, 3, 1)
    assert bool((f.view(torch.uint8) & 127 < 127).all()), "no NaN is stored"
    # Below the normal numbers steps are 2^-9 of the scale; a scale below f16's normal numbers is coarse.
    coarse = (x.abs().amax(-1, keepdim=True) < 448 * 2**-14) * 0.02
    error = (dequantize(f, scales) - x).abs()
    assert bool((error <= x.abs() * (2**-4 + coarse) + scales.float() * 2**-10).all())
    assert bool((error[0] == 0).all())
    tops = f[2:].float().abs().amax(-1)
    assert bool((tops >= 416).all()), "the range is used"


# --- the engine ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("m") / "llama", quantizable=True)


def load(folder: Path, kernels: str, **options: Any) -> LoadedEngine:
    return load_engine(folder, context=256, chunk=16, block_size=BLOCK, kv="fp8", kernels=kernels, **options)


def asked(name: str, ids: Sequence[int]) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    return GenerationRequest(name, tuple(ids), sampling, logprobs=2)


def certain(result: Result) -> list[int]:
    """The ids before the first place where rounding could choose another."""
    margins = [p.top[0][1] - p.top[1][1] for e in result.events for p in e.logprobs]
    assert len(margins) == NEW
    end = next((i for i, margin in enumerate(margins) if margin < CLOSE), NEW)
    assert end > NEW // 2, "too many ties to tell anything"
    return result.token_ids[:end]


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_the_text_is_that_of_plain_decoding(folder: Path, kernels: str) -> None:
    plain = load(folder, kernels, prefix_cache=False, max_running=1)
    text = plain.tokenizer.encode("one two three four five six one two three four five six one two three")
    prompts = [text, [*text[:20], 7, 9, 30, 5, 11]]
    expected = [certain(run_all(plain.engine, [asked("p", ids)])[0]) for ids in prompts]

    def check(results: Sequence[Result]) -> None:
        for result, ids in zip(results, expected, strict=True):
            assert result.token_ids[: len(ids)] == ids

    reusing = load(folder, kernels)
    for _ in range(2):
        results = [run_all(reusing.engine, [asked("r", ids)])[0] for ids in prompts]
        check(results)
    usage = results[0].events[-1].usage
    assert usage is not None and usage.cached_tokens >= len(text) // BLOCK * BLOCK - BLOCK > 0

    drafting = load(folder, kernels, speculator=Speculator(NgramDrafter()), lookahead=6, poison=True)
    # Drafts that are right at first, then wrong, then right again.
    predicted = [
        replace(asked(f"d{i}", ids), prediction_token_ids=(*answer[:7], 9, *answer[8:]))
        for i, (ids, answer) in enumerate(zip(prompts, expected, strict=True))
    ]
    results = run_all(drafting.engine, predicted)
    check(results)
    assert sum(e.draft.accepted for r in results for e in r.events if e.draft is not None) > 0

    for host_blocks in (0, 16):  # computed again, or brought back
        little = load(folder, kernels, num_blocks=[9], host_blocks=host_blocks, prefix_cache=False)
        results = run_all(little.engine, [asked(f"l{i}", ids) for i, ids in enumerate(prompts)])
        check(results)
        told = [e.notice.detail for r in results for e in r.events if e.notice is not None]
        assert any("host memory" in detail for detail in told) == (host_blocks > 0)
        assert told and little.engine.stats.kv_blocks["used"] == 0


@needs_native
def test_who_asks_for_fp8_is_told_who_computes_it(folder: Path) -> None:
    """Native kernels have none for it: torch does, and a notice names int8. Torch asked for by name is no
    news."""
    settings = EngineConfig(kv_dtype="fp8", ctx=256, device="cpu")
    runtime = load_runtime(settings.resolve(environ={}), folder, "m")
    [notice] = [notice for notice in runtime.notices if notice.kind == "kv_on_torch"]
    assert "fp8" in notice.detail and "--kv-dtype int8" in notice.detail
    assert any("fp8 KV cache" in notice.detail for notice in runtime.notices)
    for other in (replace(settings, kernels="torch"), replace(settings, kv_dtype="int8")):
        runtime = load_runtime(other.resolve(environ={}), folder, "m")
        assert "kv_on_torch" not in {notice.kind for notice in runtime.notices}
