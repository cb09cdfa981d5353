"""The screen's engine in a process of its own: what it dies of is told, and it ends with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edgellm.cache.kv_storage import BLOCK_SIZE
from edgellm.cli.chat_kv import ChatKV
from edgellm.cli.engine_process import EngineProcess, OwnedEngine
from edgellm.cli.saved_chats import kv_files
from edgellm.client.http_client import HttpClient
from edgellm.contracts import ChatMessage, Delta, Finished, SamplingParams
from edgellm_models.errors import EdgeLLMError, NotFoundError, Notice
from tests.support.real_models import real_model


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    # The packages of this tree, as pytest found them.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def test_a_model_that_is_not_there_is_told_as_by_the_command(tmp_path: Path) -> None:
    heard: list[Notice] = []
    process = EngineProcess(["-m", str(tmp_path / "none.gguf")], tmp_path / "run" / "socket", heard.append)
    with pytest.raises(NotFoundError, match=r"none\.gguf"):
        process.wait_ready()
    process.stop()
    assert not any(notice.kind == "engine_gone" for notice in heard)


@pytest.mark.real_model
def test_it_answers_and_its_death_by_a_signal_is_a_notice_and_an_error_not_a_hang(tmp_path: Path) -> None:
    heard: list[Notice] = []
    socket = tmp_path / "run" / "socket"
    process = EngineProcess(["-m", str(real_model("smollm2-135m")), "--ctx", "256"], socket, heard.append)
    process.wait_ready()

    async def scenario() -> None:
        backend = OwnedEngine(await HttpClient.connect(f"unix:{socket}"), process)
        greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
        asked = [ChatMessage("user", "What is the capital of France?")]
        events = [event async for event in backend.stream_chat("one", asked, greedy)]
        assert "".join(event.text for event in events if isinstance(event, Delta))
        assert isinstance(events[-1], Finished) and events[-1].usage.completion_tokens == 4
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while not any(notice.kind == "engine_gone" for notice in heard):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(EdgeLLMError):
            async for event in backend.stream_chat("one", asked, greedy):
                assert not isinstance(event, Finished) or event.error is None
                if isinstance(event, Finished):
                    break
        await backend.close()

    asyncio.run(scenario())
    gone = next(notice for notice in heard if notice.kind == "engine_gone")
    assert "SIGKILL" in gone.detail and "/restart" in gone.detail


@pytest.mark.real_model
def test_a_chat_that_was_put_by_is_taken_up_by_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on with a chat in a new process computes its new question only; what cannot be used is told."""

    def kept(notices: list[Notice]) -> ChatKV:
        return ChatKV(kv_files(), notices.append, min_tokens=1)

    monkeypatch.setattr(OwnedEngine, "_chat_kv", staticmethod(kept))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    question = ChatMessage("user", "What is the capital of France, and on which river does it lie?")
    chat = "0123456789abcdef"

    async def ask(backend: OwnedEngine, messages: list[ChatMessage]) -> tuple[str, Finished]:
        events = [event async for event in backend.stream_chat(chat, messages, greedy)]
        assert isinstance(events[-1], Finished)
        return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]

    async def engine(name: str, history: list[ChatMessage]) -> tuple[str, Finished]:
        socket = tmp_path / name / "socket"
        process = EngineProcess(["-m", str(real_model("smollm2-135m")), "--ctx", "512"], socket, print)
        await asyncio.to_thread(process.wait_ready)
        backend = OwnedEngine(await HttpClient.connect(f"unix:{socket}"), process)
        try:
            assert list(await backend.take_up(chat, 100)) == []
            text, finished = await ask(backend, history)
            answered = [*history, ChatMessage("assistant", text)]
            tokens = finished.usage.prompt_tokens + finished.usage.completion_tokens
            assert list(await backend.put_by(chat, answered, tokens)) == []
            [refused] = await backend.put_by("abcd", answered, 100)  # nothing of that chat was computed here
            assert refused.kind == "kv_not_saved"
            return text, finished
        finally:
            await backend.close()

    text, finished = asyncio.run(engine("one", [question]))
    assert finished.usage.cached_tokens == 0
    first_tokens = finished.usage.prompt_tokens + finished.usage.completion_tokens
    again = [question, ChatMessage("assistant", text), ChatMessage("user", "And of Italy?")]
    _, finished = asyncio.run(engine("two", again))
    # All of it but the last, unfinished block of positions.
    assert finished.usage.cached_tokens >= first_tokens // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE > 0
