"""Layer skip calibrated in idle moments: never before an answer, in short parts, no harm when it fails."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from edgellm.cli import idle_calibration
from edgellm.cli.idle_calibration import calibrate_in_idle
from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.config import EngineConfig
from edgellm.contracts import GenerationRequest, SamplingParams
from edgellm.engine import async_engine
from edgellm.runner.skip_probe import SkipProbe, probe_bytes
from edgellm_models.network.sub_layers import SkippedSubLayers
from tests.support.skip_probe import COSTS, DEAD, give_costs, make_partly_dead
from tests.support.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_partly_dead(tmp_path_factory.mktemp("m"))


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    give_costs(COSTS, monkeypatch)
    return tmp_path / "cache" / "skip"


def loaded(folder: Path, spec: str = "auto") -> Runtime:
    return load_runtime(EngineConfig(spec=spec, ctx=256, kernels="torch").resolve(environ={}), folder, "tiny")


def parts_of(
    runtime: Runtime, profiles: Path, free: int | None = None, clock: Callable[[], float] | None = None
) -> int:
    """Runs what is to be done in idle moments to its end; how many parts it took."""
    assert runtime.layer_skip is not None
    parts = calibrate_in_idle(
        runtime.layer_skip, profiles, lambda: free, runtime.core.refresh_stats, clock=clock or (lambda: 0.0)
    )
    return sum(1 for _ in parts)


async def answer(runtime: Runtime, name: str) -> list[int]:
    ids = tuple(runtime.tokenizer.encode("one two three"))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    stream = runtime.engine.submit(GenerationRequest(name, ids, sampling))
    return [token async for event in stream for token in event.token_ids]


def test_a_model_is_calibrated_when_it_is_idle_after_an_answer(folder: Path, profiles: Path) -> None:
    """Not while nobody has asked yet; what it finds is used from then on and kept for the next start; a
    request that comes in the middle is answered as ever."""
    runtime = loaded(folder)
    engine = async_engine.AsyncEngine(runtime.core, idle_work=runtime.idle_work, idle_after_s=0.0)
    runtime._service = engine

    async def test() -> None:
        await asyncio.sleep(0.2)
        assert "not calibrated" in runtime.core.stats.draft_state
        before = await answer(runtime, "a")
        await until(lambda: "calibrating" in runtime.core.stats.draft_state, 120)
        assert await answer(runtime, "b") == before
        await until(lambda: engine._idle_work is None, 240)
        state = runtime.core.stats.draft_state
        assert "skip" in state and "calibrat" not in state
        assert await answer(runtime, "c") == before

    asyncio.run(test())
    runtime.close()
    [kept] = profiles.glob("skip-*.json")
    chosen = json.loads(kept.read_text())["chosen"]
    assert chosen["attention"] == sorted(DEAD.attention) and chosen["feed_forward"] == sorted(
        DEAD.feed_forward
    )
    again = loaded(folder)
    assert again.idle_work is None and again.runner is not None and again.runner.drafter is not None


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_nothing_is_calibrated_that_is_not_drafted_by(spec: str, folder: Path, profiles: Path) -> None:
    assert loaded(folder, spec).idle_work is None


def test_no_part_holds_a_request_up_for_long(folder: Path, profiles: Path) -> None:
    """Measurements of several passes come in several parts: one forward pass each, about."""
    passes = 0
    run = SkipProbe._logits

    def counted(self: SkipProbe, *arguments: object) -> object:
        nonlocal passes
        passes += 1
        return run(self, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SkipProbe, "_logits", counted)
        parts = parts_of(loaded(folder), profiles)
    assert passes > 100 and parts >= passes - 2


def test_a_model_whose_parts_take_too_long_is_left_alone(folder: Path, profiles: Path) -> None:
    runtime = loaded(folder)
    ticks = itertools.count(0, 2 * idle_calibration.MOST_PART_S)
    assert parts_of(runtime, profiles, clock=lambda: next(ticks)) < 3
    assert "too slow to calibrate" in runtime.core.stats.draft_state
    assert not list(profiles.parent.rglob("*.json"))


def test_memory_that_is_short_is_not_taken(folder: Path, profiles: Path) -> None:
    runtime = loaded(folder)
    skip = runtime.layer_skip
    assert skip is not None
    need = probe_bytes(skip.decoder.spec, skip.kv, skip.prompts())
    probe = SkipProbe(skip.program, skip.kv, skip.prompts())
    pages = sum(page.nbytes for page in probe._kv)
    assert pages < need <= pages + 2 * 16 * skip.decoder.spec.vocab_size * 4
    assert parts_of(runtime, profiles, free=2 * need) == 0
    assert "too little memory" in runtime.core.stats.draft_state
    assert parts_of(loaded(folder), profiles, free=5 * need) > 50


def test_a_failure_harms_nothing(folder: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: SkipProbe, skipped: SkippedSubLayers, *, rough: bool) -> Generator[None, None, None]:
        yield
        raise RuntimeError("of some kind")

    monkeypatch.setattr(SkipProbe, "score", fails)
    runtime = loaded(folder)
    parts_of(runtime, profiles)
    assert "calibrating failed: RuntimeError" in runtime.core.stats.draft_state
    assert len(asyncio.run(answer(runtime, "a"))) == 12
    runtime.close()


def test_a_folder_that_cannot_be_written_costs_the_file_only(folder: Path, profiles: Path) -> None:
    profiles.parent.mkdir(parents=True)
    profiles.write_text("a file where the folder would be")
    runtime = loaded(folder)
    parts_of(runtime, profiles)
    assert runtime.runner is not None and runtime.runner.drafter is not None
