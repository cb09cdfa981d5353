"""The engine over a simulated KV memory, without torch: what is reused is right, what ends gives all back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

import edgellm.cache.prefix_index as prefix_index
from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from edgellm.engine.engine import Engine
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_engine import ByteTokenizer
from tests.support.fake_runner import VOCAB, PagedFakeRunner, answer_alone


def make(
    *,
    windows: Sequence[int | None] = (None,),
    num_blocks: int = 64,
    block_size: int = 4,
    context: int = 200,
    chunk: int = 8,
    max_running: int = 8,
) -> tuple[Engine, PagedFakeRunner]:
    runner = PagedFakeRunner(block_size, windows)
    engine = Engine(
        runner,
        ByteTokenizer(),
        KVManager([GroupLayout(window, num_blocks) for window in windows], block_size),
        context_length=context,
        vocab_size=258,
        make_decoder=lambda request: StreamDecoder(ByteTokenizer()),
        max_running=max_running,
        prefill_chunk=chunk,
    )
    return engine, runner


def request(name: str, ids: Sequence[int], count: int = 10, **fields: object) -> GenerationRequest:
    return GenerationRequest(name, tuple(ids), SamplingParams(max_new_tokens=count), **fields)  # type: ignore[arg-type]


def drain(engine: Engine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work():
        events += engine.step()
        engine.check_integrity()
    return events


def ids_of(events: Sequence[TokenEvent], name: str, sample: int = 0) -> list[int]:
    return [t for e in events if (e.request_id, e.sample) == (name, sample) for t in e.token_ids]


def cached(events: Sequence[TokenEvent], name: str) -> int:
    [usage] = [e.usage for e in events if e.request_id == name and e.usage]
    return usage.cached_tokens


def test_a_window_of_eight_keeps_the_last_eight_positions() -> None:
    """F02: prefill of 6, then single steps; and 3 and 11 together. Blocks of one position let the table show
    exactly what is kept."""
    for lengths in ((6,), (3, 11)):
        engine, runner = make(windows=(8,), block_size=1, num_blocks=64, chunk=16)
        for i, length in enumerate(lengths):
            engine.submit(request(f"r{i}", range(length), 8))
        drain(engine)
        steps = [planned for plan in runner.plans for planned in plan.sequences]
        assert len(steps) >= 8
        for planned in steps:
            live = [i for i, block in enumerate(planned.block_tables[0]) if block >= 0]
            end = planned.start_position + len(planned.token_ids)
            assert live == list(range(max(0, planned.start_position - 7), end))


def test_colliding_hashes_never_give_another_prompts_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """F09: with hashes modulo 7, prompts that end alike after different beginnings, and one text under two
    salts. The runner reads every position back."""
    real = prefix_index.chain_hash

    def weak(parent: bytes, token_ids: Sequence[int], epoch: int) -> bytes:
        return bytes([real(parent, token_ids, epoch)[0] % 7])

    monkeypatch.setattr(prefix_index, "chain_hash", weak)
    engine, _ = make(num_blocks=400)
    rng = random.Random(1)
    tail = [rng.randrange(VOCAB) for _ in range(16)]
    prompts = [[rng.randrange(VOCAB) for _ in range(8)] + tail for _ in range(30)]
    for i, ids in enumerate(prompts):
        engine.submit(request(f"r{i}", ids))
    events = drain(engine)
    for i, ids in enumerate(prompts):
        assert ids_of(events, f"r{i}") == answer_alone(ids, 10) and cached(events, f"r{i}") == 0
    for name, salt, expected in (("same", "", 20), ("salted", "s", 0), ("again", "s", 20)):
        engine.submit(request(name, prompts[3], cache_salt=salt))
        assert cached(drain(engine), name) == expected


def test_a_partial_block_is_not_shared() -> None:
    """F09: a prompt that parts inside a block takes only the whole blocks before it."""
    engine, _ = make()
    engine.submit(request("a", [1, 2, 3, 4, 5, 6, 7]))
    engine.submit(request("b", [1, 2, 3, 4, 5, 6, 9, 9, 9]))
    drain(engine)
    engine.submit(request("c", [1, 2, 3, 4, 5, 6, 8, 8]))
    events = drain(engine)
    assert cached(events, "c") == 4 and ids_of(events, "c") == answer_alone([1, 2, 3, 4, 5, 6, 8, 8], 10)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_thousand_random_aborts_leave_the_pool_full(windows: tuple[int | None, ...]) -> None:
    """F18: waiting, in the prefill, in the answer, preempted, as one of several samples; those that end by
    themselves have the answers that they get alone."""
    rng = random.Random(5)
    engine, runner = make(windows=windows, num_blocks=40, context=120)
    prompts: dict[str, tuple[list[int], int, int]] = {}
    events: list[TokenEvent] = []
    aborted = 0
    while aborted < 1000:
        name = f"r{len(prompts)}"
        length = rng.choice((1, 3, 8, 20, 60))
        ids = [0] * rng.choice((0, 8)) + [rng.randrange(VOCAB) for _ in range(length)]
        samples, count = rng.choice((1, 1, 1, 3)), rng.randrange(1, 20)
        prompts[name] = (ids, samples, count)
        engine.submit(request(name, ids, count, num_samples=samples))
        for _ in range(rng.randrange(4)):
            events += engine.step()
        running = [one for one in list(prompts)[-12:] if one in engine._open]
        if running and rng.random() < 0.9:
            engine.cancel(rng.choice(running))
            aborted += 1
        if aborted % 20 == 0:
            engine.check_integrity()
    events += drain(engine)
    blocks = engine.stats.kv_blocks
    assert blocks["used"] == blocks["shared"] == 0
    assert blocks["free"] + blocks["cached"] == 40 * len(windows)
    kinds = {e.notice.kind for e in events if e.notice}
    assert "preempted" in kinds
    answers: dict[tuple[str, int], list[int]] = {}
    for e in events:
        answers.setdefault((e.request_id, e.sample), []).extend(e.token_ids)
    reasons = {(e.request_id, e.sample): e.finish_reason for e in events if e.finish_reason}
    assert len(reasons) == sum(samples for _, samples, _ in prompts.values())
    for (name, sample), reason in reasons.items():
        ids, _, count = prompts[name]
        own = answers[name, sample]
        assert own == answer_alone(ids, count, sample)[: len(own)]
        assert reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert reason is FinishReason.CANCELLED or len(own) == count
    engine.submit(request("after", [7] * 100, 20))
    assert ids_of(drain(engine), "after") == answer_alone([7] * 100, 20)
    assert len(runner.states) <= 1


def test_what_waits_and_gives_way_is_said() -> None:
    engine, _ = make(num_blocks=12)
    for i in range(6):
        engine.submit(request(f"r{i}", [i] * 12, 24))
    events = drain(engine)
    told = [e.notice.kind for e in events if e.notice]
    assert {"queued_for_blocks", "preempted", "resumed"} <= set(told)
    for i in range(6):
        assert ids_of(events, f"r{i}") == answer_alone([i] * 12, 24)


def test_a_request_that_can_never_fit_fails_alone() -> None:
    engine, _ = make(num_blocks=6)
    engine.submit(request("large", range(40), 5))
    engine.submit(request("small", [1, 2, 3], 5))
    events = drain(engine)
    ends = {e.request_id: e for e in events if e.finish_reason}
    assert ends["large"].finish_reason is FinishReason.ERROR and "KV cache" in (ends["large"].error or "")
    assert ids_of(events, "small") == answer_alone([1, 2, 3], 5)


def test_priority_goes_before_arrival() -> None:
    engine, _ = make(max_running=1)
    engine.submit(request("first", [1], 3))
    engine.step()
    engine.submit(request("batch", [2], 3, priority=1))
    engine.submit(request("chat", [3] * 20, 3))
    ended = [e.request_id for e in drain(engine) if e.finish_reason]
    assert ended == ["first", "chat", "batch"]


def test_a_changed_history_is_said_with_message_and_tokens() -> None:
    engine, _ = make()
    history = [1] * 8 + [2] * 8 + [3] * 8
    engine.submit(request("a", history, 1, conversation_id="c"))
    drain(engine)
    changed = [1] * 8 + [2] * 4 + [65] * 4 + [3] * 8
    engine.submit(request("b", changed, 1, conversation_id="c", turn_starts=(8, 16)))
    events = drain(engine)
    [notice] = [e.notice for e in events if e.notice]
    assert notice.kind == "prefix_lost" and cached(events, "b") == 12
    for words in ("token 12 in message 2", "'A'", "12 are reused"):
        assert words in notice.detail
    engine.submit(request("d", [*changed, 5], 1, conversation_id="c"))
    assert not [e.notice for e in drain(engine) if e.notice]
