"""A conversation partner over HTTP: our own server on TCP or a unix socket, or any OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgellm.chat.messages import message_object
from edgellm.client import wire
from edgellm.contracts import (
    ChatEvent,
    ChatMessage,
    ConstraintSpec,
    EngineStats,
    Finished,
    FinishReason,
    ModelInfo,
    SamplingParams,
)
from edgellm_models.errors import (
    BadInputError,
    EdgeLLMError,
    EngineError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)

if TYPE_CHECKING:
    import httpx2

STATS_EVERY_S = 0.25
"""How often ``stats`` asks the server at most."""
CANCEL_WAIT_S = 2.0
"""How long a cancelled answer may still bring its usage before the connection is closed."""
CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 16 << 20
"""Of one server-sent event."""
MAX_ERROR_BYTES = 1 << 16


@dataclass(eq=False)
class _Turn:
    """One answer in the making."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    answer_id: str | None = None


class HttpClient:
    """A contracts.ChatBackend.

    Make one with ``connect``, in the event loop that will use it. Of a server that is not ours only what
    OpenAI's interface has is asked for and known: no stats, a context of 0, no queue, no prefill progress.
    """

    def __init__(
        self, address: str, *, api_key: str | None = None, model: str | None = None, timeout_s: float = 60.0
    ) -> None:
        """``address``: ``http(s)://host:port[/v1]`` or ``unix:/path/of/socket``. ``timeout_s``: for answers
        that are no streams; a stream may be silent for as long as its server sends comments. BadInputError
        when the address is none."""
        self.address = address
        self.is_ours = False
        """It is an edgellm server, known after ``connect``."""
        self._model = model
        self._info: ModelInfo | None = None
        self._http = _open_http(address, api_key, timeout_s)
        self._turns: dict[str, list[_Turn]] = {}
        self._stats = EngineStats()
        self._stats_asked = float("-inf")
        self._stats_task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 60.0,
        ready_within_s: float = 0.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> HttpClient:
        """A client of a server that answers and has the model (or any, with None).

        While the server loads, or is not there yet, it is asked again for ``ready_within_s`` seconds;
        ``on_wait`` hears why. UnavailableError, NotFoundError (of the model) or PermissionDeniedError.
        """
        client = cls(address, api_key=api_key, model=model, timeout_s=timeout_s)
        try:
            await client._wait_until_ready(ready_within_s, on_wait)
            client._info = await client._find_model()
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- contracts.ChatBackend ---

    def info(self) -> ModelInfo:
        """The model; of a foreign server only its name."""
        return self._info or wire.foreign_model(self._model or "unknown", self.address)

    def stats(self) -> EngineStats:
        """The newest stats that are here; asks for newer ones in the background."""
        if self.is_ours and self._stats_task is None and time.monotonic() - self._stats_asked > STATS_EVERY_S:
            with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
                self._stats_asked = time.monotonic()
                self._stats_task = asyncio.get_running_loop().create_task(self._read_stats())
        return self._stats

    async def stream_chat(
        self,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: ConstraintSpec | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatEvent]:
        """See contracts.ChatBackend. What the server refuses is raised; a failure on the way is in
        Finished."""
        body = wire.chat_body(
            self.info().name,
            conversation_id,
            messages,
            sampling,
            tools,
            constraint,
            ours=self.is_ours,
        )
        if template_variables:
            body["chat_template_kwargs"] = dict(template_variables)
        turn = _Turn()
        self._turns.setdefault(conversation_id, []).append(turn)
        reader = wire.StreamReader()
        try:
            async for event in self._read_stream(turn, body, reader):
                yield event
        finally:
            turns = self._turns[conversation_id]
            turns.remove(turn)
            if not turns:
                del self._turns[conversation_id]

    async def save_chat(self, conversation_id: str, answers: Sequence[str]) -> int:
        """Has the engine of one's own screen keep the KV of a chat; how many tokens. ``answers``: its
        texts."""
        body = {"conversation_id": conversation_id, "answers": list(answers)}
        return int((await self._post("v1/edge/chats/save", body)).get("tokens", 0))

    async def load_chat(self, conversation_id: str) -> int:
        """Takes up what ``save_chat`` kept, in this engine or an earlier one; how many tokens."""
        answer = await self._post("v1/edge/chats/load", {"conversation_id": conversation_id})
        return int(answer.get("tokens", 0))

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of the prompt that these messages make; 0 where the server cannot say."""
        if not self.is_ours or not messages:
            return 0
        body = {"messages": [message_object(message) for message in messages]}
        answer = await self._post("apply-template", body)
        return int(answer.get("tokens", 0))

    async def cancel(self, conversation_id: str) -> None:
        """Ends the conversation's answers within a step; without one it does nothing."""
        for turn in list(self._turns.get(conversation_id, ())):
            turn.cancelled.set()
            if self.is_ours and turn.answer_id is not None:
                # The reader gives up by itself when this does not help.
                with contextlib.suppress(EdgeLLMError):
                    await self._post(f"v1/edge/cancel/{turn.answer_id}", {})

    async def close(self) -> None:
        """Ends the client's connections; the server cancels what they asked for, and goes on."""
        if self._stats_task is not None:
            self._stats_task.cancel()
        for turns in self._turns.values():
            for turn in turns:
                turn.cancelled.set()
        await self._http.aclose()

    # --- what it is made of ---

    async def _wait_until_ready(self, within_s: float, on_wait: Callable[[str], None] | None) -> None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                status, answer = await self._get("health")
                if status == 200 or status == 404:  # a foreign server may have no such path
                    return
                problem = f"the server at {self.address} is not ready: {answer.get('status', status)}"
                if answer.get("status") == "failed":
                    raise UnavailableError(f"the server at {self.address} has failed: {answer.get('error')}")
            except _Unreachable as error:
                problem = str(error)
            if time.monotonic() >= deadline:
                raise UnavailableError(problem)
            if on_wait is not None:
                on_wait(problem)
            await asyncio.sleep(0.1)

    async def _find_model(self) -> ModelInfo:
        status, answer = await self._get("v1/models")
        if status != 200:
            raise _error_of(status, answer, self.address)
        entries = [entry for entry in answer.get("data") or () if isinstance(entry, Mapping)]
        names = [str(entry.get("id")) for entry in entries]
        self.is_ours = any(entry.get("owned_by") == "edgellm" for entry in entries)
        if self._model is None:
            if not names:
                raise UnavailableError(f"the server at {self.address} has no model")
            self._model = names[0]
        found = next((entry for entry in entries if entry.get("id") == self._model), None)
        if found is None:
            raise NotFoundError(
                f"the server at {self.address} does not have the model {self._model}; it has "
                + ", ".join(names[:20])
            )
        return wire.model_info(found, self.address)

    async def _read_stats(self) -> None:
        try:
            with contextlib.suppress(EdgeLLMError):
                status, answer = await self._get("v1/edge/status")
                if status == 200:
                    self._stats = wire.engine_stats(answer)
        finally:
            self._stats_task = None

    async def _read_stream(
        self, turn: _Turn, body: Mapping[str, Any], reader: wire.StreamReader
    ) -> AsyncIterator[ChatEvent]:
        import httpx2

        request = self._http.build_request(
            "POST",
            "v1/chat/completions",
            json=body,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )
        sending = asyncio.ensure_future(self._http.send(request, stream=True))
        if not await _first_of(sending, turn.cancelled, 0.0):
            yield reader.end(FinishReason.CANCELLED)
            return
        try:
            response = sending.result()
        except httpx2.HTTPError as error:
            raise _Unreachable.of(self.address, error) from None
        try:
            if response.status_code != 200:
                raise _error_of(response.status_code, await _read_json(response), self.address)
            lines = _lines(response)
            while not reader.finished:
                reading = asyncio.ensure_future(anext(lines, None))
                wait_s = CANCEL_WAIT_S if self.is_ours and turn.answer_id is not None else 0.0
                if not await _first_of(reading, turn.cancelled, wait_s):
                    yield reader.end(FinishReason.CANCELLED)
                    return
                try:
                    line = reading.result()
                except (httpx2.HTTPError, EngineError) as error:
                    yield reader.end(FinishReason.ERROR, _why(error, self.address))
                    return
                if line is None:
                    if turn.cancelled.is_set():
                        yield reader.end(FinishReason.CANCELLED)
                    else:
                        yield reader.end(
                            FinishReason.ERROR, "the server ended the answer before it was complete"
                        )
                    return
                for event in reader.push(line):
                    turn.answer_id = reader.answer_id
                    if isinstance(event, Finished) and turn.cancelled.is_set():
                        event = reader.end(FinishReason.CANCELLED)
                    yield event
                turn.answer_id = reader.answer_id
        finally:
            with contextlib.suppress(httpx2.HTTPError):
                await response.aclose()

    async def _get(self, path: str) -> tuple[int, Mapping[str, Any]]:
        import httpx2

        try:
            async with self._http.stream("GET", path) as response:
                return response.status_code, await _read_json(response)
        except httpx2.HTTPError as error:
            raise _Unreachable.of(self.address, error) from None

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        import httpx2

        try:
            async with self._http.stream("POST", path, json=body) as response:
                answer = await _read_json(response)
                if response.status_code != 200:
                    raise _error_of(response.status_code, answer, self.address)
                return answer
        except httpx2.HTTPError as error:
            raise _Unreachable.of(self.address, error) from None


@dataclass(frozen=True)
class ServerStatus:
    """What a server says of itself in few words."""

    state: str
    """As /health has it, or ``no answer``."""
    running: int | None = None
    waiting: int | None = None


async def ask_status(address: str, api_key: str | None, timeout_s: float) -> ServerStatus:
    """The state of one of our servers; never raises for one that does not answer."""
    client = HttpClient(address, api_key=api_key, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            _, health = await client._get("health")
            state = str(health.get("status", "unknown"))
            status, answer = await client._get("v1/edge/status")
            if status != 200:
                return ServerStatus(state)
            stats = wire.engine_stats(answer)
            return ServerStatus(state, stats.running, stats.waiting)
    except (EdgeLLMError, TimeoutError):
        return ServerStatus("no answer")
    finally:
        await client.close()


class _Unreachable(UnavailableError):
    @classmethod
    def of(cls, address: str, error: Exception) -> _Unreachable:
        return cls(f"the server at {address} cannot be reached: {error or type(error).__name__}")


def _open_http(address: str, api_key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    if address.startswith("unix:"):
        transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix:"))
        return httpx2.AsyncClient(
            transport=transport,
            base_url="http://localhost/",
            headers=headers,
            timeout=timeout,
            trust_env=False,
        )
    if not address.startswith(("http://", "https://")):
        raise BadInputError(
            f"{address!r} is no address of a server: write http://HOST:PORT, https://... or unix:/PATH"
        )
    base = address.rstrip("/").removesuffix("/v1")
    try:
        return httpx2.AsyncClient(base_url=base + "/", headers=headers, timeout=timeout)
    except (httpx2.InvalidURL, ValueError) as error:
        raise BadInputError(f"{address!r} is no address of a server: {error}") from None


async def _first_of(work: asyncio.Future[Any], cancelled: asyncio.Event, wait_s: float) -> bool:
    """Waits for the work; False when it was cancelled and the work did not end within ``wait_s`` after."""
    cancel = asyncio.ensure_future(cancelled.wait())
    try:
        await asyncio.wait({work, cancel}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and wait_s:
            await asyncio.wait({work}, timeout=wait_s)
        return work.done()
    finally:
        cancel.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(BaseException):
                await work


async def _lines(response: httpx2.Response) -> AsyncIterator[str]:
    """The lines of an event stream, bounded; EngineError for one without an end."""
    held = b""
    async for piece in response.aiter_raw():
        held += piece
        *lines, held = held.split(b"\n")
        if len(held) > MAX_LINE_BYTES:
            raise EngineError("the server sent a line without an end")
        for line in lines:
            yield line.rstrip(b"\r").decode("utf-8", "replace")
    if held:
        yield held.decode("utf-8", "replace")


async def _read_json(response: httpx2.Response) -> Mapping[str, Any]:
    """The object of an answer; what is none becomes one with the text as its error."""
    data = b""
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > MAX_LINE_BYTES:
            raise UnavailableError("the server's answer is too long")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, Mapping):
        return found
    return {"error": {"message": data[:MAX_ERROR_BYTES].decode("utf-8", "replace").strip()[:300]}}


def _error_of(status: int, answer: Mapping[str, Any], address: str) -> EdgeLLMError:
    """What a server's refusal is to a user here."""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    text = str(message or f"status {status}")
    if status in (401, 403):
        return PermissionDeniedError(f"the server at {address} refuses: {text}")
    if status == 404:
        return NotFoundError(f"the server at {address}: {text}")
    if status in (429, 503):
        return UnavailableError(f"the server at {address} cannot answer now: {text}")
    if status < 500:
        return BadInputError(text)
    return EngineError(f"the server at {address} failed: {text}")


def _why(error: Exception, address: str) -> str:
    if isinstance(error, EngineError):
        return str(error)
    return f"the connection to the server at {address} broke off: {error or type(error).__name__}"
