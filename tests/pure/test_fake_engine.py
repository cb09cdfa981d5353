"""The synchronous engine over a scripted runner, without torch: queue, prefill, ends, cancel, blocks,
counts.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgellm.cache.block_pool import BlockPool, blocks_for
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import FinishReason, GenerationRequest, SamplingParams, Task, TokenEvent
from edgellm.engine.engine import Engine
from edgellm_models.errors import BadInputError, EngineError
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_engine import (
    END_ID,
    ByteTokenizer,
    FakeAnswer,
    FakeEngine,
    FakeRunner,
)

BLOCK = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    script: Sequence[int] = tuple(b"hello world"),
    *,
    context: int = 64,
    burst: int = 1,
    chunk: int = 8,
    window: int | None = None,
    max_running: int = 16,
    clock: Clock | None = None,
    **runner_fields: object,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(lambda prompt: script, burst=burst, block_size=BLOCK, **runner_fields)  # type: ignore[arg-type]
    windows = (None,) if window is None else (None, window)
    groups = [GroupLayout(w, blocks_for(context, BLOCK, w, chunk) + 3) for w in windows]
    engine = Engine(
        runner,
        ByteTokenizer(),
        KVManager(groups, BLOCK, lookahead=burst - 1),
        context_length=context,
        vocab_size=258,
        make_decoder=lambda request: StreamDecoder(ByteTokenizer()),
        prefill_chunk=chunk,
        max_running=max_running,
        clock=clock or Clock(),
    )
    return engine, runner


def request(name: str = "r", prompt: bytes = b"prompt", **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**{"max_new_tokens": 11, **sampling}))  # type: ignore[arg-type]


def drain(engine: Engine, limit: int = 1000) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work():
        limit -= 1
        assert limit > 0, "the engine never ends"
        events += engine.step()
        engine.check_integrity()
    return events


def text_of(events: list[TokenEvent], name: str = "r", sample: int = 0) -> str:
    return "".join(e.text for e in events if e.request_id == name and e.sample == sample)


def test_one_answer() -> None:
    engine, _ = make()
    engine.submit(request(prompt=b"a prompt of 20 chars", seed=7))
    events = drain(engine)
    assert [e.prefill_done for e in events if e.prefill_done] == [8, 16, 20]
    assert text_of(events) == "hello world"
    last = events[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 11)
    assert last.seed == 7 and last.notice is None
    assert all(e.finish_reason is None and e.usage is None for e in events[:-1])


def test_without_a_seed_one_is_drawn_and_returned() -> None:
    seeds = []
    for _ in range(3):
        engine, runner = make()
        engine.submit(request())
        last = drain(engine)[-1]
        assert last.seed == runner.plans[0].started[0].seed
        seeds.append(last.seed)
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("burst", [1, 2, 3, 5, 7])
def test_several_tokens_per_step_are_as_one_by_one(burst: int, window: int | None) -> None:
    script = [*"héllo 😊 wörld STOP more".encode(), END_ID, *b"never"]
    for sampling in (
        {"stop": ("STOP",)},
        {"stop": ("wx", "o w")},
        {"max_new_tokens": 9},
        {"max_new_tokens": None},
        {"ignore_eos": True, "max_new_tokens": 33},
        {"stop_token_ids": (0x98,), "max_new_tokens": 40},
    ):
        results = []
        for n in (1, burst):
            engine, _ = make(script, burst=n, window=window)
            engine.submit(request(**{"max_new_tokens": 40, **sampling}))
            events = drain(engine)
            ids = [t for e in events for t in e.token_ids]
            last = events[-1]
            assert last.usage is not None and last.usage.completion_tokens == len(ids)
            results.append((ids, text_of(events), last.finish_reason, last.notice))
        assert results[0] == results[1]


@pytest.mark.parametrize(("most", "expected"), [(None, 4), (9, 4), (2, 2), (1, 1), (0, 0)])
def test_a_request_may_ask_for_shorter_drafts(most: int | None, expected: int) -> None:
    engine, runner = make(burst=5)
    engine.submit(replace(request(max_new_tokens=11), max_draft=most))
    assert text_of(drain(engine)) == "hello world"
    assert max(s.draft_limit for plan in runner.plans for s in plan.sequences) == expected


def test_the_text_of_the_stream_is_the_decode_of_the_whole() -> None:
    script = [*"é😊".encode(), 0xE2, *b" x", 0x80, 0xFF, *"ü".encode(), 0xF0, 0x9F]
    engine, _ = make(script)
    engine.submit(request(max_new_tokens=len(script)))
    events = drain(engine)
    assert text_of(events) == ByteTokenizer().decode(script)
    assert text_of(events).endswith("\ufffd")


def test_requests_wait_in_order_and_know_their_place() -> None:
    engine, _ = make(max_running=1)
    for name in "abc":
        engine.submit(request(name, max_new_tokens=2))
    events = drain(engine)
    places = [(e.request_id, e.queue_position) for e in events if e.queue_position]
    assert places == [("b", 1), ("c", 2), ("c", 1)]
    assert [e.request_id for e in events if e.finish_reason] == ["a", "b", "c"]


def test_samples_of_a_request_run_one_after_another() -> None:
    engine, runner = make()
    engine.submit(
        GenerationRequest("r", tuple(b"hi"), SamplingParams(max_new_tokens=5, seed=3), num_samples=3)
    )
    events = drain(engine)
    assert [text_of(events, sample=i) for i in range(3)] == ["hello"] * 3
    starts = [start for plan in runner.plans for start in plan.started]
    assert [(s.sample, s.seed) for s in starts] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_cancel_at_any_point(steps: int) -> None:
    """F18: in the queue, in the prefill (steps 1, 2) and in the answer; the next request runs as if alone."""
    engine, _ = make(window=6)
    engine.submit(request("a", prompt=b"a prompt of 20 chars"))
    engine.submit(request("b"))
    events: list[TokenEvent] = []
    for _ in range(steps):
        events += engine.step()
    engine.cancel("a")
    events += drain(engine)
    ends = {e.request_id: e for e in events if e.finish_reason}
    assert ends["a"].finish_reason is FinishReason.CANCELLED
    assert ends["b"].finish_reason is FinishReason.LENGTH and text_of(events, "b") == "hello world"
    done = ends["a"].usage
    assert done is not None and done.completion_tokens == max(0, steps - 2) == len(text_of(events, "a"))


def test_cancelled_text_is_complete() -> None:
    """What was held for a stop string or an incomplete character still comes out with the last event."""
    engine, _ = make([*b"abXY", 0xC3, *b"zz"])
    engine.submit(request(stop=("XYZ",)))
    events = [e for _ in range(5) for e in engine.step()]
    assert text_of(events) == "ab"
    engine.cancel("r")
    events += drain(engine)
    assert text_of(events) == "abXY\ufffd"


def test_cancel_of_one_that_ended_or_never_was() -> None:
    engine, _ = make()
    engine.cancel("ghost")
    engine.submit(request("a"))
    drain(engine)
    engine.cancel("a")
    engine.submit(request("a"))
    assert drain(engine)[-1].finish_reason is FinishReason.LENGTH


def test_200_random_cancels_leave_all_blocks_free() -> None:
    """F18: with a window group too, in any phase."""
    rng = random.Random(0)
    engine, runner = make(window=5, context=96)
    open_names: list[str] = []
    ended: list[str] = []
    for i in range(200):
        name = f"r{i}"
        engine.submit(request(name, prompt=bytes(rng.randrange(1, 250) for _ in range(rng.randrange(1, 60)))))
        open_names.append(name)
        for _ in range(rng.randrange(6)):
            ended += [e.request_id for e in engine.step() if e.finish_reason]
            engine.check_integrity()
        engine.cancel(rng.choice(open_names))
    ended += [e.request_id for e in drain(engine, limit=5000) if e.finish_reason]
    assert sorted(ended) == sorted(f"r{i}" for i in range(200))
    blocks = engine.stats.kv_blocks
    assert blocks["used"] == 0 and blocks["free"] + blocks["cached"] > 0
    engine.submit(request("after", prompt=bytes(80), max_new_tokens=16))
    assert drain(engine)[-1].finish_reason is FinishReason.LENGTH
    assert len(runner.prompts) <= 1, "the runner forgets ended sequences with the next plan"


def test_deadline_running_and_waiting() -> None:
    clock = Clock()
    engine, _ = make(clock=clock)
    for name in "ab":
        engine.submit(
            GenerationRequest(
                name, (65,), SamplingParams(max_new_tokens=50), deadline=105.0, arrival_time=100.0
            )
        )
    first = engine.step()
    clock.now = 106.0
    events = first + drain(engine)
    for name in "ab":
        last = next(e for e in events if e.request_id == name and e.finish_reason)
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.notice is not None and last.notice.kind == "deadline"


def test_context_full_is_said() -> None:
    engine, _ = make(context=16)
    engine.submit(request(prompt=b"0123456789", max_new_tokens=None))
    last = drain(engine)[-1]
    assert last.finish_reason is FinishReason.LENGTH and last.usage is not None
    assert last.usage.completion_tokens == 6
    assert last.notice is not None and last.notice.kind == "context_full"
    for number in ("16", "10", "6"):
        assert number in last.notice.detail


def test_a_limit_that_was_asked_for_is_no_notice() -> None:
    engine, _ = make(context=16)
    engine.submit(request(prompt=b"0123456789", max_new_tokens=6))
    assert drain(engine)[-1].notice is None


def test_no_tokens_asked_for_or_no_room() -> None:
    engine, runner = make(context=8)
    engine.submit(request("none", max_new_tokens=0))
    engine.submit(request("full", prompt=b"01234567"))
    events = drain(engine)
    none, full = events
    assert none.finish_reason is full.finish_reason is FinishReason.LENGTH
    assert none.usage is not None and none.usage.completion_tokens == 0 and none.notice is None
    assert full.notice is not None and full.notice.kind == "context_full"
    assert runner.plans == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": tuple(range(65))}, ["65", "64"]),
        ({"prompt_token_ids": ()}, ["empty"]),
        ({"prompt_token_ids": (5, 258)}, ["258"]),
        ({"prompt_token_ids": (-1,)}, ["-1"]),
        ({"num_samples": 0}, ["0"]),
        ({"logprobs": 21}, ["21", "20"]),
        ({"sampling": SamplingParams(logit_bias={300: 1.0})}, ["300", "258"]),
        ({"sampling": SamplingParams(logit_bias=dict.fromkeys(range(258), -100.0))}, ["every"]),
        ({"task": Task.EMBED, "pooling": "max"}, ["pooling", "max"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs", "21", "20"]),
        ({"kv_policy": "h2o"}, ["h2o", "stop"]),
        ({"kv_policy": "budget", "kv_keep": 1}, ["--kv-budget 1 ", "or more"]),
        ({"kv_policy": "window", "kv_keep": 0}, ["kv_keep", "0"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_values(
    change: dict[str, object], words: list[str]
) -> None:
    engine, _ = make()
    fields = {"request_id": "r", "prompt_token_ids": (1,), **change}
    with pytest.raises(BadInputError) as caught:
        engine.submit(GenerationRequest(**fields))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert not engine.has_work()


def test_an_open_id_is_refused() -> None:
    engine, _ = make()
    engine.submit(request("a"))
    with pytest.raises(EngineError, match="'a'"):
        engine.submit(request("a"))


def test_a_sequence_error_ends_its_own_request_only() -> None:
    """F14: the bad request ends with an error event, the next one is served."""
    engine, runner = make(error_at=3)
    engine.submit(request("bad"))
    events: list[TokenEvent] = []
    while not any(e.finish_reason for e in events):
        events += engine.step()
    assert events[-1].finish_reason is FinishReason.ERROR and "NaN" in (events[-1].error or "")
    assert text_of(events, "bad") == "hel"
    runner.error_at = None
    engine.submit(request("good"))
    assert text_of(drain(engine), "good") == "hello world"


def test_times_are_of_their_phases() -> None:
    clock = Clock()
    engine, _ = make(clock=clock, chunk=4)
    runner = engine._runner
    original = runner.execute

    def slow(plan):  # type: ignore[no-untyped-def]
        clock.now += 1.0
        return original(plan)

    runner.execute = slow  # type: ignore[method-assign]
    engine.submit(
        GenerationRequest("r", tuple(b"12345678"), SamplingParams(max_new_tokens=5), arrival_time=98.0)
    )
    last = drain(engine)[-1].timings
    assert last is not None
    assert (last.queued_s, last.prefill_s, last.decode_s) == (2.0, 2.0, 4.0)
    assert (last.ttft_s, last.prefill_tokens_per_s, last.decode_tokens_per_s) == (4.0, 4.0, 1.0)
    assert engine.stats.decode_tokens_per_s == pytest.approx(1.0)


def test_a_double_free_is_noticed() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(blocks)
    with pytest.raises(EngineError, match="4 free"):
        pool.allocate(5)


def test_fake_engine_plays_its_script() -> None:
    engine = FakeEngine(FakeAnswer([(1, "a"), (2, "b"), (3, "c")], burst=2, prefill=(5,)))
    engine.submit(request())
    events = []
    while engine.has_work():
        events += engine.step()
    assert [e.text for e in events] == ["", "ab", "c", ""]
    assert events[-1].finish_reason is FinishReason.STOP


def test_engine_needs_no_torch() -> None:
    code = "import edgellm.engine.engine, edgellm.engine.async_engine, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_python_env())
    assert result.stdout.strip() == "False", result.stderr


def _python_env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
