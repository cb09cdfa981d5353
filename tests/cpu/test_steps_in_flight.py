"""A step in flight while the next is planned: the same answers, nothing that waits, ends seen a step late."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm.contracts import (
    PENDING,
    ConstraintKind,
    ConstraintSpec,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StepPlan,
    StepResult,
)
from edgellm.engine.engine import Engine
from edgellm.engine.flights import Flights
from edgellm.runner.decode_graphs import DecodeGraphs
from edgellm.runner.late_draws import MAX_DRAWN, FinishedStep, LateStep, has_pending
from edgellm.runner.model_runner import ModelRunner
from edgellm.runner.step_buffers import StepBuffers, StepSize
from edgellm.speculative.speculator import make_speculator
from edgellm_kernels.batch import filled_ids
from edgellm_models.errors import EngineError
from tests.support.bigram import make_bigram
from tests.support.engines import LoadedEngine, joined, load_engine, run_all, run_joining
from tests.support.tiny_models import make_tiny

DRAWN = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, min_p=0.02, seed=7, max_new_tokens=14)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)


def mixed_requests(loaded: LoadedEngine) -> list[GenerationRequest]:
    """Every kind of answer at once: drawn on the device or not, scored, constrained, several of a prompt."""
    rng = random.Random(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, loaded.engine.vocab_size) for _ in range(count))

    penalized = SamplingParams(temperature=0.8, seed=2, repetition_penalty=1.3, max_new_tokens=12)
    return [
        GenerationRequest("greedy", ids(5), GREEDY),
        GenerationRequest("long", ids(60), GREEDY),
        GenerationRequest("drawn", ids(9), DRAWN),
        GenerationRequest("plain", ids(3), SamplingParams(temperature=1.0, seed=4, max_new_tokens=15)),
        GenerationRequest("penalized", ids(7), penalized),
        GenerationRequest("typical", ids(7), SamplingParams(typical_p=0.7, seed=5, max_new_tokens=9)),
        GenerationRequest("scored", ids(6), GREEDY, logprobs=2, prompt_logprobs=1),
        GenerationRequest("samples", ids(20), DRAWN, num_samples=3),
        GenerationRequest(
            "digits", ids(4), DRAWN, constraint=ConstraintSpec(ConstraintKind.REGEX, "[a-z0-9 ]{3,9}")
        ),
        GenerationRequest("one", ids(2), SamplingParams(temperature=0.0, max_new_tokens=1)),
    ]


def watched(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, Any]]:
    """Every launch with what it gave."""
    launches: list[tuple[StepPlan, Any]] = []
    launch = ModelRunner.launch

    def noted(self: ModelRunner, plan: StepPlan) -> Any:
        launches.append((plan, launch(self, plan)))
        return launches[-1][1]

    monkeypatch.setattr(ModelRunner, "launch", noted)
    return launches


# --- the same answers ---


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "static buffers"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_answer_is_that_of_one_step_after_another(
    arch: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join while others run, chunks of prompts among them; slots that a step has yet to write hold
    NaN, and so do static buffers between two steps."""
    path = make_tiny(arch, tmp_path / arch)
    plain = load_engine(path, context=128, chunk=24)
    requests = mixed_requests(plain)
    expected = run_joining(plain, requests, 2)
    ahead = load_engine(path, context=128, chunk=24, depth=1, graphs=graphs, poison=True)
    launches = watched(ahead, monkeypatch)
    for one, wanted in zip(run_joining(ahead, requests, 2), expected, strict=True):
        assert one.token_ids == wanted.token_ids and one.reason == wanted.reason
        assert one.text == wanted.text
    pending = [step for plan, step in launches if has_pending(plan)]
    assert sum(isinstance(step, LateStep) for step in pending) > 5
    assert any(isinstance(step, FinishedStep) for step in pending)


@pytest.mark.parametrize("blocks", [14, 22])
def test_few_blocks_and_preemptions(blocks: int, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m")
    options: dict[str, Any] = {"context": 128, "block_size": 8, "num_blocks": [blocks], "prefix_cache": False}
    requests = [r for r in mixed_requests(load_engine(path)) if r.request_id != "samples"]
    expected = {
        one.request_id: run_all(load_engine(path, **options).engine, [one])[0].token_ids for one in requests
    }
    ahead = load_engine(path, depth=1, poison=True, **options)
    found = run_joining(ahead, requests, 1)
    kinds = {e.notice.kind for result in found for e in result.events if e.notice is not None}
    assert kinds & {"preempted", "queued_for_blocks"}
    for one, result in zip(requests, found, strict=True):
        assert result.token_ids == expected[one.request_id], one.request_id


def test_more_answers_than_are_drawn_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path / "m")
    many = MAX_DRAWN + 3
    options: dict[str, Any] = {"context": 64, "max_running": many, "num_blocks": [4 * many]}
    requests = [GenerationRequest(f"r{i}", (5 + i, 9), GREEDY) for i in range(many)]
    expected = run_all(load_engine(path, **options).engine, requests)
    ahead = load_engine(path, depth=1, **options)
    launches = watched(ahead, monkeypatch)
    found = run_all(ahead.engine, requests)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert any(isinstance(step, FinishedStep) and has_pending(plan) for plan, step in launches)


# --- nothing waits ---


def test_a_launch_reads_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would wait for the device. The reference kernels are left out: they do."""
    loaded = load_engine(make_tiny("llama", tmp_path / "m"), context=64, depth=1, graphs=True)
    launch, run = ModelRunner.launch, DecodeGraphs.run
    guarding = False

    def guard(name: str) -> None:
        plain = getattr(torch.Tensor, name)

        def watched(*arguments: Any) -> Any:
            assert not guarding, f"a launch waits for what it launched: {name}"
            return plain(*arguments)

        monkeypatch.setattr(torch.Tensor, name, watched)

    def guarded_launch(self: ModelRunner, plan: StepPlan) -> Any:
        nonlocal guarding
        guarding = has_pending(plan)
        try:
            return launch(self, plan)
        finally:
            guarding = False

    def free_run(*arguments: Any) -> Any:
        nonlocal guarding
        before, guarding = guarding, False
        found = run(*arguments)
        guarding = before
        return found

    for name in ("tolist", "item", "__float__", "__int__", "__bool__", "numpy"):
        guard(name)
    monkeypatch.setattr(ModelRunner, "launch", guarded_launch)
    monkeypatch.setattr(DecodeGraphs, "run", free_run)
    requests = [GenerationRequest("a", (5, 9), GREEDY), GenerationRequest("b", (7, 8), DRAWN)]
    assert len(run_all(loaded.engine, requests)[0].token_ids) == 14


def test_the_host_is_filled_beside_the_copy_of_the_step_before() -> None:
    """Two host twins in turn: what is being sent is not written."""
    buffers = StepBuffers(StepSize(1, 1, (16,)), 16, torch.device("cpu"))
    first = buffers._long.here["token_ids"].data_ptr()
    buffers._long.send()
    second = buffers._long.here["token_ids"].data_ptr()
    buffers._long.send()
    assert second != first == buffers._long.here["token_ids"].data_ptr()


def test_pending_ids_are_filled_in() -> None:
    ids = filled_ids(
        torch.tensor([4, PENDING, 6, PENDING]), torch.tensor([-1, 2, -1, 0]), torch.tensor([7, 8, 9])
    )
    assert ids.tolist() == [4, 9, 6, 7]


# --- ends ---


def bigram(tmp_path: Path, **options: Any) -> LoadedEngine:
    return load_engine(make_bigram(tmp_path / "m", ["a", "b", "c"], context=256), depth=1, **options)


def test_an_end_is_seen_a_step_late_and_nothing_is_kept_of_that_step(tmp_path: Path) -> None:
    loaded = bigram(tmp_path)
    ids = tuple(loaded.tokenizer.encode("a"))
    [result] = run_all(loaded.engine, [GenerationRequest("x", ids, SamplingParams(temperature=0.0))])
    assert result.text == "bc" and result.reason is FinishReason.STOP
    assert not loaded.engine.has_work()
    loaded.engine.check_integrity()


def test_cancelled_while_its_step_is_in_flight(tmp_path: Path) -> None:
    path = make_bigram(tmp_path / "m", ["a", "b"], loop=True, context=256)
    loaded = load_engine(path, depth=1)
    ids = tuple(loaded.tokenizer.encode("a"))
    endless = SamplingParams(temperature=0.0, max_new_tokens=100)
    for name in ("x", "y"):
        loaded.engine.submit(GenerationRequest(name, ids, endless))
    events = [event for _ in range(10) for event in loaded.engine.step()]
    loaded.engine.cancel("x")
    while loaded.engine.has_work():
        events += loaded.engine.step()
        loaded.engine.check_integrity()
    assert joined(events, "x").reason is FinishReason.CANCELLED
    other = joined(events, "y")
    assert other.text == "ba" * 50 and other.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_unusable_logits_end_their_own_answer(
    bad: float,
    temperature: float,
    filters: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step behind them has begun by then; the other answer goes on."""
    path = make_bigram(tmp_path / "m", ["a", "b"], loop=True, context=256)
    loaded = load_engine(path, depth=1, graphs=True)
    logits, steps = DecodeGraphs.logits, itertools.count()

    def damaged(self: DecodeGraphs, rows: Any) -> torch.Tensor:
        found = logits(self, rows).clone()
        if next(steps) == 6:
            found[1] = bad
        return found

    monkeypatch.setattr(DecodeGraphs, "logits", damaged)
    ids = tuple(loaded.tokenizer.encode("a"))
    sampling = SamplingParams(temperature=temperature, seed=1, max_new_tokens=30, **filters)
    good, failed = run_all(
        loaded.engine, [GenerationRequest("good", ids, sampling), GenerationRequest("bad", ids, sampling)]
    )
    assert good.text == "ba" * 15
    assert failed.reason is FinishReason.ERROR and 0 < len(failed.token_ids) < 10
    assert "damaged weights" in str(failed.events[-1].error)


def test_drafts_and_steps_in_flight_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="in flight"):
        load_engine(make_tiny("llama", tmp_path / "m"), depth=1, speculator=make_speculator("auto"))


# --- times ---


class ClockedRunner:
    """Steps that take a second on the device, one after another; launching takes a tenth."""

    def __init__(self) -> None:
        self.now, self.free_at = 0.0, 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> Any:
        self.now += 0.1
        self.free_at = end = max(self.now, self.free_at) + 1.0
        outer = self

        class Step:
            def result(self) -> StepResult:
                outer.now = max(outer.now, end)
                return StepResult(plan.step, ())

        return Step()


def test_the_times_of_overlapping_steps_add_up_to_what_passed() -> None:
    runner = ClockedRunner()

    def clock() -> float:
        return runner.now

    flights = Flights(runner, 1, clock)
    spans = []
    for step in range(5):
        flights.launch(StepPlan(step, ()), clock())
        if flights.too_many:
            landed = flights.land()
            spans.append((landed.start, landed.began, clock()))
    while flights:
        landed = flights.land()
        spans.append((landed.start, landed.began, clock()))
    assert all(start == end for (_, _, end), (start, _, _) in itertools.pairwise(spans))
    assert sum(end - start for start, _, end in spans) == pytest.approx(clock())
    assert all(end - began == pytest.approx(1.0) for _, began, end in spans[1:])
    assert [len(flights), flights.too_many] == [0, False]


def test_an_engine_waits_for_steps_in_flight_before_it_is_idle(tmp_path: Path) -> None:
    loaded = bigram(tmp_path)
    engine: Engine = loaded.engine
    engine.submit(GenerationRequest("x", tuple(loaded.tokenizer.encode("a")), GREEDY))
    engine.step()
    assert engine._flights is not None and len(engine._flights) == 1
    engine.cancel("x")
    seen = 0
    while engine.has_work():
        engine.step()
        seen += 1
        assert seen < 5
    engine.check_integrity()
