"""The engine in its thread: streams, order, slow readers, cancel, faults, closing. No model."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from edgellm.cache.kv_manager import KVManager
from edgellm.cache.sequence_blocks import GroupLayout
from edgellm.contracts import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from edgellm.engine.async_engine import AsyncEngine, TokenStream
from edgellm.engine.engine import Engine
from edgellm.engine.event_queue import MAX_PENDING, EventQueue, MergedEvents, wake
from edgellm_models.errors import BadInputError, EngineError, Notice
from edgellm_models.tokenizer.stream_decoder import StreamDecoder
from tests.support.fake_engine import ByteTokenizer, FakeAnswer, FakeEngine, FakeRunner
from tests.support.waiting import until

SCRIPT = tuple(b"hello world")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


def real_engine(
    script: tuple[int, ...] = SCRIPT, context: int = 4096, max_running: int = 16, **fields: Any
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(lambda prompt: script, block_size=16, **fields)
    engine = Engine(
        runner,
        ByteTokenizer(),
        KVManager([GroupLayout(None, context // 16)], 16),
        context_length=context,
        vocab_size=258,
        make_decoder=lambda request: StreamDecoder(ByteTokenizer()),
        max_running=max_running,
    )
    return engine, runner


def request(
    name: str, max_new_tokens: int | None = 11, prompt: bytes = b"p", **fields: Any
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(max_new_tokens=max_new_tokens), **fields)


async def collect(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(e.text for e in events)


def test_many_requests_each_get_their_own_answer() -> None:
    async def test() -> None:
        runner = FakeRunner(lambda prompt: (*prompt, 33), block_size=16, delay_s=0.001)
        engine, _ = real_engine()
        engine._runner = runner
        service = AsyncEngine(engine)
        names = [f"request-{i}" for i in range(40)]
        streams = [service.submit(request(n, len(n) + 1, prompt=n.encode())) for n in names]
        results = await asyncio.gather(*(collect(s) for s in streams))
        assert [text_of(events) for events in results] == [n + "!" for n in names]
        assert all(events[-1].finish_reason is FinishReason.LENGTH for events in results)
        assert results[39][0].queue_position is not None
        await service.aclose()

    run(test)


def test_submitting_from_several_threads_and_loops() -> None:
    engine, _ = real_engine()
    service = AsyncEngine(engine)
    texts: list[str] = []

    def client(i: int) -> None:
        async def one() -> None:
            texts.append(text_of(await collect(service.submit(request(f"t{i}")))))

        asyncio.run(asyncio.wait_for(one(), 10))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert texts == ["hello world"] * 6
    service.close()


def test_a_slow_reader_stalls_nobody_and_loses_nothing() -> None:
    async def test() -> None:
        engine, _ = real_engine()
        service = AsyncEngine(engine)
        slow = service.submit(request("slow", 3000))
        quick = await collect(service.submit(request("quick")))
        assert text_of(quick) == "hello world"
        await until(lambda: not engine.has_work())
        events = []
        largest = 0
        async for event in slow:
            events.append(event)
            largest = max(largest, len(event.token_ids))
        ids = [t for e in events for t in e.token_ids]
        assert ids == [SCRIPT[i % 11] for i in range(3000)] and text_of(events) == bytes(ids).decode()
        assert len(events) <= MAX_PENDING + 2 and largest > 1
        assert events[-1].finish_reason is FinishReason.LENGTH
        await service.aclose()

    run(test)


def merged(*events: TokenEvent) -> TokenEvent | None:
    """All as one, or None when one of them must stay apart."""
    pending = MergedEvents(events[0])
    return pending.join() if all(pending.add(event) for event in events[1:]) else None


def test_merging_keeps_everything() -> None:
    notice = Notice("k", "d")
    first = TokenEvent("r", token_ids=(1,), text="a", prefill_done=7, notice=notice)
    second = TokenEvent("r", token_ids=(2, 3), text="bc", finish_reason=FinishReason.STOP, seed=4)
    assert merged(first, second) == TokenEvent(
        "r",
        token_ids=(1, 2, 3),
        text="abc",
        prefill_done=7,
        notice=notice,
        finish_reason=FinishReason.STOP,
        seed=4,
    )
    assert merged(first, TokenEvent("r", notice=notice)) is None
    assert merged(first, TokenEvent("r", sample=1)) is None
    assert merged(second, first) is None
    assert merged(TokenEvent("r"), TokenEvent("r", notice=notice), TokenEvent("r", notice=notice)) is None


def test_a_reader_that_never_reads_costs_the_engine_nothing_per_waiting_event() -> None:
    """The work of a put must not grow with what waits: 200,000 events would take hours if each copied all."""

    async def test() -> None:
        events = EventQueue(asyncio.get_running_loop(), num_samples=1)
        start = time.process_time()
        for i in range(200_000):
            events.put(TokenEvent("r", token_ids=(i,), text="ab"))
        events.put(TokenEvent("r", finish_reason=FinishReason.STOP))
        assert time.process_time() - start < 30
        got = []
        while (event := await events.get()) is not None:
            got.append(event)
        assert len(got) == MAX_PENDING
        assert [token_id for event in got for token_id in event.token_ids] == list(range(200_000))
        assert sum(len(event.text) for event in got) == 400_000

    run(test)


def test_a_step_wakes_a_loop_once_however_many_answers_it_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        woken: list[Any] = []

        def call(callback: Any, *arguments: Any) -> None:
            woken.append(callback)
            loop.call_soon(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", call)
        queues = [EventQueue(loop, num_samples=1) for _ in range(8)]
        for turn in range(3):
            woken.clear()
            event = TokenEvent("r", token_ids=(turn,))
            wake([queue for queue in queues if queue.add(event)])
            assert len(woken) == 1
            assert not queues[0].add(event), "woken already"
            for number, queue in enumerate(queues):
                for _ in range(1 + (number == 0)):
                    got = await asyncio.wait_for(queue.get(), 10)
                    assert got is not None and got.token_ids == (turn,)
            # Only a reader that found nothing sleeps again.
            waiting = [asyncio.create_task(queue.get()) for queue in queues]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    run(test)


def test_readers_are_woken_when_the_next_step_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they do not want the interpreter lock while it is; where no step follows, at once."""
    told: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            told.append(name)
            return work(*given)

        return run

    async def test() -> None:
        engine, runner = real_engine()
        monkeypatch.setattr(runner, "execute", noted("execute", runner.execute))
        monkeypatch.setattr(engine._scheduler, "next_step", noted("plan", engine._scheduler.next_step))
        woken = noted("wake", wake)
        monkeypatch.setattr("edgellm.engine.async_engine.wake", lambda queues: queues and woken(queues))
        service = AsyncEngine(engine)
        assert text_of(await collect(service.submit(request("a", 11)))) == "hello world"
        await service.aclose()

    run(test)
    assert told.count("execute") == 11 and "wake" in told
    behind = [told[at + 1] for at, name in enumerate(told[:-1]) if name == "wake"]
    assert set(behind) <= {"execute"}, "woken while the next step is planned"


def test_events_come_while_the_answer_is_made() -> None:
    """A16: one event per step, within the step's time, not a burst at the end."""

    async def test() -> None:
        engine, _ = real_engine(delay_s=0.02)
        service = AsyncEngine(engine)
        arrivals = []
        async for event in service.submit(request("r", 10)):
            if event.text:
                arrivals.append((time.monotonic(), event.text))
        assert [text for _, text in arrivals] == list("hello worl")
        assert arrivals[-1][0] - arrivals[0][0] > 0.12
        await service.aclose()

    run(test)


async def _leave_by_aclose(stream: TokenStream) -> None:
    await stream.aclose()


async def _leave_by_cancelled_task(stream: TokenStream) -> None:
    async def read() -> None:
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("leave", [_leave_by_aclose, _leave_by_cancelled_task])
def test_leaving_a_stream_cancels_its_request(leave: Callable[[TokenStream], Awaitable[None]]) -> None:
    """F18: an endless answer stops within a step of its reader's going; the blocks come back."""

    async def test() -> None:
        engine, _ = real_engine(delay_s=0.001)
        service = AsyncEngine(engine)
        stream = service.submit(request("r", None))
        async for event in stream:
            if event.text:
                break
        await leave(stream)
        await until(lambda: service.stats().running == 0 and service.stats().kv_blocks["used"] == 0)
        assert not service._queues and not service._samples
        await service.aclose()

    run(test)


def test_dropping_a_stream_cancels_its_request() -> None:
    async def test() -> None:
        engine, _ = real_engine(delay_s=0.001)
        service = AsyncEngine(engine)
        stream = service.submit(request("r", None))
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: not service._queues)
        await service.aclose()

    run(test)


def test_cancel_delivers_the_partial_answer() -> None:
    async def test() -> None:
        engine, _ = real_engine(delay_s=0.001, max_running=1)
        service = AsyncEngine(engine)
        stream = service.submit(request("r", None))
        waiting = service.submit(request("w", None))
        await anext(stream)
        service.cancel("w")
        service.cancel("r")
        service.cancel("ghost")
        events, others = await collect(stream), await collect(waiting)
        assert events[-1].finish_reason is others[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].usage is not None and others[-1].usage is not None
        assert others[-1].usage.completion_tokens == 0
        await service.aclose()

    run(test)


def test_a_loop_that_is_gone_frees_the_engine() -> None:
    engine, _ = real_engine(delay_s=0.001)
    service = AsyncEngine(engine)
    kept: list[TokenStream] = []

    async def leave_without_a_word() -> None:
        kept.append(service.submit(request("r", None)))
        await anext(kept[0])

    asyncio.run(leave_without_a_word())
    end = time.monotonic() + 30
    while service._queues and time.monotonic() < end:
        time.sleep(0.01)
    assert not service._queues
    service.close()


def test_a_fault_reaches_every_open_request_and_later_ones() -> None:
    async def test() -> None:
        engine, _ = real_engine(raise_at_step=4)
        service = AsyncEngine(engine)
        streams = [service.submit(request(f"r{i}")) for i in range(3)]
        several = service.submit(request("s", num_samples=2))
        results = await asyncio.gather(*(collect(s) for s in streams))
        for events in results:
            assert events[-1].finish_reason is FinishReason.ERROR
            assert "the kernel is on fire" in (events[-1].error or "")
        assert sorted(e.sample for e in await collect(several) if e.error) == [0, 1]
        assert text_of(results[0]) == "hell"
        assert service.fault is not None
        with pytest.raises(EngineError, match="on fire"):
            service.submit(request("late"))
        await service.aclose()

    run(test)


def test_a_fault_of_the_engine_protocol_is_enough() -> None:
    async def test() -> None:
        service = AsyncEngine(FakeEngine(FakeAnswer([(1, "a")] * 50), fault_after=5))
        events = await collect(service.submit(request("r")))
        assert text_of(events) == "aaaaa" and events[-1].error == "RuntimeError: the fake engine failed"
        await service.aclose()

    run(test)


def test_a_bad_request_raises_where_it_is_made() -> None:
    async def test() -> None:
        engine, _ = real_engine(context=64)
        service = AsyncEngine(engine)
        with pytest.raises(BadInputError, match=r"65 .* 64"):
            service.submit(request("r", prompt=bytes(65)))
        stream = service.submit(request("same"))
        with pytest.raises(EngineError, match="'same'"):
            service.submit(request("same"))
        assert text_of(await collect(stream)) == "hello world"
        await service.aclose()

    run(test)


def test_close_ends_what_is_open_and_joins() -> None:
    async def test() -> None:
        engine, _ = real_engine(delay_s=0.001)
        service = AsyncEngine(engine)
        streams = [service.submit(request(f"r{i}", None)) for i in range(3)]
        await anext(streams[0])
        await service.aclose()
        assert not service._thread.is_alive()
        for stream in streams:
            assert (await collect(stream))[-1].finish_reason is FinishReason.CANCELLED
        with pytest.raises(EngineError, match="closed"):
            service.submit(request("late"))
        await service.aclose()

    run(test)


def test_300_streams_left_early_cost_nothing() -> None:
    """F18: 300 times start, read two events, leave; then every block is free and a large request is
    served.
    """

    async def test() -> None:
        engine, _ = real_engine(context=512)
        service = AsyncEngine(engine)
        for i in range(300):
            stream = service.submit(request(f"r{i}", None))
            await anext(stream)
            await stream.aclose()
        large = await collect(service.submit(request("large", None, prompt=bytes(400))))
        assert large[-1].finish_reason is FinishReason.LENGTH
        assert service.stats().kv_blocks["used"] == 0 and not service._queues
        await service.aclose()

    run(test)


def test_rates_fall_to_zero_when_idle() -> None:
    from edgellm.contracts import EngineStats
    from edgellm.engine.stats import StatsRecorder, as_of

    recorder = StatsRecorder()
    for i in range(40):
        recorder.record(10 + i * 0.1, 10 + (i + 1) * 0.1, 0, 2)
    stats = recorder.snapshot(14.0, 0, 0, {})
    assert stats.decode_tokens_per_s == pytest.approx(20.0)
    assert as_of(stats, 14.5) is stats
    assert as_of(stats, 15.5).decode_tokens_per_s == 0.0
    assert as_of(EngineStats(time=1.0, running=1, decode_tokens_per_s=3.0), 9.0).decode_tokens_per_s == 3.0
