"""The screen's engine: ``edgellm serve`` on a private socket in a process of its own, and its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import EdgeLLMError, Notice, UnavailableError

if TYPE_CHECKING:
    from edgellm.cli.chat_kv import ChatKV
    from edgellm.cli.runtime import OnNotice
    from edgellm.client.http_client import HttpClient
    from edgellm.contracts import (
        ChatEvent,
        ChatMessage,
        ConstraintSpec,
        EngineStats,
        ModelInfo,
        SamplingParams,
    )

END_GRACE_S = 3.0
"""How long the process may take to end before it is killed."""
MAX_LINE = 4000
"""Characters of one line of the process that are looked at."""


class EngineProcess:
    """A server that belongs to this process and ends with it."""

    def __init__(self, arguments: Sequence[str], socket: Path, on_notice: OnNotice) -> None:
        """Starts ``edgellm serve`` with ``arguments`` on ``socket``; what it says of itself goes to
        ``on_notice``. UnavailableError when it cannot be started."""
        self.socket = socket
        self._on_notice = on_notice
        self._said: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()
        self._closing = False
        command = [
            sys.executable, "-m", "edgellm", "serve", "--uds", str(socket), "--parent-pid", str(os.getpid()),
            "--grace", "0", "--json", *arguments,
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C on the terminal is the screen's
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise UnavailableError(f"the engine's process could not be started: {error}") from None
        self._is_ready = False
        self._threads = [
            threading.Thread(target=self._read_output, name="engine-output", daemon=True),
            threading.Thread(target=self._read_errors, name="engine-errors", daemon=True),
            threading.Thread(target=self._watch, name="engine-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError, AttributeError):
                if json.loads(line[:MAX_LINE]).get("event") == "ready":
                    self._is_ready = True
                    self._ready.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.strip()[:MAX_LINE]
            if text:
                self._said.append(text)
                if not text.startswith(("error", "Traceback")) and not self._closing:
                    self._on_notice(Notice("engine", text.removeprefix("note: ").removeprefix("notice: ")))

    def _watch(self) -> None:
        code = self._process.wait()
        was_ready = self._is_ready
        self._ready.set()
        if was_ready and not self._closing:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            detail = f"the engine (process {self.pid}) {how}; the chat is safe, /restart starts it again"
            self._on_notice(Notice("engine_gone", detail))

    def wait_ready(self) -> None:
        """Returns when the model is loaded; raises what the process died of, with its exit code."""
        self._ready.wait()
        if self._is_ready:
            return
        code = self._process.wait()
        for thread in self._threads[:2]:
            thread.join(timeout=1.0)
        last = next((line for line in reversed(self._said)), "")
        text = last.removeprefix("error: ") or f"the engine's process ended with {code} before it was ready"
        raise _error_of(code)(text)

    def stop(self) -> None:
        """Ends the process; one that does not listen is killed."""
        self._closing = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _error_of(code: int) -> type[EdgeLLMError]:
    """The kind of error that has this exit code."""
    from edgellm_models import errors

    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EdgeLLMError)
    ]
    return next((kind for kind in kinds if kind.exit_code == code), UnavailableError)


class OwnedEngine:
    """A contracts.ChatBackend: an HttpClient, and the process that ends with it."""

    def __init__(self, client: HttpClient, process: EngineProcess) -> None:
        self._client = client
        self._process = process
        self._answers: Sequence[str] = ()

    # --- KV of saved chats ---

    async def take_up(self, conversation_id: str, tokens: int) -> Sequence[Notice]:
        """See contracts.KeepsChats. A file that is not there (any more) is no surprise: nothing is said."""
        notices: list[Notice] = []
        await self._chat_kv(notices).load(self, conversation_id, tokens)
        return [notice for notice in notices if notice.kind != "kv_missing"]

    async def put_by(
        self, conversation_id: str, messages: Sequence[ChatMessage], tokens: int
    ) -> Sequence[Notice]:
        """See contracts.KeepsChats."""
        notices: list[Notice] = []
        answers = [m.content for m in messages if m.role == "assistant" and isinstance(m.content, str)]
        self._answers = answers
        await self._chat_kv(notices).save(self, conversation_id, tokens)
        return notices

    @staticmethod
    def _chat_kv(notices: list[Notice]) -> ChatKV:
        from edgellm.cli.chat_kv import ChatKV
        from edgellm.cli.saved_chats import kv_files

        return ChatKV(kv_files(), notices.append)

    async def save_chat(self, conversation_id: str, path: Path) -> int:
        """See cli.chat_kv.SavesKV; the engine's process knows the same path."""
        return await self._client.save_chat(conversation_id, self._answers)

    async def load_chat(self, conversation_id: str, path: Path) -> int:
        """See cli.chat_kv.SavesKV."""
        return await self._client.load_chat(conversation_id)

    # --- ChatBackend ---

    def info(self) -> ModelInfo:
        return self._client.info()

    def stats(self) -> EngineStats:
        return self._client.stats()

    def stream_chat(
        self,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: ConstraintSpec | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatEvent]:
        return self._client.stream_chat(
            conversation_id, messages, sampling, tools, constraint, template_variables
        )

    async def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        return await self._client.count_tokens(messages)

    async def cancel(self, conversation_id: str) -> None:
        await self._client.cancel(conversation_id)

    async def close(self) -> None:
        with contextlib.suppress(EdgeLLMError):
            await self._client.close()
        await asyncio.to_thread(self._process.stop)
