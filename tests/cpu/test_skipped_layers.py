"""A forward pass without some sub-layers: what it leaves out, what it writes, and what it may not touch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgellm.contracts import GenerationRequest, SamplingParams, TokenEvent
from edgellm.speculative.speculator import Speculator
from edgellm_kernels.native_library import load_library
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.dead_layers import make_with_dead
from tests.support.engines import LoadedEngine, load_engine, run_all
from tests.support.paged import PagedRun, relative_error
from tests.support.speculation import BLOCK, KINDS, check_rounds, mixed_requests, outcomes, proposed

LAYERS = 10
DEAD = SkippedSubLayers.of(attention=(2, 3, 5, 8), feed_forward=(1, 3, 6, 7))
"""8 of the 20 sub-layers."""
IDS = torch.randint(5, 200, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def decoder_of(arch: str, folder: Path, kernels: str = "torch", scale: float = 0.0) -> Decoder:
    path = make_with_dead(
        arch,
        folder,
        num_layers=LAYERS,
        attention=DEAD.attention,
        feed_forward=DEAD.feed_forward,
        scale=scale,
    )
    return build_decoder(open_checkpoint(path), kernels=kernels)


class Skipping:
    """A decoder that always leaves the same sub-layers out."""

    def __init__(self, decoder: Decoder, skipped: SkippedSubLayers) -> None:
        self.spec = decoder.spec
        self._decoder = decoder
        self._skipped = skipped

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        return self._decoder.logits(self._decoder.run(batch, kv, self._skipped))


def logits_of(decoder: Decoder, skipped: SkippedSubLayers | None) -> tuple[torch.Tensor, PagedRun]:
    """Of a prompt of 30 tokens and ten single ones."""
    run = PagedRun(decoder)
    if skipped is not None:
        run.decoder = Skipping(decoder, skipped)  # type: ignore[assignment]
    out = run.step([("a", IDS[:30])])
    for token in IDS[30:]:
        out += run.step([("a", [token])])
    return torch.cat(out), run


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_without_dead_sub_layers_the_model_says_the_same(arch: str, tmp_path: Path) -> None:
    """With norms behind the sub-layers (Gemma) and without; skipping a live one is seen."""
    decoder = decoder_of(arch, tmp_path / arch)
    whole, _ = logits_of(decoder, None)
    without, _ = logits_of(decoder, DEAD)
    assert relative_error(without, whole) < 1e-5
    for live in (
        SkippedSubLayers.of(attention=(4,)),
        SkippedSubLayers.of(feed_forward=(2,)),
    ):
        assert relative_error(logits_of(decoder, live)[0], whole) > 1e-2
    nothing, _ = logits_of(decoder, SkippedSubLayers())
    assert torch.equal(nothing, whole)


def test_nearly_dead_sub_layers_are_nearly_not_missed(tmp_path: Path) -> None:
    decoder = decoder_of("llama", tmp_path / "llama", scale=0.01)
    whole, _ = logits_of(decoder, None)
    without, _ = logits_of(decoder, DEAD)
    agree = (whole.argmax(-1) == without.argmax(-1)).float().mean()
    assert not torch.equal(whole, without) and agree > 0.9


def test_a_skipped_attention_writes_no_keys_and_values(tmp_path: Path) -> None:
    """Its slots keep the NaN that they held; all others are written."""
    decoder = decoder_of("llama", tmp_path / "llama")
    _, run = logits_of(decoder, DEAD)
    [pages] = run.storages
    written = [bool(pages.keys[layer].isfinite().any()) for layer in range(LAYERS)]
    assert written == [layer not in DEAD.attention for layer in range(LAYERS)]


@pytest.mark.parametrize("layer", [-1, 0, LAYERS - 1, LAYERS])
def test_the_first_and_the_last_layer_stay_whole(layer: int) -> None:
    for wrong in (SkippedSubLayers.of(attention=(layer,)), SkippedSubLayers.of(feed_forward=(3, layer))):
        with pytest.raises(ValueError, match=f"layer {layer} cannot be skipped"):
            wrong.check(LAYERS)
    assert len(DEAD) == 8
    DEAD.check(LAYERS)


@pytest.mark.parametrize(
    ("scale", "skipped", "least", "most"),
    [
        (0.0, DEAD, 1.0, 1.0),
        (0.002, DEAD, 0.9, 1.0),
        (0.0, SkippedSubLayers.of(range(1, 9), range(1, 9)), 0.0, 0.5),
    ],
)
def test_drafts_by_layers_keep_the_text(
    scale: float, skipped: SkippedSubLayers, least: float, most: float, tmp_path: Path
) -> None:
    """Greedy and drawn, several at once, with penalties: in place in the same pages, NaN behind what is
    committed. Dead sub-layers are not missed: every drafted token is kept."""
    path = make_with_dead(
        "llama",
        tmp_path / "m",
        num_layers=LAYERS,
        attention=DEAD.attention,
        feed_forward=DEAD.feed_forward,
        scale=scale,
    )
    free = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    requests = [
        GenerationRequest("a", tuple(IDS), free),
        GenerationRequest("b", tuple(IDS[5:]), replace(free, temperature=0.8, seed=3, top_p=0.95)),
        GenerationRequest("c", tuple(IDS[9:]), replace(free, temperature=1.2, seed=4), num_samples=2),
    ]

    def run(speculator: Speculator | None, lookahead: int, kernels: str, kv: str) -> list[list[object]]:
        loaded = load_engine(
            path,
            context=128,
            block_size=8,
            kernels=kernels,
            kv=kv,
            speculator=speculator,
            lookahead=lookahead,
            skipped=skipped,
            poison=True,
        )
        results = run_all(loaded.engine, requests)
        counts = [e.draft for r in results for e in r.events if e.draft is not None]
        shares.append(sum(c.accepted for c in counts) / max(1, sum(c.proposed for c in counts)))
        return [[(e.sample, t) for e in sorted(r.events, key=_sample) for t in e.token_ids] for r in results]

    for kernels, kv in (("torch", "f32"), ("native", "int8")):
        if kernels == "native" and load_library() is None:
            continue
        shares: list[float] = []
        expected = run(None, 0, kernels, kv)
        assert run(Speculator(None, max_draft=5, runner_tokens=5), 5, kernels, kv) == expected
        assert least <= shares[1] <= most


@pytest.mark.parametrize(("kernels", "kv"), KINDS)
def test_no_setting_tells_drafts_by_layers_from_plain_decoding(kernels: str, kv: str, tmp_path: Path) -> None:
    """Penalties, biases, filters, grammars, stop strings, logprobs and predictions, all at once and one after
    another."""
    path = make_with_dead(
        "llama",
        tmp_path / "m",
        num_layers=LAYERS,
        attention=DEAD.attention,
        feed_forward=DEAD.feed_forward,
        scale=0.05,
    )

    def load(speculator: Speculator | None) -> LoadedEngine:
        return load_engine(
            path,
            context=256,
            chunk=16,
            block_size=BLOCK,
            kernels=kernels,
            kv=kv,
            speculator=speculator,
            lookahead=0 if speculator is None else 5,
            skipped=DEAD,
            poison=True,
        )

    plain = load(None)
    requests = mixed_requests(plain)
    expected = run_all(plain.engine, requests)
    loaded = load(Speculator(None, max_draft=5, runner_tokens=5))
    for results in (
        run_all(loaded.engine, requests),
        [one for request in requests for one in run_all(loaded.engine, [request])],
    ):
        # What was computed in another batch differs in the last bits on torch: logprobs do, tokens do not.
        assert [one[:3] for one in outcomes(results)] == [one[:3] for one in outcomes(expected)]
        drafted, kept = proposed(results)
        assert drafted > kept > 30


@pytest.mark.parametrize(("kernels", "kv"), KINDS)
@pytest.mark.parametrize("skipped", [DEAD, SkippedSubLayers.of((2, 4), (1, 4, 5))])
def test_committed_kv_is_that_of_a_fresh_prefill(
    skipped: SkippedSubLayers, kernels: str, kv: str, tmp_path: Path
) -> None:
    """After every round, in all layers, those that drafts skip too: verification has rewritten what drafts
    left in the places that it commits."""
    path = make_with_dead(
        "llama",
        tmp_path / "m",
        num_layers=LAYERS,
        attention=DEAD.attention,
        feed_forward=DEAD.feed_forward,
    )
    loaded = load_engine(
        path,
        context=128,
        block_size=BLOCK,
        kernels=kernels,
        kv=kv,
        speculator=Speculator(None, max_draft=5, runner_tokens=5),
        lookahead=5,
        skipped=skipped,
        poison=True,
    )
    sampling = SamplingParams(temperature=0.8, seed=2, max_new_tokens=14, ignore_eos=True)
    loaded.engine.submit(GenerationRequest("a", tuple(IDS), sampling))

    def once() -> LoadedEngine:
        return load_engine(path, context=128, block_size=BLOCK, kernels=kernels, kv=kv)

    rounds = check_rounds(loaded, once, exact=kernels == "native")
    drafted = loaded.engine.stats.draft
    assert rounds >= 2 and drafted.proposed > 8
    assert (drafted.accepted == drafted.proposed) == (skipped is DEAD)


@pytest.mark.parametrize(("policy", "keep"), [("window", 40), ("budget", 64)])
def test_drafts_by_layers_do_not_cross_the_borders_of_evictions(
    policy: str, keep: int, tmp_path: Path
) -> None:
    path = make_with_dead(
        "llama",
        tmp_path / "m",
        num_layers=LAYERS,
        attention=DEAD.attention,
        feed_forward=DEAD.feed_forward,
    )

    def run(speculator: Speculator | None) -> tuple[list[int], int]:
        loaded = load_engine(
            path,
            context=256,
            chunk=32,
            block_size=BLOCK,
            speculator=speculator,
            lookahead=0 if speculator is None else 6,
            skipped=DEAD,
            poison=True,
        )
        sampling = SamplingParams(temperature=0.7, seed=4, max_new_tokens=60, ignore_eos=True)
        request = GenerationRequest("a", tuple(IDS), sampling, kv_policy=policy, kv_keep=keep)
        [found] = run_all(loaded.engine, [request])
        assert any(e.notice and "evicted" in e.notice.kind for e in found.events)
        return found.token_ids, loaded.engine.stats.draft.accepted

    expected, _ = run(None)
    found, accepted = run(Speculator(None, max_draft=6, runner_tokens=6))
    assert found == expected and accepted > 30


def _sample(event: TokenEvent) -> int:
    return event.sample
