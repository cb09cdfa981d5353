"""HttpClient against our server on TCP and a unix socket, and against servers that others wrote."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgellm.client.http_client import HttpClient, ask_status
from edgellm.contracts import (
    ChatBackend,
    ChatEvent,
    ChatMessage,
    ConstraintKind,
    ConstraintSpec,
    Delta,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    SamplingParams,
)
from edgellm.history.kv_files import KVFiles
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from tests.support.served import MODEL, TOOL_TEMPLATE, says, scripted_model, serving

HELLO = [ChatMessage("user", "hello")]
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=200)


def run(work: Callable[[HttpClient], Coroutine[Any, Any, None]], address: str, **fields: Any) -> None:
    async def main() -> None:
        async with await HttpClient.connect(address, **fields) as client:
            assert isinstance(client, ChatBackend)
            await asyncio.wait_for(work(client), 20)

    asyncio.run(main())


async def collect(events: AsyncIterator[ChatEvent]) -> list[ChatEvent]:
    return [event async for event in events]


def text_of(events: list[ChatEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def last_of(events: list[ChatEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize("unix", [False, True])
def test_a_conversation_with_our_server(unix: bool, tmp_path: Path) -> None:
    """Everything that the screen shows arrives: progress, ids, timings, usage, stats."""
    where = {"uds": tmp_path / "own" / "s"} if unix else {}
    with serving(**where) as found:

        async def work(client: HttpClient) -> None:
            assert client.is_ours and client.info().name == MODEL
            assert client.info().context_length == 4096 and client.info().quantization
            events = await collect(client.stream_chat("c", [ChatMessage("user", "x" * 700 + "é")], SAMPLING))
            assert text_of(events)[-3:] == "xxx"
            progress = [event for event in events if isinstance(event, Prefill)]
            assert progress[-1].done == progress[-1].total > 700
            last = last_of(events)
            assert last.reason is FinishReason.LENGTH and last.usage.completion_tokens == 200
            assert last.timings.completion_tokens == 200 and last.timings.decode_tokens_per_s > 0
            assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 200
            seeded = SamplingParams(seed=11)
            assert last_of(await collect(client.stream_chat("c", HELLO, seeded))).seed == 11
            assert await client.count_tokens(HELLO) == len("[user]hello\n[assistant]")
            client.stats()
            await asyncio.sleep(0.1)
            assert client.stats().kv_blocks["free"] > 0
            status = await ask_status(found.address, None, 5)
            assert (status.state, status.running) == ("ok", 0)

        run(work, found.address)


def test_cancel_and_leaving_early() -> None:
    with serving(lambda: scripted_model(says("z" * 3000), delay_s=0.005)) as found:

        async def work(client: HttpClient) -> None:
            events: list[ChatEvent] = []
            async for event in client.stream_chat("c", HELLO, SamplingParams()):
                events.append(event)
                if isinstance(event, Delta) and len(events) == 5:
                    await client.cancel("c")
            last = last_of(events)
            assert last.reason is FinishReason.CANCELLED and 0 < last.usage.completion_tokens < 2000
            stream = client.stream_chat("d", HELLO, SamplingParams())
            async for event in stream:
                if isinstance(event, Delta):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            await client.cancel("nothing")
            engine = found.scripted.model.engine
            for _ in range(200):
                if not await asyncio.to_thread(engine.call, found.scripted.core.has_work):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the answer goes on although nobody reads it")

        run(work, found.address)


def test_tools_constraints_and_warnings() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    with serving(lambda: scripted_model(says(text), template=TOOL_TEMPLATE)) as found:

        async def work(client: HttpClient) -> None:
            events = await collect(client.stream_chat("c", HELLO, SAMPLING, [tool]))
            [call] = [e.tool_call for e in events if isinstance(e, Delta) and e.tool_call]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
            assert last_of(events).reason is FinishReason.TOOL_CALLS
            history = [*HELLO, ChatMessage("assistant", None, tool_calls=(call,)), ChatMessage("tool", "5 C")]
            assert text_of(await collect(client.stream_chat("c", history, SAMPLING))) == text
            for kind, grammar in (
                (ConstraintKind.REGEX, "[a-z]+["),
                (ConstraintKind.LARK, "start: ("),
                (ConstraintKind.JSON_SCHEMA, '{"type": "nonsense"}'),
            ):
                with pytest.raises(BadInputError):
                    await collect(client.stream_chat("c", HELLO, SAMPLING, (), ConstraintSpec(kind, grammar)))

        run(work, found.address)


def test_the_template_is_told_whether_to_think() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %} and think{% endif %}"
    )
    with serving(lambda: scripted_model(says("ok"), template=template)) as found:

        async def work(client: HttpClient) -> None:
            async def prompt_tokens(wanted: bool) -> int:
                told = {"enable_thinking": wanted}
                events = await collect(client.stream_chat("c", HELLO, SAMPLING, template_variables=told))
                return last_of(events).usage.prompt_tokens

            assert await prompt_tokens(True) > await prompt_tokens(False)

        run(work, found.address)


def test_only_a_screens_own_server_keeps_chats_and_only_under_their_ids(tmp_path: Path) -> None:
    async def work(client: HttpClient) -> None:
        for chat in ("../../chats", "0123/../x", "", "/etc/passwd", "abcd"):
            with pytest.raises(EdgeLLMError):
                await client.save_chat(chat, ["ok"])
            with pytest.raises(EdgeLLMError):
                await client.load_chat(chat)

    with serving() as found:
        run(work, found.address)
    folder = tmp_path / "kept" / "chats"
    with serving(chat_file=KVFiles(folder, 1000).prepare) as found:
        run(work, found.address)
    assert list(folder.iterdir()) == [] and sorted(tmp_path.rglob("*")) == [folder.parent, folder]


def test_refusals_are_errors_of_ours() -> None:
    with serving(api_keys=("right",)) as found:
        for key in (None, "wrong"):
            with pytest.raises(PermissionDeniedError):
                run(_nothing, found.address, api_key=key)
        with pytest.raises(NotFoundError, match=MODEL):
            run(_nothing, found.address, api_key="right", model="other")

        async def too_long(client: HttpClient) -> None:
            with pytest.raises(BadInputError, match="4096"):
                await collect(client.stream_chat("c", [ChatMessage("user", "x" * 5000)], SAMPLING))

        run(too_long, found.address, api_key="right")
    for address in ("http://127.0.0.1:1", "unix:/nonexistent/socket"):
        with pytest.raises(UnavailableError, match=address):
            run(_nothing, address)
    for address in ("ftp://x", "nonsense", ""):
        with pytest.raises(BadInputError):
            HttpClient(address)
    assert asyncio.run(ask_status("unix:/nonexistent", None, 1)).state == "no answer"


async def _nothing(client: HttpClient) -> None: ...


def test_it_waits_for_a_server_that_loads() -> None:
    import time

    def slow() -> Any:
        time.sleep(0.5)
        return scripted_model()

    waits: list[str] = []
    with serving(slow, wait=False) as found:
        with pytest.raises(UnavailableError, match="loading"):
            run(_nothing, found.address)
        run(_nothing, found.address, ready_within_s=10, on_wait=waits.append)
    assert waits and "loading" in waits[0]


def test_a_server_that_dies_in_the_middle_is_said() -> None:
    with serving(lambda: scripted_model(says("abcdef"), error_at=3)) as found:

        async def work(client: HttpClient) -> None:
            events = await collect(client.stream_chat("c", HELLO, SAMPLING))
            assert text_of(events) == "abc"
            assert last_of(events).reason is FinishReason.ERROR and "NaN" in (last_of(events).error or "")

        run(work, found.address)


# --- servers that others wrote ---


def chunk(**fields: Any) -> str:
    return "data: " + json.dumps({"id": "x", "choices": [{"index": 0, **fields}]}) + "\n\n"


@contextmanager
def foreign(*lines: str, status: str = "200 OK") -> Iterator[tuple[str, list[bytes]]]:
    """A server that knows two paths and closes after each answer."""
    asked: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or b"0")
            asked.append(self.rfile.read(length))
            path = head.split(b" ")[1]
            answers = {b"/v1/models": '{"data": [{"id": "m"}]}', b"/v1/chat/completions": "".join(lines)}
            answer = answers.get(path)
            first = status if path == b"/v1/chat/completions" else "200 OK" if answer else "404 Not Found"
            self.wfile.write(f"HTTP/1.1 {first}\r\nConnection: close\r\n\r\n{answer or ''}".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
        finally:
            server.shutdown()


STOP = chunk(delta={}, finish_reason="stop")
DONE = "data:[DONE]\r\n\r\n"
ODD = 'data: {"choices": [null, {"delta": 7}, {"delta": {"content": 7}}]}\n\n'


@pytest.mark.parametrize(
    ("lines", "text", "reason"),
    [
        ((chunk(delta={"content": "a"}), STOP, "data: [DONE]\n\n"), "a", FinishReason.STOP),
        ((chunk(delta={"content": "a"}, finish_reason="length"), DONE), "a", FinishReason.LENGTH),
        ((": comment\n\n", chunk(delta={"content": None}), STOP, "data: [DONE]\n\n"), "", FinishReason.STOP),
        ((chunk(delta={"content": "a"}),), "a", FinishReason.ERROR),
        ((chunk(delta={"content": "a"}), "data: {oops\n\n"), "a", FinishReason.ERROR),
        (('data: {"error": {"message": "no"}}\n\n',), "", FinishReason.ERROR),
        (("data: 7\n\n",), "", FinishReason.ERROR),
        ((ODD, STOP, "data: [DONE]\n\n"), "", FinishReason.STOP),
    ],
)  # fmt: skip
def test_streams_of_other_servers(lines: tuple[str, ...], text: str, reason: FinishReason) -> None:
    """Well or badly formed: an answer ends with a reason, never with an exception."""
    with foreign(*lines) as (address, asked):

        async def work(client: HttpClient) -> None:
            assert not client.is_ours and client.info().name == "m" and client.info().context_length == 0
            assert await client.count_tokens(HELLO) == 0 and client.stats().running == 0
            events = await collect(client.stream_chat("c", HELLO, SamplingParams(top_k=5, stop=("x",))))
            assert (text_of(events), last_of(events).reason) == (text, reason)
            assert not any(isinstance(event, NoticeEvent) for event in events)
            with pytest.raises(BadInputError, match="JSON schemas only"):
                grammar = ConstraintSpec(ConstraintKind.LARK, "start: /a/")
                await collect(client.stream_chat("c", HELLO, SAMPLING, (), grammar))

        run(work, address)
        body = json.loads(asked[-1])
        assert set(body) == {
            "model", "messages", "stream", "stream_options", "temperature", "top_p", "presence_penalty",
            "frequency_penalty", "stop",
        }  # fmt: skip


def test_tool_calls_in_pieces_and_refusals_of_other_servers() -> None:
    pieces = [
        {"index": 0, "id": "i", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    lines = [chunk(delta={"tool_calls": [piece]}) for piece in pieces]
    with foreign(*lines, chunk(delta={}, finish_reason="tool_calls"), "data: [DONE]\n\n") as (address, _):

        async def work(client: HttpClient) -> None:
            events = await collect(client.stream_chat("c", HELLO, SAMPLING))
            [call] = [e.tool_call for e in events if isinstance(e, Delta) and e.tool_call]
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["id"] == "i"

        run(work, address)
    with foreign("<html>down</html>", status="502 Bad Gateway") as (address, _):

        async def refused(client: HttpClient) -> None:
            with pytest.raises(Exception, match="down"):
                await collect(client.stream_chat("c", HELLO, SAMPLING))

        run(refused, address)
