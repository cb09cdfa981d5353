"""Layer skip from measuring to drafting, on a model of which it is known what may be left out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from edgellm.cache.kv_storage import kv_type
from edgellm.cli.layer_skip import LayerSkip, finish
from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.runner.skip_probe import SkipProbe
from edgellm.speculative.calibration import Costs
from edgellm.speculative.skip_profile import SkipProfile, save_profile
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.engines import Result, run_all
from tests.support.paged import PagedRun
from tests.support.skip_probe import COSTS, DEAD, LAYERS, give_costs, make_partly_dead

PROMPTS = ([5, 9, 33, 70, 12, 8, 101], list(range(40, 60)), [7, 7, 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_partly_dead(tmp_path_factory.mktemp("m"))


def prepared(folder: Path, kv: str = "f32") -> tuple[SkipProbe, Decoder]:
    decoder = build_decoder(open_checkpoint(folder), kernels="torch")
    probe = SkipProbe(decoder, kv_type(kv), PROMPTS)
    for _ in probe.prepare():
        pass
    return probe, decoder


@pytest.mark.parametrize("kv", ["f32", "fp8", "int8"])
def test_scores_know_what_is_dead(kv: str, folder: Path) -> None:
    probe, _ = prepared(folder, kv)
    nothing = finish(probe.score(SkippedSubLayers(), rough=False))
    assert nothing.match == 1.0 and nothing.loss < 1e-6 and len(nothing.hits) >= 100
    dead = finish(probe.score(DEAD, rough=False))
    assert dead.match == 1.0 and dead.loss < 1e-5
    assert all(0 < confidence <= 1.0 for confidence in dead.confidences)
    for live in (SkippedSubLayers.of((4,)), SkippedSubLayers.of((), (4,)), SkippedSubLayers.of((2,), (1,))):
        score = finish(probe.score(live, rough=False))
        assert score.match < 1.0 and score.loss > 1e-4
        assert len(finish(probe.score(live, rough=True)).hits) < len(score.hits)
    # Nothing that a pass wrote is left where another reads.
    assert finish(probe.score(SkippedSubLayers(), rough=False)) == nothing


def test_a_score_is_what_a_draft_says_behind_the_whole_model(folder: Path) -> None:
    """Place by place: the model runs the text, then one token without some sub-layers."""
    probe, decoder = prepared(folder)
    skipped = SkippedSubLayers.of((2, 4), (4, 5))
    hits = finish(probe.score(skipped, rough=False)).hits
    checked = 0
    rows = [(batch, row) for batch in probe._batches for row in range(len(batch.token_ids))]
    for index in range(0, len(rows), 17):
        batch, row = rows[index]
        position, token = int(batch.positions[row]), int(batch.token_ids[row])
        texts = [t.token_ids for t in probe._texts if t.token_ids[position : position + 1] == [token]]
        expected = set()
        for text in texts:  # which one it was: nearly always there is but one
            run = PagedRun(decoder)
            run.step([("a", text[:position])])
            whole = PagedRun(decoder)
            best = torch.cat(whole.step([("a", text[: position + 1])]))[-1].argmax()
            original = decoder.run

            def without(batch, kv, original=original):  # type: ignore[no-untyped-def]
                return original(batch, kv, skipped)

            decoder.run = without  # type: ignore[method-assign]
            try:
                guess = torch.cat(run.step([("a", [token])]))[-1].argmax()
            finally:
                del decoder.run  # type: ignore[method-assign]
            expected.add(bool(guess == best))
        checked += len(expected) == 1
        assert hits[index] in expected
    assert checked >= 5 and 0 < sum(hits) < len(hits)


def test_relative_changes_are_those_of_the_residual_stream(folder: Path) -> None:
    probe, _ = prepared(folder)
    changes = probe.changes()
    assert set(changes) == set(itertools.product(("attention", "feed_forward"), range(LAYERS))) - {
        ("feed_forward", LAYERS - 1)
    }
    for (kind, layer), change in changes.items():
        assert (change < 1e-6) == (layer in getattr(DEAD, kind)), (kind, layer)


def loaded(folder: Path, spec: str) -> Runtime:
    resolved = EngineConfig(spec=spec, ctx=256, kernels="torch").resolve(environ={})
    return load_runtime(resolved, folder, "tiny")


def profile_of(skip: LayerSkip, monkeypatch: pytest.MonkeyPatch) -> SkipProfile:
    give_costs(COSTS, monkeypatch)
    return finish(skip.calibrate(budget_s=1e9))


def state(runtime: Runtime) -> str:
    assert runtime.layer_skip is not None
    return runtime.layer_skip.speculator.state


def answer(runtime: Runtime) -> Result:
    ticks = itertools.count()
    runtime.core._clock = lambda: 0.01 * next(ticks)  # every step takes as long
    ids = tuple(runtime.tokenizer.encode("one two three four"))
    sampling = SamplingParams(temperature=0.9, seed=5, max_new_tokens=60, ignore_eos=True)
    return run_all(runtime.core, [GenerationRequest("a", ids, sampling)])[0]


def test_a_calibrated_model_drafts_by_its_profile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the dead sub-layers, is loaded with the model from then on, and keeps every token it drafts;
    the text is that of plain decoding. Without a profile nothing is drafted, and --spec skip says so."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    expected = answer(loaded(folder, "off")).token_ids
    before = loaded(folder, "skip")
    assert [n for n in before.notices if n.kind == "spec_skip" and "bench spec" in n.detail]
    assert answer(before).token_ids == expected and before.core.stats.draft.proposed == 0
    assert "not calibrated" in state(loaded(folder, "auto"))

    assert before.layer_skip is not None
    profile = profile_of(before.layer_skip, monkeypatch)
    assert profile.calibration.chosen.skipped == DEAD and profile.calibration.pays
    assert profile.calibration.chosen.match == 1.0
    save_profile(profile, tmp_path / "cache" / "skip")
    for spec in ("skip", "auto"):
        runtime = loaded(folder, spec)
        assert not [n for n in runtime.notices if n.kind == "spec_skip"]
        found = answer(runtime)
        assert found.token_ids == expected
        stats = runtime.core.stats
        assert "skip" in state(runtime)
        if spec == "skip":
            assert stats.draft.proposed > 20 and stats.draft.accepted == stats.draft.proposed


def test_a_profile_that_does_not_pay_is_not_used_unless_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    dear = Costs(0.001, 0.001, {2: 1.5, 4: 2.5, 8: 5.0, 16: 10.0})
    give_costs(dear, monkeypatch)
    skip = loaded(folder, "auto").layer_skip
    assert skip is not None
    profile = finish(skip.calibrate(budget_s=1e9))
    assert not profile.calibration.pays
    path = save_profile(profile, tmp_path / "cache" / "skip")
    auto = loaded(folder, "auto")
    assert auto.runner is not None and auto.runner.drafter is None
    assert "skip: predicted 0." in state(auto)
    asked = loaded(folder, "skip")
    assert [n for n in asked.notices if n.kind == "spec_skip" and "drafts all the same" in n.detail]
    assert asked.runner is not None and asked.runner.drafter is not None
    path.write_text("{")
    damaged = loaded(folder, "auto")
    assert [n for n in damaged.notices if n.kind == "spec_profile" and "damaged" in n.detail]
