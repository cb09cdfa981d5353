"""Chat without a screen: one answer as text or JSON lines, and a conversation in lines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cli.errors import INTERRUPTED, tell
from edgellm.cli.output import Output, counted
from edgellm.cli.piped_text import write_text
from edgellm.cli.terminal_text import TerminalText
from edgellm.contracts import (
    ChatBackend,
    ChatEvent,
    ChatMessage,
    ConstraintSpec,
    Delta,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    Queued,
    SamplingParams,
)
from edgellm_models.errors import EdgeLLMError, EngineError, Notice

if TYPE_CHECKING:
    from edgellm.cli.chat import Opening

LINE_PROMPT = "> "


class AnswerText:
    """The answer on standard output: as it is into a pipe, made safe on a terminal."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._cleaner = TerminalText()
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        self._parts.append(text)
        write_text(sys.stdout, self._cleaner.push(text) if self._on_terminal else text)

    def end(self) -> None:
        """Ends the line, so that a prompt or the next program starts on its own."""
        if self._on_terminal:
            write_text(sys.stdout, self._cleaner.finish())
        if not self.text.endswith("\n"):
            write_text(sys.stdout, "\n")


class Answer:
    """One exchange with a backend. Ctrl-C ends it and keeps what has come; a second Ctrl-C does not wait."""

    def __init__(self, on_event: Callable[[ChatEvent], None]) -> None:
        self._on_event = on_event
        self.finished: Finished | None = None
        self.interrupted = False

    async def run(
        self,
        backend: ChatBackend,
        conversation_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        constraint: ConstraintSpec | None = None,
    ) -> None:
        """Streams the answer into ``on_event``. Raises what the backend raises."""
        loop = asyncio.get_running_loop()
        cancels: set[asyncio.Task[None]] = set()

        def interrupt() -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            cancels.add(asyncio.ensure_future(backend.cancel(conversation_id)))

        # Not on Windows or outside of the main thread: there KeyboardInterrupt ends the run.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            stream = backend.stream_chat(conversation_id, messages, sampling, constraint=constraint)
            async for event in stream:
                if isinstance(event, Finished):
                    self.finished = event
                self._on_event(event)
        finally:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)


def conversation(system: str) -> list[ChatMessage]:
    return [ChatMessage("system", system)] if system else []


# --- one answer ---


def answer_once(opening: Opening, system: str, prompt: str, output: Output, *, as_json: bool) -> int:
    """Loads the model, prints the answer to ``prompt`` and returns the exit code."""
    notices: list[Notice] = []

    def on_notice(notice: Notice) -> None:
        notices.append(notice)
        if not as_json:
            output.notice(notice)

    runtime, sampling = opening.load(on_notice)
    try:
        backend = runtime.client(kv_policy=opening.kv_policy)
        messages = [*conversation(system), ChatMessage("user", prompt)]
        load = {"import_s": runtime.times.import_s, "load_s": runtime.times.load_s}
        return asyncio.run(
            print_answer(
                backend,
                messages,
                sampling,
                output,
                notices,
                constraint=opening.constraint,
                as_json=as_json,
                load=load,
            )
        )
    finally:
        runtime.close()


async def print_answer(
    backend: ChatBackend,
    messages: Sequence[ChatMessage],
    sampling: SamplingParams,
    output: Output,
    notices: list[Notice],
    *,
    constraint: ConstraintSpec | None = None,
    as_json: bool = False,
    load: dict[str, float] | None = None,
) -> int:
    """One answer from an open backend. ``notices`` holds those so far and gets the new ones.

    EngineError when the answer broke off; what has come by then is printed.
    """
    shown = AnswerText()
    collected: list[str] = []

    def on_event(event: ChatEvent) -> None:
        if isinstance(event, NoticeEvent):
            notices.append(event.notice)
        if isinstance(event, Delta):
            collected.append(event.text)
        if as_json:
            if not isinstance(event, Finished):
                output.json(event_object(event))
        elif isinstance(event, Delta):
            shown.add(event.text)
        elif isinstance(event, NoticeEvent):
            output.notice(event.notice)

    answer = Answer(on_event)
    try:
        await answer.run(backend, uuid.uuid4().hex, messages, sampling, constraint)
    finally:
        if not as_json and collected:
            shown.end()
    finished = answer.finished
    if finished is None:
        raise EngineError("the answer ended without an end event")
    if as_json:
        output.json(final_object("".join(collected), finished, notices, load or {}))
    else:
        _note_end(finished, sampling, notices, output)
    if finished.reason is FinishReason.ERROR:
        raise EngineError(f"the answer broke off: {finished.error}")
    return INTERRUPTED if answer.interrupted else 0


def event_object(event: ChatEvent) -> dict[str, Any]:
    """One line of ``--json`` while the answer streams."""
    match event:
        case Delta():
            line: dict[str, Any] = {"type": "delta", "text": event.text, "token_ids": event.token_ids}
            if event.reasoning:
                line["reasoning"] = event.reasoning
            if event.tool_call is not None:
                line["tool_call"] = event.tool_call
            return line
        case Prefill():
            return {"type": "prefill", "done": event.done, "total": event.total, "cached": event.cached}
        case Queued():
            return {"type": "queued", "position": event.position}
        case NoticeEvent():
            return {"type": "notice", "kind": event.notice.kind, "detail": event.notice.detail}
        case Finished():
            return {"type": "finished", "finish_reason": event.reason}


def final_object(
    text: str, finished: Finished, notices: Sequence[Notice], load: dict[str, float]
) -> dict[str, Any]:
    """The last line of ``--json``."""
    timings = finished.timings
    found = {
        "type": "finished",
        "text": text,
        "finish_reason": finished.reason,
        "usage": finished.usage,
        "timings": {
            "ttft_s": timings.ttft_s,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
            "queued_s": timings.queued_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            **load,
        },
        "draft": finished.draft,
        "seed": finished.seed,
        "notices": list(notices),
    }
    if finished.error is not None:
        found["error"] = finished.error
    return found


# --- a conversation in lines ---


def converse(opening: Opening, system: str, output: Output) -> int:
    """Loads the model and talks in lines until Ctrl-D (0) or Ctrl-C at the prompt (130)."""
    runtime, sampling = opening.load(output.notice)
    try:
        return line_mode(
            runtime.client(kv_policy=opening.kv_policy),
            sampling,
            system,
            output,
            constraint=opening.constraint,
        )
    finally:
        runtime.close()


def line_mode(
    backend: ChatBackend,
    sampling: SamplingParams,
    system: str,
    output: Output,
    read: Callable[[], str] | None = None,
    constraint: ConstraintSpec | None = None,
) -> int:
    """The conversation itself. ``read`` returns the next line, raises EOFError at the end."""
    read_line = read or _reader()
    info = backend.info()
    output.note(
        f"{info.name} · {info.quantization} · "
        "/quit or Ctrl-D leaves, Ctrl-C stops an answer, /new starts over"
    )
    messages, conversation_id = conversation(system), uuid.uuid4().hex
    with asyncio.Runner() as runner:
        while True:
            try:
                text = read_line()
            except EOFError:
                _end_line()
                return 0
            except KeyboardInterrupt:
                _end_line()
                return INTERRUPTED
            command = text.strip()
            if not command:
                continue
            if command == "/quit":
                return 0
            if command == "/new":
                messages, conversation_id = conversation(system), uuid.uuid4().hex
                output.note("a new conversation")
                continue
            if command.startswith("/") and not command.startswith("//"):
                output.note(f"{command.split()[0]} is no command here: /new, /quit; // sends a slash")
                continue
            text = text.replace("//", "/", 1) if command.startswith("//") else text
            messages.append(ChatMessage("user", text))
            reply = runner.run(_exchange(backend, conversation_id, messages, sampling, output, constraint))
            if reply:
                messages.append(ChatMessage("assistant", reply))
            else:
                messages.pop()


async def _exchange(
    backend: ChatBackend,
    conversation_id: str,
    messages: Sequence[ChatMessage],
    sampling: SamplingParams,
    output: Output,
    constraint: ConstraintSpec | None,
) -> str:
    """Prints one answer and returns its text; a failure is a line, not the end of the conversation."""
    shown = AnswerText()
    notices: list[Notice] = []

    def on_event(event: ChatEvent) -> None:
        if isinstance(event, Delta):
            shown.add(event.text)
        elif isinstance(event, NoticeEvent):
            notices.append(event.notice)
            output.notice(event.notice)

    answer = Answer(on_event)
    error: str | None = None
    try:
        await answer.run(backend, conversation_id, messages, sampling, constraint)
    except EdgeLLMError as failure:
        error = str(failure)
    finally:
        shown.end()
    if answer.finished is not None and answer.finished.reason is FinishReason.ERROR:
        error = answer.finished.error or "the engine failed"
    if error is not None:
        output.note(f"edgellm: {error}")
    elif answer.interrupted:
        output.note("stopped")
    if answer.finished is not None:
        _note_end(answer.finished, sampling, notices, output)
    return shown.text


def _note_end(
    finished: Finished, sampling: SamplingParams, notices: Sequence[Notice], output: Output
) -> None:
    """What cut the answer, unless a notice said it already, and the seed that was drawn for it."""
    limit = sampling.max_new_tokens
    if finished.reason is FinishReason.LENGTH and all(notice.kind != "context_full" for notice in notices):
        if limit is not None and finished.usage.completion_tokens >= limit:
            output.note(f"note: the answer was cut at {counted(limit, 'token')}; --max-tokens N allows more")
        else:
            output.note("note: the answer was cut: the context is full; --ctx N allows more")
    if sampling.seed is None and sampling.temperature > 0 and finished.usage.completion_tokens:
        output.note(f"note: seed {finished.seed}")


def _reader() -> Callable[[], str]:
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for input())
        return lambda: input(LINE_PROMPT)

    def read() -> str:
        # The answers go to a file or program, the prompt to the person.
        tell(LINE_PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def _end_line() -> None:
    tell("\n")
