"""The local chat backend over scripted models: events, remembered ids, cancel, early close, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgellm.cache.kv_storage import kv_type
from edgellm.cli.kv_room import choose_context
from edgellm.cli.runtime import Runtime, load_runtime
from edgellm.client.local_client import LocalClient
from edgellm.config import EngineConfig
from edgellm.contracts import (
    ChatBackend,
    ChatEvent,
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    Queued,
    SamplingParams,
)
from edgellm.engine.engine import MAX_RUNNING
from edgellm_models.errors import BadInputError, Notice, ResourceError
from tests.support.bigram import make_bigram
from tests.support.engines import spec_of

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=50)
HELLO = [ChatMessage("user", "hello?")]


def runtime_of(path: Path, notices: list[Notice] | None = None, **settings: Any) -> Runtime:
    resolved = EngineConfig(**settings).resolve(environ={}, folder=path.parent, user_file=path / "none.toml")
    return load_runtime(resolved, path, "scripted", None if notices is None else notices.append)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chain = ["he", "llo", " there"]
    return make_bigram(tmp_path_factory.mktemp("b") / "m", chain, chat_template=TEMPLATE, encodable=False)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("b") / "m"
    return make_bigram(
        folder, ["a", "b", "c"], chat_template=TEMPLATE, loop=True, dead_layers=4, context=8000
    )


def run(path: Path, test: Callable[[LocalClient], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        client = runtime_of(path).client()
        assert isinstance(client, ChatBackend)
        try:
            await asyncio.wait_for(test(client), 30)
        finally:
            await client.close()

    asyncio.run(main())


async def collect(events: AsyncIterator[ChatEvent]) -> list[ChatEvent]:
    return [event async for event in events]


def text_of(events: Sequence[ChatEvent]) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta))


def last_of(events: Sequence[ChatEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(e, Finished) for e in events[:-1])
    return events[-1]


def test_an_answer_is_prefill_deltas_and_an_end(scripted: Path) -> None:
    async def test(client: LocalClient) -> None:
        events = await collect(client.stream_chat("c", HELLO, SamplingParams(temperature=0.0, seed=9)))
        assert text_of(events) == "hello there"
        prefills = [e for e in events if isinstance(e, Prefill)]
        assert prefills and prefills[-1].done == prefills[-1].total == await client.count_tokens(HELLO)
        end = last_of(events)
        assert (end.reason, end.seed, end.usage.completion_tokens) == (FinishReason.STOP, 9, 4)
        assert client.info().has_chat_template and client.stats().kv_blocks["used"] == 0

    run(scripted, test)


def test_the_history_keeps_the_ids_of_its_answers(scripted: Path) -> None:
    """F19: the script's pieces are not how its text would be tokenized; the next prompt holds them all the
    same.
    """

    async def test(client: LocalClient) -> None:
        events = await collect(client.stream_chat("c", HELLO, GREEDY))
        ids = [t for e in events if isinstance(e, Delta) for t in e.token_ids]
        messages = [*HELLO, ChatMessage("assistant", text_of(events)), ChatMessage("user", "more")]
        seen: list[tuple[int, ...]] = []
        submit = client._engine.submit

        def spy(request: Any) -> Any:
            seen.append(request.prompt_token_ids)
            return submit(request)

        client._engine.submit = spy  # type: ignore[method-assign]
        await collect(client.stream_chat("c", messages, GREEDY))
        await collect(client.stream_chat("another", messages, GREEDY))
        text = ids[:3]  # without the end token

        def holds(prompt: tuple[int, ...]) -> bool:
            return any(list(prompt[i : i + 3]) == text for i in range(len(prompt)))

        assert holds(seen[0]) and not holds(seen[1])

    run(scripted, test)


def test_what_a_stop_string_cut_away_does_not_come_back(tmp_path: Path) -> None:
    """F19: the history holds what was shown, whether or not the stop string is a token of its own."""
    path = make_bigram(
        tmp_path / "m", ["he", "llo", " END", " more"], chat_template=TEMPLATE, encodable=False
    )

    async def test(client: LocalClient) -> None:
        tokenizer = client._encoder.tokenizer
        for stop, shown in ((" END", "hello"), ("ND", "hello E"), ("D m", "hello EN"), ("lo E", "hel")):
            sampling = SamplingParams(temperature=0.0, max_new_tokens=50, stop=(stop,))
            talk = [*HELLO]
            seen: list[tuple[int, ...]] = []
            submit = client._engine.submit

            def spy(request: Any, submit: Any = submit, seen: Any = seen) -> Any:
                seen.append(request.prompt_token_ids)
                return submit(request)

            client._engine.submit = spy  # type: ignore[method-assign]
            events = await collect(client.stream_chat(stop, talk, sampling))
            assert text_of(events) == shown
            talk += [ChatMessage("assistant", shown), ChatMessage("user", "more")]
            await collect(client.stream_chat(stop, talk, sampling))
            client._engine.submit = submit  # type: ignore[method-assign]
            prompt = tokenizer.decode(seen[1], show_special=True)
            assert prompt.endswith(f"[assistant]{shown}[user]more")

    run(path, test)


def test_cancel_ends_the_answer_with_its_text(endless: Path) -> None:
    async def test(client: LocalClient) -> None:
        events: list[ChatEvent] = []
        async for event in client.stream_chat("c", HELLO, SamplingParams(temperature=0.0)):
            events.append(event)
            if len(text_of(events)) == 5:
                await client.cancel("c")
        end = last_of(events)
        assert end.reason is FinishReason.CANCELLED
        assert text_of(events) == ("abc" * 3000)[: end.usage.completion_tokens]
        assert end.usage.completion_tokens < 4000
        await client.cancel("nobody")

    run(endless, test)


def test_cancel_before_the_engine_has_it(endless: Path) -> None:
    async def test(client: LocalClient) -> None:
        task = asyncio.create_task(collect(client.stream_chat("c", HELLO, SamplingParams(temperature=0.0))))
        await asyncio.sleep(0)
        await client.cancel("c")
        assert last_of(await task).reason is FinishReason.CANCELLED
        assert not client._turns

    run(endless, test)


def test_leaving_early_frees_the_engine_for_the_next(endless: Path) -> None:
    async def test(client: LocalClient) -> None:
        stream = client.stream_chat("c", HELLO, SamplingParams(temperature=0.0))
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()  # type: ignore[attr-defined]
        short = SamplingParams(temperature=0.0, max_new_tokens=6)
        events = await asyncio.wait_for(collect(client.stream_chat("d", HELLO, short)), 10)
        assert text_of(events) == "abcabc" and not client._turns

    run(endless, test)


def test_waiting_is_shown(endless: Path) -> None:
    async def test(client: LocalClient) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=100)
        names = [f"c{i}" for i in range(MAX_RUNNING + 1)]
        answers = await asyncio.gather(*(collect(client.stream_chat(n, HELLO, sampling)) for n in names))
        queued = [e for events in answers for e in events if isinstance(e, Queued)]
        assert queued == [Queued(1)] and all(len(text_of(events)) == 100 for events in answers)

    run(endless, test)


def test_what_cannot_be_answered_raises(scripted: Path) -> None:
    async def test(client: LocalClient) -> None:
        with pytest.raises(BadInputError, match="no messages"):
            await collect(client.stream_chat("c", [], GREEDY))
        with pytest.raises(BadInputError, match=r"tokens.* 4096"):
            await collect(client.stream_chat("c", [ChatMessage("user", "x" * 5000)], GREEDY))
        with pytest.raises(BadInputError, match="logit_bias"):
            await collect(client.stream_chat("c", HELLO, SamplingParams(logit_bias={10**6: 1.0})))
        assert not client._turns
        assert text_of(await collect(client.stream_chat("c", HELLO, GREEDY))) == "hello there"

    run(scripted, test)


def test_a_base_model_is_refused_or_says_so(tmp_path: Path) -> None:
    """B11: no other model's format; either a clear error or a plain transcript with a notice."""
    runtime = runtime_of(make_bigram(tmp_path / "m", ["hi"]))
    with pytest.raises(BadInputError, match="no chat template"):
        runtime.client()

    async def chat() -> list[ChatEvent]:
        client = runtime.client(plain_fallback=True)
        events = await collect(client.stream_chat("c", HELLO, GREEDY))
        again = await collect(client.stream_chat("c", HELLO, GREEDY))
        await client.close()
        assert not any(isinstance(e, NoticeEvent) for e in again)
        return events

    events = asyncio.run(chat())
    notices = [e.notice.kind for e in events if isinstance(e, NoticeEvent)]
    assert notices == ["no_chat_template"] and text_of(events) == "hi"


# --- the runtime ---


def test_loading_says_what_is_in_force(scripted: Path) -> None:
    """D13: the dtype that is computed with; and the context."""
    notices: list[Notice] = []
    runtime = runtime_of(scripted, notices, ctx=100, kv_dtype="f16", threads=1)
    kinds = {notice.kind: notice.detail for notice in notices}
    assert "f32" in kinds["weight_form"] and "100 tokens" in kinds["context"]
    assert tuple(notices) == runtime.notices
    assert runtime.info.context_length == 100 and runtime.info.trained_context == 4096
    assert runtime.info.quantization.startswith("F32 (32.0") and runtime.times.load_s > 0
    runtime.close()


def test_the_context_is_what_fits_in_half_of_the_free_memory() -> None:
    spec = spec_of([None] * 4, 2, 16, 1000)  # 1,024 bytes per token in f32
    block = 16 * 1024

    def chosen(asked: int | None, free: int | None) -> tuple[int, str]:
        context, notice = choose_context(spec, asked, kv_type("f32"), 512, free)
        assert str(context) in notice.detail
        return context, notice.kind

    assert chosen(None, None) == (1000, "context")
    assert chosen(None, 10**9) == (1000, "context")
    assert chosen(None, 20 * block) == (160, "context_clamped")
    assert chosen(500, None) == (500, "context")
    assert chosen(5000, None) == (1000, "context_clamped")
    assert chosen(320, 20 * block) == (320, "context")
    with pytest.raises(ResourceError, match=r"--ctx 160"):
        chosen(321, 20 * block)
    with pytest.raises(ResourceError, match="free memory"):
        chosen(None, block)


def test_cuda_without_a_device_is_refused(scripted: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(ResourceError, match="cuda"):
        runtime_of(scripted, device="cuda")


def test_a_chat_that_has_filled_its_context_goes_on(scripted: Path) -> None:
    """F04: with the policy trim thirty turns are answered, and what is left out is said."""
    runtime = runtime_of(scripted, ctx=160)

    async def chat() -> tuple[list[str], list[str]]:
        client = runtime.client(kv_policy="trim")
        messages = [ChatMessage("system", "be brief")]
        texts, kinds = [], []
        for turn in range(30):
            messages.append(ChatMessage("user", f"hello {turn}?"))
            events = await collect(client.stream_chat("c", messages, GREEDY))
            kinds += [e.notice.kind for e in events if isinstance(e, NoticeEvent)]
            texts.append(text_of(events))
            messages.append(ChatMessage("assistant", texts[-1]))
        return texts, kinds

    try:
        texts, kinds = asyncio.run(asyncio.wait_for(chat(), 60))
    finally:
        runtime.close()
    assert texts == ["hello there"] * 30 and kinds.count("trimmed") > 15
